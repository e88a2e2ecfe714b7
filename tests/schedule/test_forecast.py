"""The forecast of samples, tokens, sizes and the learning rate."""

import time
from random import Random

from megatron.schedule.batch_size import (
    BatchSizeSchedule,
    ConstantBatchSize,
    RampupBatchSize,
    StepBatchSize,
    Unit,
)
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.position import Forecast

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


def test_the_iteration_that_reaches_tokens_is_that_of_the_loop():
    """Random batch sizes, lengths, tokens and limits."""
    random = Random(0)
    constant = ConstantBatchSize(4)
    ramp = RampupBatchSize(2, 2, 60, 8)
    units: tuple[Unit, ...] = ("samples", "tokens")
    early = 0
    for _ in range(2000):
        steps: list[tuple[int, Unit, int]] = [
            (0, "samples", 2),
            (random.randint(1, 50), "samples", 3),
        ]
        steps.append((random.randint(510, 900), random.choice(units), random.randint(4, 9)))
        sizes: list[BatchSizeSchedule] = [constant, ramp, StepBatchSize(tuple(steps))]
        size = random.choice(sizes)
        linear = Curriculum("fixed_linear", 2, 10, random.randint(1, 30), difficulty_step=2)
        discrete = Curriculum("fixed_discrete", 2, 10, difficulties=(10, 2, 6), max_steps=(3, 20))
        curriculum = random.choice([None, linear, discrete])
        forecast = Forecast(size, LR, seq_length=10, curriculum=curriculum)
        tokens = random.randint(0, 3000)
        limit = random.randint(0, 80)
        expected = next(
            point.iteration
            for point in forecast._iterate_counters()
            if point.consumed_tokens >= tokens or point.iteration >= limit
        )
        assert forecast.find_iteration_reaching_tokens(tokens, limit) == expected
        early += expected < limit
    assert 400 < early < 1600


def test_many_iterations_are_not_counted_one_by_one():
    forecast = Forecast(ConstantBatchSize(1), LR, seq_length=2048)
    start = time.process_time()
    assert forecast.find_iteration_reaching_tokens(10**14, limit=10**12) == -(-(10**14) // 2048)
    assert time.process_time() - start < 1
