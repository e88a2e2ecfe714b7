"""Learning rates equal those of a published run and each style's formula."""

import dataclasses
import json
import math
from typing import Any

import pytest

from megatron.base.errors import ConfigError
from megatron.schedule.batch_size import RampupBatchSize
from megatron.schedule.lr import DecayStyle, LRSchedule, list_schedule_differences
from megatron.schedule.position import Forecast

TR11 = LRSchedule(
    max_lr=6e-5, min_lr=6e-6, style="cosine", warmup_steps=183_105, decay_steps=200_000_000
)


@pytest.mark.parametrize(
    ("iteration", "logged"),
    [
        (12_695, "5.969E-05"),
        (31_214, "5.279E-05"),
        (42_780, "4.475E-05"),
        (45_000, "4.298E-05"),
        (85_376, "1.150E-05"),
    ],
)
def test_logged_rates_of_tr11(iteration, logged):
    forecast = Forecast(RampupBatchSize(192, 16, 9_765_625, 2048), TR11, seq_length=2048)
    assert f"{forecast.predict([iteration])[0].lr:.3E}" == logged


def test_first_step_of_the_warm_up_has_rate_zero():
    assert TR11.get_lr(0) == 0.0
    assert TR11.get_lr(183_105) == 6e-5
    assert TR11.get_lr(183_105 // 2) == pytest.approx(3e-5, rel=1e-4)


@pytest.mark.parametrize(
    ("style", "middle"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)]
)
def test_styles_from_warm_up_to_end(style, middle):
    schedule = LRSchedule(1.0, 0.1, style, warmup_steps=100, decay_steps=300)
    end = 1.0 if style == "constant" else 0.1
    rates = [schedule.get_lr(s) for s in (0, 50, 100, 200, 300, 301, 10**9)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, middle, end, end, end])


def test_quarter_of_a_cosine():
    schedule = LRSchedule(1.0, 0.0, "cosine", warmup_steps=0, decay_steps=400)
    assert schedule.get_lr(100) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize(
    ("style", "halfway"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * math.sqrt(0.5) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_constant_and_then_decays(style, halfway):
    schedule = LRSchedule(
        1.0, 0.2, "WSD", warmup_steps=10, decay_steps=100, wsd_decay_steps=20, wsd_decay_style=style
    )
    assert [schedule.get_lr(s) for s in (5, 10, 50, 80)] == [0.5, 1.0, 1.0, 1.0]
    assert schedule.get_lr(90) == pytest.approx(0.2 + 0.8 * halfway)
    assert [schedule.get_lr(100), schedule.get_lr(101)] == pytest.approx([0.2, 0.2])


PEAK, FLOOR, START = 3e-4, 3e-5, 6e-5
WARMUP, END, FINAL = 2_000, 50_000, 10_000
"""Samples: the end of the warm-up, the end of the decay, and the length of WSD's final decay."""


def rate_from(share: float) -> float:
    """Return the rate when `share` of the way from the floor to the peak is left."""
    return FLOOR * (1 - share) + PEAK * share


def part_done(samples: int) -> float:
    """Return how much of WSD's final decay is done, 0 to 1."""
    return max(0.0, 1 - (END - samples) / FINAL)


FORMULAS = {
    ("constant", None): lambda s: PEAK,
    ("linear", None): lambda s: rate_from((END - s) / (END - WARMUP)),
    # cos^2(x / 2) is half of 1 + cos(x).
    ("cosine", None): lambda s: rate_from(math.cos(math.pi / 2 * (s - WARMUP) / 48_000) ** 2),
    # 1 - sin(x) is 1 + cos(pi / 2 + x).
    ("half-cosine", None): lambda s: rate_from(
        1 + math.cos(math.pi / 2 * (1 + (s - WARMUP) / 48_000))
    ),
    ("inverse-square-root", None): lambda s: max(FLOOR, PEAK * (WARMUP / s) ** 0.5),
    ("WSD", "linear"): lambda s: rate_from(1 - part_done(s)),
    ("WSD", "cosine"): lambda s: rate_from(math.cos(math.pi / 2 * part_done(s)) ** 2),
    ("WSD", "exponential"): lambda s: rate_from(math.exp2(1 - part_done(s)) - 1),
    ("WSD", "minus_sqrt"): lambda s: rate_from(1 - part_done(s) ** 0.5),
}
"""Style, and style of the final decay -> the rate after the warm-up, up to the end."""


@pytest.mark.parametrize("style", FORMULAS)
@pytest.mark.parametrize("start", [0.0, START])
def test_each_style_equals_its_formula(style: tuple[str, str | None], start: float) -> None:
    schedule = LRSchedule(
        PEAK,
        FLOOR,
        style[0],  # type: ignore[arg-type]
        warmup_steps=WARMUP,
        decay_steps=END,
        wsd_decay_steps=FINAL,
        wsd_decay_style=style[1] or "exponential",  # type: ignore[arg-type]
        warmup_init=start,
    )
    for samples in (0, 1, 777, 1_999, WARMUP):
        expected = start * (1 - samples / WARMUP) + PEAK * samples / WARMUP
        assert schedule.get_lr(samples) == pytest.approx(expected, rel=1e-12)
    for samples in (2_001, 3_000, 26_000, 39_999, 40_000, 40_001, 42_500, 45_000, 49_999, END):
        expected = FORMULAS[style](samples)
        assert schedule.get_lr(samples) == pytest.approx(expected, rel=1e-12), samples
    for samples in (END + 1, 10 * END):
        assert schedule.get_lr(samples) == (PEAK if style[0] == "constant" else FLOOR)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_a_decoupled_rate_is_another_schedule_with_the_same_state(style: DecayStyle) -> None:
    both = LRSchedule(
        0.5,
        0.05,
        style,
        warmup_steps=100,
        decay_steps=400,
        wsd_decay_steps=50,
        warmup_init=0.01,
        decoupled_max_lr=2.0,
        decoupled_min_lr=0.2,
    )
    alone = dataclasses.replace(both, decoupled_max_lr=None, decoupled_min_lr=None)
    other = dataclasses.replace(alone, max_lr=2.0, min_lr=0.2)
    decoupled = both.decoupled
    assert decoupled is not None
    assert alone.decoupled is None
    for samples in (0, 1, 50, 100, 101, 390, 400, 401):
        assert both.get_lr(samples) == alone.get_lr(samples)
        assert decoupled.get_lr(samples) == other.get_lr(samples)
    assert decoupled.get_lr(50) == pytest.approx(0.01 + 1.99 / 2)
    assert list_schedule_differences(both, alone) == [
        "--decoupled-lr: 2.0 here, None in the checkpoint",
        "--decoupled-min-lr: 0.2 here, None in the checkpoint",
    ]


def test_the_inverse_square_root_reaches_its_floor_before_the_end() -> None:
    schedule = LRSchedule(PEAK, PEAK / 4, "inverse-square-root", 2_000, 50_000)
    assert schedule.get_lr(16 * 2_000 - 1) > PEAK / 4
    assert schedule.get_lr(16 * 2_000 + 1) == PEAK / 4
    # Without a warm-up the peak is at the first sample, as in Megatron-LM.
    alone = dataclasses.replace(schedule, min_lr=0.0, warmup_steps=0)
    assert [alone.get_lr(s) for s in (0, 1, 4, 100)] == pytest.approx([PEAK, PEAK, PEAK / 2, 3e-5])
    # A decay in tokens sets its end, and the rate still depends on the samples.
    by_tokens = dataclasses.replace(schedule, decay_tokens=9_000)
    assert by_tokens.get_lr(8_000, 8_999, 2_000) == pytest.approx(PEAK / 2)
    assert by_tokens.get_lr(8_000, 9_001, 2_000) == PEAK / 4


def test_wsd_without_a_final_decay_is_constant_to_its_end() -> None:
    """As in Apertus' long-context phases, whose decay is a run of its own."""
    schedule = LRSchedule(PEAK, FLOOR, "WSD", WARMUP, END, wsd_decay_steps=0)
    assert [schedule.get_lr(s) for s in (WARMUP, 26_000, END)] == [PEAK] * 3
    assert schedule.get_lr(END + 1) == FLOOR


def test_published_final_decays_begin_at_their_steps() -> None:
    apertus = LRSchedule(
        1.1e-4,
        1.1e-5,
        "WSD",
        warmup_steps=4_096_000,
        decay_steps=3_662_109_375,
        wsd_decay_steps=403_905_806,
        wsd_decay_style="minus_sqrt",
    )

    def count_samples(step: int) -> int:
        return 1024 * min(step, 1_678_000) + 2048 * max(0, step - 1_678_000)

    assert apertus.get_lr(count_samples(2_429_919)) == 1.1e-4
    assert apertus.get_lr(count_samples(2_429_920)) < 1.1e-4
    # The last whole batch is 703 samples short of the end.
    assert apertus.get_lr(count_samples(2_627_139)) == pytest.approx(1.1e-5, rel=1e-5)
    batch = 192 * 3
    smollm3 = LRSchedule(
        2e-4,
        0.0,
        "WSD",
        warmup_steps=2_000 * batch,
        decay_steps=4_720_000 * batch,
        wsd_decay_steps=522_000 * batch,
        wsd_decay_style="linear",
    )
    assert smollm3.get_lr(4_198_000 * batch) == 2e-4
    assert smollm3.get_lr(4_198_001 * batch) == pytest.approx(2e-4 * (1 - 1 / 522_000), rel=1e-12)
    assert smollm3.get_lr(4_720_000 * batch) == 0.0


def test_decay_by_tokens_counts_from_the_end_of_warm_up():
    schedule = LRSchedule(
        1.0, 0.0, "linear", warmup_steps=100, decay_steps=10**6, decay_tokens=5000
    )
    assert schedule.get_lr(50, lr_tokens=400) == 0.5  # warm-up stays in samples
    assert schedule.get_lr(104, lr_tokens=1000, warmup_tokens=1000) == 1.0
    assert schedule.get_lr(200, lr_tokens=3000, warmup_tokens=1000) == 0.5
    assert schedule.get_lr(300, lr_tokens=5001, warmup_tokens=1000) == 0.0
    # Here the warm-up takes all tokens.
    assert schedule.get_lr(300, lr_tokens=5000, warmup_tokens=5000) == 0.0


def test_end_of_warm_up_is_found_within_a_batch():
    schedule = LRSchedule(
        1.0, 0.0, "linear", warmup_steps=100, decay_steps=10**6, decay_tokens=5000
    )
    warmup_tokens = 0
    # Batches of 32 reach the 100 samples between steps 3 and 4.
    for step in range(1, 6):
        warmup_tokens = schedule.compute_warmup_tokens(32 * step, 320 * step, warmup_tokens)
    assert warmup_tokens == 320 * 4
    assert schedule.compute_warmup_tokens(99, 990, 0) == 0
    assert schedule.compute_warmup_tokens(100, 1000, 0) == 1000
    assert dataclasses.replace(schedule, warmup_steps=0).compute_warmup_tokens(32, 320, 0) == 0


def test_schedule_can_be_stored_as_json():
    schedule = dataclasses.replace(TR11, style="WSD", wsd_decay_steps=1000, warmup_steps=0.5)
    assert LRSchedule(**json.loads(json.dumps(dataclasses.asdict(schedule)))) == schedule


def test_schedule_of_an_earlier_checkpoint_starts_its_warm_up_from_0() -> None:
    stored = dataclasses.asdict(TR11)
    for added_later in ("warmup_init", "decoupled_max_lr", "decoupled_min_lr"):
        del stored[added_later]
    assert LRSchedule(**stored) == TR11
    (difference,) = list_schedule_differences(
        dataclasses.replace(TR11, warmup_init=1e-6), LRSchedule(**stored)
    )
    assert difference == "--lr-warmup-init: 1e-06 here, 0.0 in the checkpoint"


def test_differences_name_the_flags():
    assert list_schedule_differences(TR11, TR11) == []
    other = dataclasses.replace(TR11, max_lr=3e-5, decay_steps=100_000_000)
    lr, decay = list_schedule_differences(TR11, other)
    assert lr == "--lr: 6e-05 here, 3e-05 in the checkpoint"
    assert "--lr-decay-samples" in decay
    assert "200000000 here, 100000000 in the checkpoint" in decay


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_lr": 1e-3}, "--min-lr 0.001 must be between 0 and --lr 6e-05"),
        ({"warmup_init": 1e-4}, "--lr-warmup-init 0.0001 must be between 0 and --lr 6e-05"),
        (
            {"decoupled_max_lr": 1e-6, "decoupled_min_lr": 6e-6},
            "--decoupled-min-lr 6e-06 .* must be between 0 and --decoupled-lr 1e-06",
        ),
        (
            {"decoupled_max_lr": 1e-5, "decoupled_min_lr": 0.0, "warmup_init": 2e-5},
            "--lr-warmup-init 2e-05 must be at most --decoupled-lr 1e-05",
        ),
        ({"warmup_steps": -1}, "must not be negative"),
        ({"warmup_steps": 200_000_000}, "must be shorter than its decay"),
        ({"decay_steps": 0}, "must end at 1 or later"),
        ({"decay_tokens": 0}, "--lr-decay-tokens 0 must be at least 1"),
        ({"style": "WSD"}, "needs the length of its final decay"),
        ({"style": "WSD", "wsd_decay_steps": 10**9}, "at least 0 and at most 200000000"),
        (
            {"style": "WSD", "wsd_decay_steps": 1, "decay_tokens": 10**9},
            "leave out --lr-decay-tokens",
        ),
    ],
)
def test_invalid_schedules_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TR11, **changes)


def test_final_decay_of_wsd_must_not_reach_into_the_warm_up():
    longest = 200_000_000 - 183_105
    schedule = dataclasses.replace(TR11, style="WSD", wsd_decay_steps=longest)
    schedule.check_decay_after_warmup()
    assert schedule.get_lr(183_105) == 6e-5
    # A checkpoint of an earlier version may have such a schedule, so it can be constructed.
    long = dataclasses.replace(schedule, wsd_decay_steps=longest + 1)
    with pytest.raises(ConfigError, match="final decay of 199816896 samples") as failure:
        long.check_decay_after_warmup()
    assert "must not reach into the warm-up of 183105 samples" in str(failure.value)
    assert f"use at most {longest}" in str(failure.value)


def test_all_problems_of_a_schedule_are_reported_together():
    with pytest.raises(ConfigError) as failure:
        dataclasses.replace(TR11, min_lr=1.0, warmup_steps=-1, style="WSD")
    assert len(str(failure.value).splitlines()) == 3


def test_prolonged_constant_rate_has_no_difference() -> None:
    short = LRSchedule(1e-3, 0.0, "constant", warmup_steps=10, decay_steps=100)
    long = dataclasses.replace(short, decay_steps=200)
    assert list_schedule_differences(short, long) == []
    linear = dataclasses.replace(long, style="linear")
    assert len(list_schedule_differences(short, linear)) == 2


BY_TIME: dict[str, Any] = {"max_lr": 1.0, "min_lr": 0.1, "decay_steps": 1, "train_seconds": 1000.0}


@pytest.mark.parametrize(
    ("style", "middle"),
    [
        ("linear", 0.55),
        ("cosine", 0.55),
        ("half-cosine", 0.1 + 0.9 * (1 - math.sqrt(0.5))),
        ("WSD", 1.0),
        ("inverse-square-root", math.sqrt(100 / 550)),
    ],
)
def test_styles_by_time(style, middle):
    """Warm-up in the first 10 % of 1000 s. The counters of samples have no influence."""
    schedule = LRSchedule(
        **BY_TIME, style=style, warmup_steps=0, warmup_fraction=0.1, wsd_decay_fraction=0.2
    )
    rates = [schedule.get_lr(10**6, 10**9, seconds=s) for s in (0.0, 50.0, 100.0, 550.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, middle])
    assert schedule.get_lr(5, seconds=1000.0) == 0.1
    assert schedule.get_lr(5, seconds=999.99) == pytest.approx(
        math.sqrt(0.1) if style == "inverse-square-root" else 0.1, abs=1e-3
    )


def test_a_constant_rate_by_time_stays_constant():
    schedule = LRSchedule(**BY_TIME, style="constant", warmup_steps=0, warmup_fraction=0.1)
    assert [schedule.get_lr(0, seconds=s) for s in (50.0, 100.0, 1000.0)] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_by_time(shape):
    schedule = LRSchedule(
        **BY_TIME, style="WSD", warmup_steps=0, wsd_decay_fraction=0.2, wsd_decay_style=shape
    )
    by_samples = LRSchedule(1.0, 0.1, "WSD", 0, 1000, None, 200, shape)
    for done in (0, 799, 800, 801, 900, 1000):
        assert schedule.get_lr(0, seconds=float(done)) == by_samples.get_lr(done)


def test_a_warm_up_in_samples_is_followed_by_a_decay_in_time():
    schedule = LRSchedule(**BY_TIME, style="linear", warmup_steps=100)
    assert schedule.get_lr(50, seconds=7.0) == 0.5
    assert not schedule.is_warm(99)
    assert schedule.is_warm(100)
    # The warm-up ended after 200 s, so the decay is halfway after 600 s.
    assert schedule.get_lr(101, seconds=600.0, warmup_seconds=200.0) == pytest.approx(0.55)
    # The time is up before the warm-up is.
    assert schedule.get_lr(50, seconds=1000.0) == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "linear", "warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0 must be below 1"),
        ({"style": "WSD"}, "needs the length of its final decay: --lr-wsd-decay-fraction"),
        (
            {"style": "WSD", "warmup_fraction": 0.5, "wsd_decay_fraction": 0.6},
            "must not exceed 1 together",
        ),
    ],
)
def test_wrong_schedules_by_time(changes, message):
    with pytest.raises(ConfigError, match=message):
        LRSchedule(**BY_TIME, warmup_steps=0, **changes)


def test_another_time_is_another_schedule():
    here = LRSchedule(**BY_TIME, style="linear", warmup_steps=0)
    there = dataclasses.replace(here, train_seconds=500.0)
    assert list_schedule_differences(here, there) == [
        "--train-time in seconds: 1000.0 here, 500.0 in the checkpoint"
    ]


# ---- A quadratic warm-up, and a decay that begins with training ----


def test_a_quadratic_warm_up_is_steepest_at_its_start():
    schedule = LRSchedule(
        1.0,
        0.1,
        "constant",
        warmup_steps=100,
        decay_steps=300,
        warmup_init=0.2,
        warmup_style="quadratic",
    )
    # 0.2 + 0.8 (1 - (1 - x)^2) at x = 0, 1/4, 1/2 and 1.
    assert [schedule.get_lr(s) for s in (0, 25, 50, 100, 101)] == pytest.approx(
        [0.2, 0.55, 0.8, 1.0, 1.0]
    )


@pytest.mark.parametrize(
    ("style", "quarter", "middle"),
    [
        ("linear", 0.775, 0.55),
        ("cosine", 0.55 + 0.45 * math.sqrt(0.5), 0.55),
        ("half-cosine", 1 - 0.9 * math.sin(math.pi / 8), 1 - 0.9 * math.sqrt(0.5)),
    ],
)
def test_a_decay_from_the_start_counts_from_zero(style: DecayStyle, quarter: float, middle: float):
    schedule = LRSchedule(1.0, 0.1, style, warmup_steps=100, decay_steps=400, decay_from_start=True)
    rates = [schedule.get_lr(s) for s in (0, 10, 50, 100, 200, 400, 401)]
    # In the first half of the warm-up, the warm-up is below the decay. At its end, it is above.
    assert rates == pytest.approx([0.0, 0.1, 0.5, quarter, middle, 0.1, 0.1])


def test_a_decay_from_the_start_counts_tokens_and_seconds_too():
    by_tokens = LRSchedule(
        1.0, 0.0, "linear", 10, 100, decay_tokens=1000, warmup_style="quadratic",
        decay_from_start=True,
    )  # fmt: skip
    # The first tokens of a warm-up are known only when it is over. The decay needs none.
    assert by_tokens.get_lr(5, 50, 0) == pytest.approx(0.75)
    assert by_tokens.get_lr(20, 500, 100) == pytest.approx(0.5)
    by_time = LRSchedule(
        1.0, 0.0, "linear", 0, 1, train_seconds=100.0, warmup_fraction=0.1, decay_from_start=True
    )
    assert by_time.get_lr(1, seconds=5.0) == pytest.approx(0.5)
    assert by_time.get_lr(1, seconds=50.0) == pytest.approx(0.5)


@pytest.mark.parametrize("style", ["constant", "inverse-square-root", "WSD"])
def test_a_decay_from_the_start_needs_a_style_that_falls(style: DecayStyle):
    with pytest.raises(ConfigError, match="--lr-decay-from-start is not possible"):
        LRSchedule(1.0, 0.0, style, 10, 100, wsd_decay_steps=10, decay_from_start=True)


def test_a_schedule_of_an_earlier_version_is_linear_and_decays_after_the_warm_up():
    fields = dataclasses.asdict(TR11)
    del fields["warmup_style"], fields["decay_from_start"]
    assert LRSchedule(**fields) == TR11
