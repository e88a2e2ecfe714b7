"""Tests of the search for a loss scale. x is an overflow, a dot is a good step."""

import json
import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
from process_pool import ProcessPool, succeed

from megatron.config.precision import PrecisionConfig
from megatron.engine.base import StepOutcome
from megatron.engine.engine_base import EngineBase
from megatron.engine.loss_scale import LossScale

TR8 = PrecisionConfig(
    fp16=True, initial_loss_scale=2.0**12, min_loss_scale=1.0, loss_scale_window=500, hysteresis=2
)
MEGATRON = PrecisionConfig(fp16=True)
SHORT = PrecisionConfig(
    fp16=True, initial_loss_scale=8.0, min_loss_scale=2.0, loss_scale_window=3, hysteresis=2
)
PROMPT = PrecisionConfig(
    fp16=True, initial_loss_scale=8.0, min_loss_scale=2.0, loss_scale_window=2, hysteresis=1
)


def walk(scale: LossScale, steps: str) -> list[float]:
    """Return the scale after each step."""
    after = []
    for step in steps:
        if step == "x":
            scale.record_overflow()
        else:
            scale.record_applied()
        after.append(scale.scale)
    return after


@pytest.mark.parametrize(
    ("config", "steps", "scales"),
    [
        (SHORT, "...", [8, 8, 16]),
        (SHORT, "......", [8, 8, 16, 16, 16, 32]),
        (SHORT, "x", [8]),
        (SHORT, "xxx", [8, 4, 2]),
        (SHORT, "xxxxx", [8, 4, 2, 2, 2]),
        (SHORT, "x.x.x", [8, 8, 4, 4, 2]),  # a good step alone does not restore hysteresis
        (SHORT, "xx...xx", [8, 4, 4, 4, 8, 8, 4]),  # a doubling does
        (SHORT, "..x..x...", [8, 8, 8, 8, 8, 4, 4, 4, 8]),  # an overflow restarts the window
        (PROMPT, "xx..x", [4, 2, 2, 4, 2]),
    ],
)
def test_the_scale_follows_the_steps(
    config: PrecisionConfig, steps: str, scales: list[float]
) -> None:
    assert walk(LossScale(config), steps) == scales


@pytest.mark.parametrize(
    ("config", "steps", "exponent"),
    [
        (TR8, "." * 499, 12),
        (TR8, "." * 500, 13),
        (TR8, "." * 1500, 15),
        (TR8, "x" + "." * 499 + "x", 11),
        (TR8, "x" + "." * 500 + "x", 13),
        (TR8, "x" * 13, 0),
        (TR8, "x" * 40, 0),
        (MEGATRON, "." * 999, 32),
        (MEGATRON, "." * 1000, 33),
        (MEGATRON, "x" * 17, 16),
        (MEGATRON, "x" * 17 + "." * 1000, 17),
        (MEGATRON, "x" * 17 + "." * 1000 + "x", 17),
    ],
)
def test_published_settings_reach_their_scales(
    config: PrecisionConfig, steps: str, exponent: int
) -> None:
    assert walk(LossScale(config), steps)[-1] == 2.0**exponent


def test_a_search_ends_at_the_minimum() -> None:
    """The first step that no other scale could have saved is one at the minimum."""
    scale = LossScale(SHORT)
    assert [scale.record_overflow() for _ in range(5)] == [True, True, True, False, False]
    walk(scale, "...")
    assert scale.scale == 4.0
    assert scale.record_overflow()


def test_the_minimum_bounds_an_uneven_scale() -> None:
    scale = LossScale(
        PrecisionConfig(fp16=True, initial_loss_scale=5.0, min_loss_scale=4.0, hysteresis=1)
    )
    assert scale.record_overflow()
    assert scale.scale == 4.0
    assert not scale.record_overflow()


def test_a_static_scale_does_not_change() -> None:
    scale = LossScale(
        PrecisionConfig(fp16=True, loss_scale=128.0, loss_scale_window=1, hysteresis=1)
    )
    assert walk(scale, "x...x") == [128.0] * 5
    assert not scale.record_overflow()


def test_a_search_continues_from_its_state() -> None:
    steps = "x..x...xx....x....xx"
    expected = walk(LossScale(SHORT), steps)
    for saved_after in range(len(steps)):
        first = LossScale(SHORT)
        second = LossScale(SHORT)
        walk(first, steps[:saved_after])
        second.load(json.loads(json.dumps(first.state())))
        assert walk(second, steps[saved_after:]) == expected[saved_after:], saved_after


def test_a_loaded_state_is_limited_by_the_new_configuration() -> None:
    before = LossScale(
        PrecisionConfig(fp16=True, initial_loss_scale=8.0, loss_scale_window=100, hysteresis=5)
    )
    walk(before, "." * 50)
    after = LossScale(
        PrecisionConfig(fp16=True, min_loss_scale=16.0, loss_scale_window=10, hysteresis=1)
    )
    after.load(before.state())
    assert walk(after, ".x") == [32.0, 16.0]


def test_a_state_is_ignored_between_static_and_dynamic() -> None:
    static = LossScale(PrecisionConfig(fp16=True, loss_scale=128.0))
    dynamic = LossScale(SHORT)
    walk(dynamic, "xx")
    static.load(dynamic.state())
    assert static.scale == 128.0
    again = LossScale(SHORT)
    again.load(static.state())
    assert walk(again, "xx") == [8.0, 4.0]
    assert static.state() == {"dynamic": False, "scale": 128.0}


def walk_deepspeed(steps: str) -> list[float]:
    """Return the scale of DeepSpeed's own search after each step, with the settings of PROMPT."""
    import torch.distributed as dist

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    deepspeed.init_distributed(dist_init_required=False)
    scaler = DynamicLossScaler(8.0, 2, 2.0, 1, False)
    after = []
    for step in steps:
        scaler.update_scale(step == "x")
        after.append(scaler.cur_scale)
    return after


def test_deepspeeds_own_search_doubles_one_step_later(pool: ProcessPool) -> None:
    """DeepSpeed's search differs from ours as the docstring of `loss_scale.py` states."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    outcomes = pool.run(1, walk_deepspeed, ".....x.....")
    succeed(outcomes)
    assert outcomes[0].value == [8, 8, 16, 16, 32, 16, 16, 16, 32, 32, 64]
    assert walk(LossScale(PROMPT), ".....x.....") == [8, 16, 16, 32, 32, 16, 16, 32, 32, 64, 64]


def test_the_scale_is_described() -> None:
    assert LossScale(PrecisionConfig(fp16=True, loss_scale=12.0)).describe() == "static 12"
    assert LossScale(TR8).describe() == "dynamic, now 4096, at least 1, window 500, hysteresis 2"


@pytest.mark.parametrize(
    ("given", "loss", "expected"),
    [
        (StepOutcome.APPLIED, 1.0, StepOutcome.APPLIED),
        (StepOutcome.NOT_FINITE, 1.0, StepOutcome.OVERFLOW),
        (StepOutcome.NOT_FINITE, math.inf, StepOutcome.NOT_FINITE),
        (StepOutcome.REJECTED, 1.0, StepOutcome.REJECTED),
        (StepOutcome.EMPTY, 0.0, StepOutcome.EMPTY),
    ],
)
def test_only_the_search_for_a_scale_makes_a_dropped_step_an_overflow(
    given: StepOutcome, loss: float, expected: StepOutcome
) -> None:
    engine: Any = SimpleNamespace(_loss_scale=LossScale(TR8))
    result = EngineBase._finish_step(engine, loss, math.inf, given)
    assert (result.outcome, result.loss_scale) == (expected, 4096)
    halves = expected in (StepOutcome.OVERFLOW, StepOutcome.NOT_FINITE)
    assert (engine._loss_scale.state() != LossScale(TR8).state()) == (halves or result.applied)
    static: Any = SimpleNamespace(_loss_scale=LossScale(PrecisionConfig(fp16=True, loss_scale=8)))
    assert EngineBase._finish_step(static, loss, math.inf, given).outcome is given
