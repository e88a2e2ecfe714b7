"""Batch-size schedules against the numbers of published runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import ConfigError
from megatron.schedule.batch_size import (
    BatchSizeSchedule,
    ConstantBatchSize,
    RampupBatchSize,
    StepBatchSize,
    Unit,
    bare_thresholds_as_samples,
    count_iterations_for_samples,
    parse_step_schedule,
)
from megatron.schedule.position import Progress, Steps

TR11 = RampupBatchSize(start=192, increment=16, ramp_samples=9_765_625, size=2048)
TR1 = RampupBatchSize(start=16, increment=16, ramp_samples=5_000_000, size=1024)


def count_samples(schedule: BatchSizeSchedule, iterations: int, seq_length: int) -> int:
    """Return the samples of a run's first iterations."""
    return Steps(schedule, seq_length).find_iteration(Progress(), iterations).samples


@pytest.mark.parametrize(
    ("schedule", "train_samples", "iterations"),
    [(TR11, 220_000_000, 115_311), (TR1, 300_000_000, 311_541)],
    ids=["tr11", "tr1"],
)
def test_iterations_of_the_published_runs(schedule, train_samples, iterations):
    assert count_iterations_for_samples(schedule, train_samples, 2048) == iterations


@pytest.mark.parametrize(
    ("schedule", "iteration", "consumed"),
    [
        (TR11, 12_695, 9_841_584),
        (TR11, 31_214, 47_768_496),
        (TR11, 85_376, 158_692_272),
        (TR11, 94_768, 177_927_088),
        (TR1, 29_020, 10_698_064),
        (TR1, 33_240, 15_019_344),
        (TR1, 43_680, 25_709_904),
    ],
)
def test_consumed_samples_of_the_published_runs(schedule, iteration, consumed):
    assert count_samples(schedule, iteration, 2048) == consumed


def test_iterations_of_a_resumed_run_are_the_remaining_ones():
    consumed = count_samples(TR11, 5000, 2048)
    assert (
        count_iterations_for_samples(TR11, 220_000_000, 2048, consumed, consumed * 2048)
        == 115_311 - 5000
    )


def test_ramp_is_evaluated_before_the_step():
    ramp = RampupBatchSize(start=2, increment=2, ramp_samples=12, size=8)
    sizes = []
    consumed = 0
    for _ in range(7):
        sizes.append(ramp.get_size(consumed, 0))
        consumed += sizes[-1]
    # The size grows every 4 samples: at 0 and 2, at 4, at 8. At 14 the ramp is over.
    assert sizes == [2, 2, 4, 6, 8, 8, 8]


def test_ramp_reaches_the_global_size_at_its_end_exactly():
    ramp = RampupBatchSize(start=4, increment=4, ramp_samples=100, size=12)
    sizes = [ramp.get_size(consumed, 0) for consumed in (0, 49, 50, 99, 100, 101)]
    assert sizes == [4, 4, 8, 8, 12, 12]


def test_ramp_divides_in_floating_point_as_the_reference():
    # In floating point, 116 / (116 / 7) is a little below 7.
    ramp = RampupBatchSize(start=1, increment=1, ramp_samples=116, size=8)
    assert [ramp.get_size(consumed, 0) for consumed in (116, 117)] == [7, 8]


def test_upcoming_sizes_of_a_ramp_begin_at_the_position():
    ramp = RampupBatchSize(start=2, increment=2, ramp_samples=12, size=8)
    assert list(ramp.iterate_upcoming(0, 0, 1)) == [2, 4, 6, 8]
    assert list(ramp.iterate_upcoming(8, 0, 1)) == [6, 8]
    assert list(ramp.iterate_upcoming(13, 0, 1)) == [8]
    assert len(list(TR11.iterate_upcoming(0, 0, 2048))) == 117


def test_ramp_from_the_global_size_is_constant():
    ramp = RampupBatchSize(start=8, increment=2, ramp_samples=100, size=8)
    assert [ramp.get_size(consumed, 0) for consumed in (0, 50, 500)] == [8, 8, 8]
    assert list(ramp.iterate_upcoming(0, 0, 1)) == [8]


def test_training_can_end_within_the_ramp():
    ramp = RampupBatchSize(start=2, increment=2, ramp_samples=12, size=8)
    # 2 + 2 + 4 samples fit into 9, and 6 more do not.
    assert count_iterations_for_samples(ramp, train_samples=9, seq_length=1) == 3
    assert count_samples(ramp, 3, 1) == 8


@pytest.mark.parametrize(
    ("ramp", "text"),
    [
        ((192, 17, 1000, 2048), "INCREMENT must divide 2048 - 192 = 1856"),
        ((4096, 16, 1000, 2048), "START must not exceed the global batch size"),
        ((0, 16, 1000, 2048), "at least 1"),
        ((16, 16, 0, 2048), "at least 1"),
    ],
)
def test_invalid_ramps_are_errors(ramp, text):
    with pytest.raises(ConfigError, match=text):
        RampupBatchSize(*ramp)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 40),
    st.integers(1, 5000),
    st.integers(0, 6000),
)
def test_counted_iterations_of_a_ramp_have_the_same_size(start, increment, steps, ramp, consumed):
    schedule = RampupBatchSize(start, increment, ramp, start + steps * increment)
    size = schedule.get_size(consumed, 0)
    count = schedule.count_iterations_to_next(consumed)
    if count is None:
        assert size == schedule.final
        return
    assert count >= 1
    sizes = {schedule.get_size(consumed + number * size, 0) for number in range(count)}
    assert sizes == {size}


def test_constant_size():
    assert ConstantBatchSize(32).get_size(10**9, 10**12) == ConstantBatchSize(32).final == 32
    assert list(ConstantBatchSize(32).iterate_upcoming(5, 5, 5)) == [32]
    assert count_iterations_for_samples(ConstantBatchSize(32), 100, 8) == 3
    assert count_samples(ConstantBatchSize(32), 3, 8) == 96
    with pytest.raises(ConfigError, match="--global-batch-size 0"):
        ConstantBatchSize(0)


def test_step_schedule_in_tokens():
    schedule = parse_step_schedule(["0:768 250B:1536"], 2048)
    assert schedule == StepBatchSize(((0, "samples", 768), (122_070_312 * 2048, "tokens", 1536)))
    assert schedule.get_size(10**9, 122_070_312 * 2048 - 1) == 768
    assert schedule.get_size(0, 122_070_312 * 2048) == schedule.final == 1536
    assert list(schedule.iterate_upcoming(0, 0, 2048)) == [768, 1536]
    assert list(schedule.iterate_upcoming(0, 10**12, 2048)) == [1536]


def test_step_schedule_in_samples_and_mixed():
    schedule = parse_step_schedule(["0:8 100samples:16 1.5B:32"], 1)
    assert [
        schedule.get_size(99, 0),
        schedule.get_size(100, 0),
        schedule.get_size(100, 1_500_000_000),
    ] == [8, 16, 32]
    mixed = parse_step_schedule(["0:1 1_000samples:2 2T:4"], 2)
    assert mixed.steps[1:] == ((1000, "samples", 2), (2 * 10**12, "tokens", 4))


def test_step_schedule_of_megatron_lm_changes_at_its_samples():
    """Megatron-LM rounds 61,035,156,250 tokens down to 29,802,322 samples of 2048 tokens."""
    schedule = parse_step_schedule(["0:768 61035156250tokens:1536"], 2048)
    assert schedule.get_size(29_802_321, 29_802_321 * 2048) == 768
    assert schedule.get_size(29_802_322, 29_802_322 * 2048) == 1536
    assert schedule.get_size(30_000_000, 30_000_000 * 2048) == 1536


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["0:1K"], [(0, "samples", 1000)]),
        (["0:1.5k"], [(0, "samples", 1500)]),
        (
            ["0:8,1M:16,2M:32"],
            [(0, "samples", 8), (10**6, "tokens", 16), (2 * 10**6, "tokens", 32)],
        ),
        (
            ["0:8", "1M:16, 2M:32"],
            [(0, "samples", 8), (10**6, "tokens", 16), (2 * 10**6, "tokens", 32)],
        ),
        (["0:8", "1_010tokens:16"], [(0, "samples", 8), (1000, "tokens", 16)]),
        (["0:8", "2.5e4tokens:16"], [(0, "samples", 8), (25_000, "tokens", 16)]),
        (["0:8", "3Msamples:16"], [(0, "samples", 8), (3 * 10**6, "samples", 16)]),
        (["0:8", "0.29Ktokens:16"], [(0, "samples", 8), (200, "tokens", 16)]),
    ],
    ids=str,
)
def test_spellings_of_a_step_schedule(words, steps):
    assert parse_step_schedule(words, 100).steps == tuple(steps)


def test_bare_thresholds_get_the_unit_samples():
    spelled = bare_thresholds_as_samples(["0:8 1_000:16", "2000:1K,3M:64 5samples:7 x:9"])
    assert spelled == ("0:8", "1_000samples:16", "2000samples:1K", "3M:64", "5samples:7", "x:9")


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 40)),
        max_size=4,
        unique_by=lambda step: step[0],
    ),
    first=st.integers(1, 40),
    seq_length=st.integers(1, 7),
    train_samples=st.integers(0, 900),
    tokens=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_counted_iterations_equal_those_of_a_loop(steps, first, seq_length, train_samples, tokens):
    unit: Unit = "tokens" if tokens else "samples"
    schedule = StepBatchSize(
        ((0, "samples", first), *((threshold, unit, size) for threshold, size in sorted(steps)))
    )
    samples = iterations = 0
    while samples + (size := schedule.get_size(samples, samples * seq_length)) <= train_samples:
        samples += size
        iterations += 1
    assert count_iterations_for_samples(schedule, train_samples, seq_length) == iterations
    assert count_samples(schedule, iterations, seq_length) == samples


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with the threshold 0"),
        ("10M:8", "must begin with the threshold 0"),
        ("0:8 10:16", "'10:16' has no unit.*10tokens .*10samples"),
        (
            "0:768 61035156250:1536",
            "'61035156250:1536' has no unit.*61035156250tokens .*61035156250samples",
        ),
        ("0:8 1e5:16", "'1e5:16' has no unit.*1e5tokens"),
        ("0:8 10tokens:1.5", "'10tokens:1.5' is not THRESHOLD:SIZE"),
        ("0:8 1.2.3K:16", "is not THRESHOLD:SIZE"),
        ("0:8 _M:16", "is not THRESHOLD:SIZE"),
        ("0:8 -1M:16", "is not THRESHOLD:SIZE"),
        ("0:8 1K:16", "thresholds must rise, but 0 tokens follows 0 samples .*samples of 2048"),
        ("0:8 100samples:16 100K:32", "thresholds must rise, but 98304 tokens follows 100 samples"),
        ("0:8 x:16", "'x:16' is not THRESHOLD:SIZE"),
        ("0:8 250G:16", "'250G:16' is not THRESHOLD:SIZE"),
        ("0:8 100", "'100' is not THRESHOLD:SIZE"),
        (
            "0:8 200samples:16 100samples:32",
            "thresholds must rise, but 100 samples follows 200 samples",
        ),
        ("0:0", "at least 1"),
    ],
)
def test_invalid_step_schedules_are_errors(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_step_schedule([text], 2048)
