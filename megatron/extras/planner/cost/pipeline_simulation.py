"""A pipeline schedule, simulated event by event.

Invariant: each rank runs its visits in the order of its schedule, one after the other. A visit
starts when the rank is free and what it needs has arrived. Stages may take different times.

The orders are those of the schedules that `megatron.schedule.pipeline_schedule` chooses, with its
sources.

`build_trace` writes a step for Perfetto or chrome://tracing, in the JSON object format of Chrome's
Trace Event Format.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from megatron.schedule.pipeline_schedule import PipelineSchedule


@dataclass(frozen=True)
class Visit:
    """One pass of one microbatch through one stage."""

    forward: bool
    microbatch: int
    stage: int
    """Number of the stage. Stage i is on rank i % ranks."""


class PipelineEvent(NamedTuple):
    """A visit with its time."""

    visit: Visit
    start: float
    end: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds that stages need for one microbatch, by number of the stage."""

    forward: Sequence[float]
    backward: Sequence[float]
    message: float = 0.0
    """Seconds of a message between neighbouring stages of different ranks."""
    blocking: bool = False
    """Whether the sender waits until its message has arrived."""


@lru_cache(maxsize=512)
def list_visits(schedule: PipelineSchedule, rank: int) -> tuple[Visit, ...]:
    """Return the visits of a pipeline rank in the order in which it runs them."""
    m = schedule.microbatches
    p = schedule.ranks
    v = schedule.stages_per_rank
    forwards = _list_forwards(schedule, rank)
    # The backward pass runs through the stages of the rank in reverse.
    backwards = [
        Visit(False, visit.microbatch, p * (v - 1 - (visit.stage - rank) // p) + rank)
        for visit in forwards
    ]
    if schedule.name in ("1F1B", "one stage"):
        ahead = min(p - rank, m)
    elif schedule.name == "interleaved 1F1B":
        ahead = schedule.count_in_flight(rank)
    else:
        ahead = v * m
    # `ahead` forward passes start before the first backward pass. Then both alternate.
    order = forwards[:ahead]
    for index, backward in enumerate(backwards):
        order.append(backward)
        if ahead + index < len(forwards):
            order.append(forwards[ahead + index])
    return tuple(order)


def _list_forwards(schedule: PipelineSchedule, rank: int) -> list[Visit]:
    """Return the forward passes of a rank in order.

    Rounds of microbatches pass all stages of the rank before the next round starts.
    """
    m = schedule.microbatches
    p = schedule.ranks
    v = schedule.stages_per_rank
    size = m
    if schedule.name == "interleaved 1F1B":
        size = m // max(1, m // p)
    return [
        Visit(True, microbatch, rank + p * stage)
        for first in range(0, m, size)
        for stage in range(v)
        for microbatch in range(first, min(first + size, m))
    ]


def simulate_pipeline(schedule: PipelineSchedule, times: StageTimes) -> list[list[PipelineEvent]]:
    """Return the events of a step, by rank and in the order of their starts."""
    return [
        [
            PipelineEvent(visit, *span)
            for visit, span in zip(list_visits(schedule, rank), done, strict=True)
        ]
        for rank, done in enumerate(_simulate_spans(schedule, times))
    ]


def measure_seconds(schedule: PipelineSchedule, times: StageTimes) -> float:
    """Return the time from the first start of a step to its last end."""
    return max(done[-1][1] for done in _simulate_spans(schedule, times))


class _Step(NamedTuple):
    """A visit as numbers, for the speed of the simulation.

    Results are numbered by direction, stage and microbatch, and durations by direction and stage.
    """

    result: int
    needed: int | None
    """The result that the visit waits for."""
    receiver: int | None
    """The rank that its result is sent to."""
    duration: int


@lru_cache(maxsize=256)
def _list_steps(schedule: PipelineSchedule, rank: int) -> tuple[_Step, ...]:
    """Return the visits of a rank, in order."""
    p = schedule.ranks
    m = schedule.microbatches
    stages = p * schedule.stages_per_rank
    steps = []
    for visit in list_visits(schedule, rank):
        stage = visit.stage
        duration = stage
        if not visit.forward:
            duration += stages
        result = duration * m + visit.microbatch
        # A forward pass goes one stage on, and a backward pass one stage back.
        direction = 2 * visit.forward - 1
        needed: int | None = result - direction * m
        if visit.forward and stage == 0:
            needed = None
        elif not visit.forward and stage + 1 == stages:
            # The loss is computed in the forward pass of the last stage.
            needed = stage * m + visit.microbatch
        receiver: int | None = (stage + direction) % p
        # A pass ends at the first or last stage, and a rank sends nothing to itself.
        if receiver == rank or not 0 <= stage + direction < stages:
            receiver = None
        steps.append(_Step(result, needed, receiver, duration))
    return tuple(steps)


def _simulate_spans(
    schedule: PipelineSchedule, times: StageTimes
) -> list[list[tuple[float, float]]]:
    """Return start and end of each visit, by rank and in the order of `list_visits`.

    Raises:
        ValueError: The ranks wait for each other, so the schedule never ends.
    """
    p = schedule.ranks
    orders = [_list_steps(schedule, rank) for rank in range(p)]
    durations = [*times.forward, *times.backward]
    spans: list[list[tuple[float, float]]] = [[] for _ in range(p)]
    # Time at which each rank has finished its last visit.
    free = [0.0] * p
    # A negative time means that a result does not exist yet.
    arrived = [-1.0] * (len(durations) * schedule.microbatches)
    # A rank is simulated further whenever one of its neighbours has finished a visit.
    waiting = list(range(p))
    while waiting:
        rank = waiting.pop()
        order = orders[rank]
        done = spans[rank]
        now = free[rank]
        woken = set()
        for index in range(len(done), len(order)):
            result, needed, receiver, duration = order[index]
            ready = 0.0
            if needed is not None:
                ready = arrived[needed]
            if ready < 0:
                break
            start = max(now, ready)
            now = start + durations[duration]
            arrived[result] = now
            if receiver is not None:
                arrived[result] = now + times.message
                woken.add(receiver)
                if times.blocking:
                    now += times.message
            done.append((start, now))
        free[rank] = now
        waiting.extend(woken)
    if any(len(done) < len(order) for done, order in zip(spans, orders, strict=True)):
        raise ValueError(f"the visits of {schedule} wait for each other")
    return spans


def estimate_pipeline_seconds(schedule: PipelineSchedule, times: StageTimes) -> float:
    """Return the seconds of a step, as `measure_seconds` does, in a bounded time.

    A long step repeats the same pattern. Its middle is therefore extrapolated from two shorter
    steps whose lengths differ by one round.
    """
    p = schedule.ranks
    m = schedule.microbatches
    # One rank never waits.
    if p == 1:
        return m * (sum(times.forward) + sum(times.backward))
    enough = 4 * p
    # Rounds of another size than p would change with the number of microbatches.
    regular = schedule.name == "1F1B" or (schedule.name == "interleaved 1F1B" and m % p == 0)
    if m <= enough + p or not regular:
        return measure_seconds(schedule, times)
    rest = (m - enough) % p
    rounds = (m - enough - rest) // p
    short = replace(schedule, microbatches=enough + rest)
    longer = replace(schedule, microbatches=enough + rest + p)
    # What the first round and the last one add is the same in both steps.
    first = measure_seconds(short, times)
    return first + rounds * (measure_seconds(longer, times) - first)


def build_trace(
    pipeline: Sequence[Sequence[PipelineEvent]], ends: Sequence[tuple[str, float]]
) -> dict[str, Any]:
    """Return the trace of a step, with one row for each pipeline rank.

    Args:
        pipeline: The simulation of its pipeline.
        ends: Names and seconds of what follows the pipeline, one after the other.
    """
    events: list[dict[str, Any]] = []
    for rank, visits in enumerate(pipeline):
        # Metadata that names the row.
        name = {"name": f"pipeline rank {rank}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        for visit, begin, end in visits:
            # Perfetto colours events by their names and categories.
            direction = "forward" if visit.forward else "backward"
            drawn = _draw(f"{direction} {visit.microbatch}", direction, rank, begin, end - begin)
            drawn["args"] = {"microbatch": visit.microbatch, "stage": visit.stage}
            events.append(drawn)
        # All ranks wait for the slowest one.
        start = max(events_of_rank[-1].end for events_of_rank in pipeline)
        for name_of_end, seconds in ends:
            if seconds > 0:
                events.append(_draw(name_of_end, name_of_end, rank, start, seconds))
            start += seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _draw(name: str, category: str, rank: int, start: float, seconds: float) -> dict[str, Any]:
    """Return an event of a trace. Its times are microseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": 1e6 * start,
        "dur": 1e6 * seconds,
        "pid": 0,
        "tid": rank,
        "args": {},
    }
