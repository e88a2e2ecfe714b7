"""Goodput: the share of the wall time of a run in steps that its weights still have."""

from dataclasses import dataclass

import numpy as np

from megatron.operations.chronicle.history import RunHistory

KEPT = "steps that were kept"
UNDONE = "steps that were undone"
DROPPED = "steps without an update"
SAVES = "saves"
EVALUATIONS = "evaluations"
STARTS = "starts"
WAITING = "between launches"
OTHER = "other"


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went."""

    wall_seconds: float
    """Seconds from the start of the first launch to the last record."""
    seconds: dict[str, float]
    """Cause -> its seconds. Their sum is `wall_seconds`."""

    @property
    def share(self) -> float:
        """Share of the wall time in steps that were kept, 0 to 1. It is 0 without any time."""
        return self.compute_share(KEPT)

    def compute_share(self, cause: str) -> float:
        """Return the share of one cause, 0 to 1."""
        if not self.wall_seconds:
            return 0.0
        return self.seconds[cause] / self.wall_seconds


@dataclass(frozen=True)
class _Launch:
    """One launch. All times are seconds since the epoch."""

    begin: float
    loop_start: float
    end: float


def compute_goodput(history: RunHistory) -> Goodput:
    """Return where the wall time went.

    A launch begins when its process reads its configuration. It ends with its last record. If it
    was killed, the time from there to the next launch counts as between launches.
    """
    launches = list_launches(history)
    if not launches:
        return Goodput(0.0, dict.fromkeys(_CAUSES, 0.0))
    columns = history.columns
    seconds = np.nan_to_num(columns["seconds"])
    applied = ~(np.nan_to_num(columns["skipped_iterations"]) > 0)
    wall = launches[-1].end - launches[0].begin
    stops = [event.details for event in history.events if event.kind == "stop"]
    found = {
        KEPT: float(seconds[history.kept & applied].sum()),
        UNDONE: float(seconds[~history.kept].sum()),
        DROPPED: float(seconds[history.kept & ~applied].sum()),
        # The times after the last iteration of a launch are in its stop.
        SAVES: _add(columns["save_seconds"], [stop.get("save_seconds") for stop in stops]),
        EVALUATIONS: _add(
            columns["evaluate_seconds"], [stop.get("evaluate_seconds") for stop in stops]
        ),
        STARTS: sum(launch.loop_start - launch.begin for launch in launches),
        WAITING: wall - sum(launch.end - launch.begin for launch in launches),
    }
    # Clocks of the host may jump, so the rest may be negative.
    found[OTHER] = max(0.0, wall - sum(found.values()))
    return Goodput(sum(found.values()), found)


_CAUSES = (KEPT, UNDONE, DROPPED, SAVES, EVALUATIONS, STARTS, WAITING, OTHER)


def _add(column: np.ndarray, others: list[object]) -> float:
    return float(np.nansum(column)) + sum(
        other for other in others if isinstance(other, int | float)
    )


def list_launches(history: RunHistory) -> list[_Launch]:
    """Return the launches that the chronicle knows, or those of the metrics file without one."""
    starts = [event for event in history.events if event.kind == "start"]
    if starts:
        known = [event.time.timestamp() for event in starts]
        before = [_read_seconds(event.details.get("seconds")) for event in starts]
    else:
        known = history.loop_starts
        before = [0.0] * len(known)
    records = _list_record_times(history)
    loop_starts = np.array(history.loop_starts)
    launches = []
    earlier_end = -np.inf
    for number, (at, seconds) in enumerate(zip(known, before, strict=True)):
        following = known[number + 1] if number + 1 < len(known) else np.inf
        # A record belongs to the launch that was active at its time.
        own = records[(records >= at) & (records < following)]
        end = float(own.max(initial=at))
        loops = loop_starts[(loop_starts >= at) & (loop_starts < following)]
        # A launch that never reached its loop has only a start.
        loop_start = float(loops.min(initial=end))
        # The clocks of two hosts may differ, and launches cannot overlap.
        begin = max(at - seconds, earlier_end)
        launches.append(_Launch(begin, loop_start, end))
        earlier_end = end
    return launches


def _read_seconds(value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    return 0.0


def _list_record_times(history: RunHistory) -> np.ndarray:
    """Return the times of everything that a launch itself records, in seconds since the epoch."""
    events = [
        event.time.timestamp()
        for event in history.events
        if event.kind in ("start", "stop", "save", "skip", "alert")
    ]
    return np.concatenate([history.columns["time"], events, history.loop_starts])
