"""The choice is one that torch's schedules accept; its costs are those of walking through torch's own order of work."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from megatron.schedule.pipeline import choose_schedule, compute_bubble_fraction

TORCH: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "looped BFS": ScheduleLoopedBFS,
}
SIZES = [(m, p, v) for p in (2, 3, 4, 8) for v in (1, 2, 3) for m in range(1, 3 * p + 3)]

Work = tuple[str, int, int]
"""('F' or 'B', stage, microbatch)"""


def in_torch(name: str, m: int, p: int, v: int) -> Any:
    """torch's schedule of that name, on stages that compute nothing. Raises ValueError where torch refuses."""
    stages = [
        SimpleNamespace(
            group_size=p,
            group_rank=0,
            stage_index=i * p,
            num_stages=p * v,
            has_backward=False,
            device="cpu",
        )
        for i in range(v)
    ]
    for stage in stages:
        stage.is_first, stage.is_last = stage.stage_index == 0, False
        stage.stage_index_to_group_rank = {i: i % p for i in range(p * v)}
    return TORCH[name](stages if v > 1 else stages[0], m)


def order_1f1b(m: int, p: int, rank: int) -> list[Work]:
    """Warm-up, then one backward and one forward in turn: what Schedule1F1B runs (it has no table of it that holds)."""
    warmup = min(m, p - rank)
    work = [("F", rank, i) for i in range(warmup)]
    for i in range(m):
        work.append(("B", rank, i))
        if warmup + i < m:
            work.append(("F", rank, warmup + i))
    return work


def order(name: str, m: int, p: int, v: int) -> list[list[Work]]:
    """What each rank does, in order."""
    schedule = in_torch(name, m, p, v)
    if name == "1F1B":
        return [order_1f1b(m, p, rank) for rank in range(p)]
    table = schedule.pipeline_order if v > 1 else schedule._get_pipeline_order()
    passes = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    return [
        [
            (passes[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in table[rank]
            if action is not None and action.computation_type.name in passes
        ]
        for rank in range(p)
    ]


def walk(ranks: list[list[Work]], stages: int) -> tuple[float, list[int]]:
    """(idle share of a rank's time, most visits in flight by rank): forward takes 1, backward 2, sending nothing."""
    ends: dict[Work, float] = {}
    clock, flying, peak = [0.0] * len(ranks), [0] * len(ranks), [0] * len(ranks)
    queues = [list(reversed(work)) for work in ranks]
    while any(queues):
        before = len(ends)
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, microbatch = work = queue[-1]
                source = (
                    ("F", stage - 1)
                    if kind == "F"
                    else ("B", stage + 1)
                    if stage + 1 < stages
                    else ("F", stage)
                )
                needed = (*source, microbatch)
                if source[1] >= 0 and needed not in ends:
                    break
                clock[rank] = max(clock[rank], ends.get(needed, 0.0)) + (1 if kind == "F" else 2)
                ends[work] = clock[rank]
                flying[rank] += 1 if kind == "F" else -1
                peak[rank] = max(peak[rank], flying[rank])
                queue.pop()
        assert len(ends) > before, "deadlock"
    return 1 - 1.5 * len(ends) / len(ranks) / max(clock), peak


def test_names():
    assert choose_schedule(4, 1, 1).name == "one stage"
    assert [choose_schedule(m, 4, 1).name for m in (1, 3, 4, 5)] == [
        "GPipe",
        "GPipe",
        "1F1B",
        "1F1B",
    ]
    interleaved = [m for m in range(1, 17) if choose_schedule(m, 4, 2).name == "interleaved 1F1B"]
    assert interleaved == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16]
    assert choose_schedule(9, 4, 2).name == "looped BFS"


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_torch_accepts_the_choice_and_costs_are_as_said(p):
    for m, _, v in (size for size in SIZES if size[1] == p):
        schedule = choose_schedule(m, p, v)
        idle, in_flight = walk(order(schedule.name, m, p, v), p * v)
        assert schedule.bubble == pytest.approx(idle, abs=1e-9), schedule
        assert [schedule.count_in_flight(rank) for rank in range(p)] == in_flight, schedule


def test_the_preferred_schedule_is_left_only_where_torch_refuses_it():
    preferred = {"GPipe": "1F1B", "looped BFS": "interleaved 1F1B"}
    for m, p, v in SIZES:
        name = choose_schedule(m, p, v).name
        if name in preferred:
            with pytest.raises(ValueError, match="microbatches"):
                in_torch(preferred[name], m, p, v)


def test_costs_of_the_papers():
    assert choose_schedule(8, 1, 1).bubble == 0
    assert compute_bubble_fraction(12, 12, 1) == 11 / 23
    for m, p, v in ((8, 4, 1), (8, 4, 2), (64, 8, 4)):
        bubble = compute_bubble_fraction(m, p, v)
        assert bubble / (1 - bubble) == pytest.approx(
            (p - 1) / (v * m)
        )  # over ideal time, as the paper has it
    assert (
        compute_bubble_fraction(1, 4, 2) == 0.75
    )  # a single microbatch is on one of the ranks at any time
    p, v, layers = 4, 2, 16
    assert choose_schedule(16, p, v).count_in_flight(0) * layers / (p * v) == layers * (
        1 + (p - 1) / (p * v)
    )
    assert [choose_schedule(16, 4, 1).count_in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert choose_schedule(3, 4, 1).count_in_flight(3) == 3
    assert choose_schedule(16, 1, 1).count_in_flight(0) == 1


def test_sentences():
    assert choose_schedule(4, 1, 1).describe(4) == "pipeline: one stage"
    assert choose_schedule(4, 32, 1).describe(16) == (
        "pipeline: GPipe, 4 microbatches for 32 stages: ranks stand idle for 89 % of the time at batch size 16"
    )
    assert choose_schedule(1, 2, 2).describe(1) == (
        "pipeline: interleaved 1F1B, 1 microbatch for 2 ranks of 2 virtual stages: ranks stand idle for 50 % of the time at batch "
        "size 1"
    )


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 2, 0), (4, 1, 2)])
def test_impossible_sizes(sizes):
    with pytest.raises(AssertionError):
        choose_schedule(*sizes)
