"""The simulated pipeline against formulas, and against what a schedule must obey."""

import random
from itertools import pairwise

import pytest

from megatron.extras.planner.cost.pipeline_simulation import (
    StageTimes,
    estimate_pipeline_seconds,
    list_visits,
    measure_seconds,
    simulate_pipeline,
)
from megatron.schedule.pipeline_schedule import choose_schedule

SIZES = [(8, 4, 1), (9, 4, 1), (64, 8, 1), (8, 4, 2), (16, 4, 4), (24, 6, 16), (70, 35, 3)]


def make_even(p: int, v: int) -> StageTimes:
    return StageTimes([1 / v] * (p * v), [2 / v] * (p * v))


@pytest.mark.parametrize(("m", "p", "v"), SIZES)
def test_bubble_of_even_stages(m, p, v):
    schedule = choose_schedule(m, p, v)
    seconds = measure_seconds(schedule, make_even(p, v))
    assert seconds / (3 * m) - 1 == pytest.approx((p - 1) / (v * m))
    assert estimate_pipeline_seconds(schedule, make_even(p, v)) == pytest.approx(seconds)


@pytest.mark.parametrize(("m", "p", "v"), [(3, 4, 1), (10, 4, 2), (5, 4, 2), (9, 6, 3)])
def test_bubble_of_other_schedules(m, p, v):
    """GPipe, rounds of other sizes, and looped BFS, by the formula of `megatron.schedule`."""
    schedule = choose_schedule(m, p, v)
    seconds = measure_seconds(schedule, make_even(p, v))
    assert 1 - 3 * m / seconds == pytest.approx(schedule.bubble)


@pytest.mark.parametrize(("m", "p", "v"), [*SIZES, (3, 4, 1), (5, 4, 2), (4, 1, 1)])
def test_visits_are_complete_and_keep_the_promised_number_in_flight(m, p, v):
    schedule = choose_schedule(m, p, v)
    for rank in range(p):
        visits = list_visits(schedule, rank)
        assert len(set(visits)) == len(visits) == 2 * m * v
        held = most = 0
        for visit in visits:
            held += 1 if visit.forward else -1
            most = max(most, held)
        assert most == schedule.count_in_flight(rank)


@pytest.mark.parametrize("blocking", [False, True])
def test_uneven_stages_wait_for_what_they_need(blocking):
    generator = random.Random(7)
    schedule = choose_schedule(12, 4, 3)
    times = StageTimes(
        [generator.uniform(0.5, 2) for _ in range(12)],
        [generator.uniform(1, 4) for _ in range(12)],
        0.25,
        blocking,
    )
    pipeline = simulate_pipeline(schedule, times)
    ends = {}
    for events in pipeline:
        for earlier, later in pairwise(events):
            assert later.start >= earlier.end
        for event in events:
            # Of a blocking message, the end of the visit contains the message.
            waited = 0.0 if blocking else 0.25
            ends[(event.visit.forward, event.visit.microbatch, event.visit.stage)] = (
                event.end + waited
            )
    for events in pipeline:
        for event in events:
            _, microbatch, stage = event.visit.forward, event.visit.microbatch, event.visit.stage
            if event.visit.forward and stage:
                assert event.start >= ends[(True, microbatch, stage - 1)] - 1e-12
            if not event.visit.forward and stage < 11:
                assert event.start >= ends[(False, microbatch, stage + 1)] - 1e-12


@pytest.mark.parametrize(("m", "p", "v"), [(97, 4, 1), (64, 4, 2), (120, 6, 1)])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_long_step_is_extrapolated_exactly(m, p, v, blocking):
    generator = random.Random(3)
    schedule = choose_schedule(m, p, v)
    times = StageTimes(
        [generator.uniform(0.9, 1.1) for _ in range(p * v)],
        [generator.uniform(1.9, 2.1) for _ in range(p * v)],
        0.05,
        blocking,
    )
    exact = measure_seconds(schedule, times)
    assert estimate_pipeline_seconds(schedule, times) == pytest.approx(exact, rel=0.005)
