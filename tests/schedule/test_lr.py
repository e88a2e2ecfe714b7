"""Learning rates equal those of a published run and each style's formula."""

import dataclasses
import json
import math

import pytest

from megatron.errors import ConfigError
from megatron.schedule.batch_size import RampupBatchSize
from megatron.schedule.lr import LRSchedule, list_schedule_differences
from megatron.schedule.progress import Forecast

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
        ({"warmup_steps": -1}, "must not be negative"),
        ({"warmup_steps": 200_000_000}, "must be shorter than its decay"),
        ({"decay_steps": 0}, "must end at 1 or later"),
        ({"decay_tokens": 0}, "--lr-decay-tokens 0 must be at least 1"),
        ({"style": "WSD"}, "needs the length of its final decay"),
        ({"style": "WSD", "wsd_decay_steps": 10**9}, "at least 1 and at most 200000000"),
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
