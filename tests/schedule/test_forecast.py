"""The forecast of samples, tokens, sizes and the learning rate."""

import pytest

from megatron.schedule.batch_size import ConstantBatchSize
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.progress import Forecast

LR = LRSchedule(1.0, 0.0, "linear", warmup_steps=16, decay_steps=100)


def test_points_are_in_the_requested_order():
    forecast = Forecast(ConstantBatchSize(4), LR, seq_length=10)
    points = forecast.predict([3, 0, 3])
    counters = [(p.iteration, p.consumed_samples, p.consumed_tokens) for p in points]
    assert counters == [(3, 12, 120), (0, 0, 0), (3, 12, 120)]
    assert forecast.predict([0])[0].global_batch_size == 4
    assert forecast.predict([0])[0].lr == 0.0


def test_skipped_iterations_consume_samples_and_keep_the_rate():
    forecast = Forecast(ConstantBatchSize(4), LR, seq_length=10, skip_ranges=((2, 3),))
    before, inside, after = forecast.predict([1, 3, 4])
    assert inside.consumed_samples == 12
    assert inside.lr_samples == 4
    assert inside.lr_tokens == 40
    assert inside.lr == before.lr == 0.25
    assert after.consumed_samples == 16
    assert after.lr_samples == 8
    assert after.lr == 0.5


def test_curriculum_consumes_fewer_tokens():
    curriculum = Curriculum("fixed_linear", 2, 10, total_curriculum_step=4, difficulty_step=2)
    lr = LRSchedule(1.0, 0.0, "linear", warmup_steps=6, decay_steps=100, decay_tokens=200)
    forecast = Forecast(ConstantBatchSize(4), lr, seq_length=10, curriculum=curriculum)
    states = forecast.predict([1, 2, 3, 4, 5])
    assert [p.seq_length for p in states] == [4, 6, 8, 10, 10]
    assert [p.consumed_tokens for p in states] == [16, 40, 72, 112, 152]
    assert {p.warmup_tokens for p in states[1:]} == {40}
    assert [p.lr for p in states[1:]] == [1.0, 1 - 32 / 160, 1 - 72 / 160, 1 - 112 / 160]
    assert forecast.find_iteration_reaching_tokens(100, limit=1000) == 4
    assert forecast.find_iteration_reaching_tokens(100, limit=3) == 3


@pytest.mark.parametrize("tokens", [1, 39, 40, 41, 400])
def test_end_by_tokens_without_a_loop_is_that_of_the_loop(tokens: int):
    forecast = Forecast(ConstantBatchSize(4), LRSchedule(1.0, 0.0, "linear", 0, 100), seq_length=10)
    counted = next(c.iteration for c in forecast._iterate_counters() if c.consumed_tokens >= tokens)
    assert forecast.find_iteration_reaching_tokens(tokens, limit=1000) == counted
    assert forecast.find_iteration_reaching_tokens(tokens, limit=1) == 1
    # A published script has this many iterations.
    assert forecast.find_iteration_reaching_tokens(40 * 10**12, limit=10**15) == 10**12
