"""torch accepts the chosen schedule, and its costs equal those of torch's own order of work."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from megatron.schedule.pipeline_schedule import choose_schedule, compute_bubble_fraction

TORCH: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "looped BFS": ScheduleLoopedBFS,
}
SIZES = [(m, p, v) for p in (2, 3, 4, 8) for v in (1, 2, 3) for m in range(1, 3 * p + 3)]

Work = tuple[str, int, int]
"""('F' or 'B', stage, microbatch)"""


def build_torch_schedule(name: str, m: int, p: int, v: int) -> Any:
    """Return torch's schedule of that name, on stages that compute nothing.

    Raises:
        ValueError: torch does not accept the numbers.
    """
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
        stage.is_first = stage.stage_index == 0
        stage.is_last = False
        stage.stage_index_to_group_rank = {i: i % p for i in range(p * v)}
    return TORCH[name](stages if v > 1 else stages[0], m)


def order_1f1b(m: int, p: int, rank: int) -> list[Work]:
    """Return what Schedule1F1B runs: warm-up, then one backward and one forward pass in turn.

    torch has no correct table of this order.
    """
    warmup = min(m, p - rank)
    work = [("F", rank, i) for i in range(warmup)]
    for i in range(m):
        work.append(("B", rank, i))
        if warmup + i < m:
            work.append(("F", rank, warmup + i))
    return work


def list_work(name: str, m: int, p: int, v: int) -> list[list[Work]]:
    """Return the work of each rank, in order."""
    schedule = build_torch_schedule(name, m, p, v)
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


def simulate(ranks: list[list[Work]], stages: int) -> tuple[float, list[int]]:
    """Return the idle fraction of a rank's time, and the most visits in flight on each rank.

    A forward pass takes 1, a backward pass takes 2, and sending takes no time.
    """
    ends: dict[Work, float] = {}
    now = [0.0] * len(ranks)
    in_flight = [0] * len(ranks)
    peak = [0] * len(ranks)
    queues = [list(reversed(work)) for work in ranks]
    while any(queues):
        before = len(ends)
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, microbatch = work = queue[-1]
                if kind == "F":
                    source = ("F", stage - 1)
                elif stage + 1 < stages:
                    source = ("B", stage + 1)
                else:
                    source = ("F", stage)
                needed = (*source, microbatch)
                if source[1] >= 0 and needed not in ends:
                    break
                now[rank] = max(now[rank], ends.get(needed, 0.0))
                if kind == "F":
                    now[rank] += 1
                    in_flight[rank] += 1
                else:
                    now[rank] += 2
                    in_flight[rank] -= 1
                ends[work] = now[rank]
                peak[rank] = max(peak[rank], in_flight[rank])
                queue.pop()
        assert len(ends) > before, "deadlock"
    return 1 - 1.5 * len(ends) / len(ranks) / max(now), peak


def test_chosen_schedules():
    assert choose_schedule(4, 1, 1).name == "one stage"
    plain = [choose_schedule(m, 4, 1).name for m in (1, 3, 4, 5)]
    assert plain == ["GPipe", "GPipe", "1F1B", "1F1B"]
    interleaved = [m for m in range(1, 17) if choose_schedule(m, 4, 2).name == "interleaved 1F1B"]
    assert interleaved == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16]
    assert choose_schedule(9, 4, 2).name == "looped BFS"


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_torch_accepts_the_choice_and_has_the_same_costs(p):
    for m, _, v in (size for size in SIZES if size[1] == p):
        schedule = choose_schedule(m, p, v)
        idle, in_flight = simulate(list_work(schedule.name, m, p, v), p * v)
        assert schedule.bubble == pytest.approx(idle, abs=1e-9), schedule
        assert [schedule.count_in_flight(rank) for rank in range(p)] == in_flight, schedule


def test_another_schedule_is_chosen_only_if_torch_refuses_the_preferred_one():
    preferred = {"GPipe": "1F1B", "looped BFS": "interleaved 1F1B"}
    for m, p, v in SIZES:
        name = choose_schedule(m, p, v).name
        if name in preferred:
            with pytest.raises(ValueError, match="microbatches"):
                build_torch_schedule(preferred[name], m, p, v)


def test_costs_equal_those_of_the_papers():
    assert choose_schedule(8, 1, 1).bubble == 0
    assert compute_bubble_fraction(12, 12, 1) == 11 / 23
    for m, p, v in ((8, 4, 1), (8, 4, 2), (64, 8, 4)):
        bubble = compute_bubble_fraction(m, p, v)
        # The paper gives the idle time over the ideal time.
        assert bubble / (1 - bubble) == pytest.approx((p - 1) / (v * m))
    # A single microbatch is on one of the four ranks at any time.
    assert compute_bubble_fraction(1, 4, 2) == 0.75
    p = 4
    v = 2
    layers = 16
    kept_layers = choose_schedule(16, p, v).count_in_flight(0) * layers / (p * v)
    assert kept_layers == layers * (1 + (p - 1) / (p * v))
    assert [choose_schedule(16, 4, 1).count_in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert choose_schedule(3, 4, 1).count_in_flight(3) == 3
    assert choose_schedule(16, 1, 1).count_in_flight(0) == 1


def test_description_of_a_schedule():
    assert choose_schedule(4, 1, 1).describe(4) == "pipeline: one stage"
    plain = choose_schedule(4, 32, 1).describe(16)
    assert "GPipe, 4 microbatches for 32 stages" in plain
    assert "idle for 89 % of the time at batch size 16" in plain
    virtual = choose_schedule(1, 2, 2).describe(1)
    assert "interleaved 1F1B, 1 microbatch for 2 ranks of 2 virtual stages" in virtual
    assert "idle for 50 % of the time at batch size 1" in virtual


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 2, 0), (4, 1, 2)])
def test_invalid_sizes_fail_an_assertion(sizes):
    with pytest.raises(AssertionError):
        choose_schedule(*sizes)
