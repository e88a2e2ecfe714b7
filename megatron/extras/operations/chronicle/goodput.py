"""Goodput, and what failures have cost.

Goodput is the share of the wall time of a run in steps that its weights still have.

Invariant: the seconds of all causes sum to the wall time. The report, the status and the training
log compute it in the same way, from `Totals`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.extras.operations.chronicle.history import RunHistory
from megatron.schedule.clock import format_duration

KEPT = "steps that were kept"
UNDONE = "steps that were undone"
DROPPED = "steps without an update"
SAVES = "saves"
EVALUATIONS = "evaluations"
STARTS = "starts"
HANGS = "hangs"
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
    """Time of the last record, or of the verdict if it hung."""
    hang_seconds: float
    """Time from the last record to the verdict of the watchdog."""


@dataclass
class Totals:
    """Seconds by cause, to which a launch adds its own while it trains."""

    begin: float
    """Start of the wall time, in seconds since the epoch."""
    end: float
    """End of the wall time."""
    seconds: dict[str, float]
    """Cause -> its seconds, for all causes but `OTHER`."""

    def compute(self, now: float | None = None) -> Goodput:
        """Return the goodput.

        Args:
            now: End of the wall time. Default: the last record.
        """
        end = self.end if now is None else max(now, self.end)
        known = sum(self.seconds.values())
        # Clocks of the host may jump, so the rest may be negative.
        other = max(0.0, end - self.begin - known)
        return Goodput(known + other, {**self.seconds, OTHER: other})


def compute_goodput(history: RunHistory) -> Goodput:
    """Return where the wall time went.

    A launch begins when its process reads its configuration. It ends with its last record. If it
    was killed, the time from there to the next launch counts as between launches.
    """
    return add_up(history).compute()


def add_up(history: RunHistory) -> Totals:
    """Return the seconds by cause. See `compute_goodput`."""
    launches = list_launches(history)
    if not launches:
        return Totals(0.0, 0.0, dict.fromkeys(_CAUSES, 0.0))
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
        HANGS: sum(launch.hang_seconds for launch in launches),
        WAITING: wall - sum(launch.end - launch.begin for launch in launches),
    }
    return Totals(launches[0].begin, launches[-1].end, found)


def count_first_start(loop_start: float, details: Mapping[str, Any]) -> Totals:
    """Return the totals of a run whose first launch has just reached its loop.

    Args:
        loop_start: The time now, in seconds since the epoch.
        details: The details of the event "start" of the launch.
    """
    began = loop_start - _read_seconds(details.get("seconds"))
    begin = _find_begin(began, details, earlier_end=-np.inf)
    seconds = dict.fromkeys(_CAUSES, 0.0)
    seconds[STARTS] = loop_start - begin
    return Totals(begin, loop_start, seconds)


def format_goodput(goodput: Goodput) -> str:
    """Return the goodput and what the rest was lost to, as a line of the log."""
    lost = {
        cause: share
        for cause in goodput.seconds
        if cause != KEPT and (share := goodput.compute_share(cause)) >= _SMALLEST_SHARE
    }
    line = f"goodput: {goodput.share:.1%} of {format_duration(goodput.wall_seconds)}"
    if not lost:
        return line
    causes = sorted(lost, key=lambda cause: lost[cause], reverse=True)
    return f"{line} ({', '.join(f'{cause} {lost[cause]:.1%}' for cause in causes)})"


_SMALLEST_SHARE = 0.0005
"""Smaller shares would be shown as 0.0 %."""
_LONGEST_SECONDS = 1e11
"""Larger values are neither a duration nor a time since the epoch."""
_CAUSES = (KEPT, UNDONE, DROPPED, SAVES, EVALUATIONS, STARTS, HANGS, WAITING)


def _add(column: np.ndarray, others: list[object]) -> float:
    return float(np.nansum(column)) + sum(map(_read_seconds, others))


def list_launches(history: RunHistory) -> list[_Launch]:
    """Return the launches that the chronicle knows, or those of the metrics file without one."""
    starts = [event for event in history.events if event.kind == "start"]
    details: list[Mapping[str, Any]]
    if starts:
        known = [event.time.timestamp() for event in starts]
        details = [event.details for event in starts]
    else:
        known = history.loop_starts
        details = [{}] * len(known)
    # The `seconds` of an event "start" are the time since the launch began.
    begins = [
        at - _read_seconds(described.get("seconds"))
        for at, described in zip(known, details, strict=True)
    ]
    records = _list_record_times(history, list(zip(begins, known, strict=True)))
    loop_starts = np.array(history.loop_starts)
    launches = []
    earlier_end = -np.inf
    for number, (at, described) in enumerate(zip(known, details, strict=True)):
        following = known[number + 1] if number + 1 < len(known) else np.inf
        # A record belongs to the launch that was active at its time.
        own = records[(records >= at) & (records < following)]
        end = float(own.max(initial=at))
        loops = loop_starts[(loop_starts >= at) & (loop_starts < following)]
        # A launch that never reached its loop has only a start.
        loop_start = float(loops.min(initial=end))
        begin = _find_begin(begins[number], described, earlier_end)
        # The ranks that hang write nothing, so the verdict is the only sign of their time.
        verdicts = [time for time in history.hang_verdicts if end <= time < following]
        hang_seconds = min(verdicts, default=end) - end
        launches.append(_Launch(begin, loop_start, end + hang_seconds, hang_seconds))
        earlier_end = end + hang_seconds
    return launches


def _find_begin(begin: float, details: Mapping[str, Any], earlier_end: float) -> float:
    """Return when a launch began, from the begin of its process and the end of the one before."""
    # The first launch of a Slurm job began with the job. The time before that is the queue.
    job = _read_seconds(details.get("job_started"))
    if earlier_end <= job < begin and job > 0:
        return job
    # The clocks of two hosts may differ, and launches cannot overlap.
    return max(begin, earlier_end)


def _read_seconds(value: object) -> float:
    # The file may have been edited. NaN, infinity, and integers that no float holds are no times.
    if isinstance(value, int | float) and abs(value) <= _LONGEST_SECONDS:
        return float(value)
    return 0.0


def _list_record_times(history: RunHistory, starting: list[tuple[float, float]]) -> np.ndarray:
    """Return the times of everything that a launch itself records, in seconds since the epoch.

    Args:
        history: The records of the run.
        starting: Begin of each launch, and the time of its event "start". A launch may send alerts
            in between. They are left out, because they are no sign of an earlier launch.
    """
    events = [
        moment
        for event in history.events
        # An event with a source comes from a cron tool, which also runs while no launch does.
        if event.kind in ("start", "stop", "save", "skip", "alert")
        and "source" not in event.details
        for moment in [event.time.timestamp()]
        if event.kind != "alert" or not any(begin <= moment < at for begin, at in starting)
    ]
    return np.concatenate([history.columns["time"], events, history.loop_starts])


# Failures

_TOGETHER_SECONDS = 600.0
"""Hosts that failed within this time of each other failed together."""


@dataclass(frozen=True)
class FailureCosts:
    """Time that failures have cost. All times are in seconds."""

    failures: int
    """Launches that ended by an error or without a record of their end, and were followed."""
    detection: float
    """From the last record of a launch to the verdict of the watchdog, or to the event "restart"
    of the array task."""
    restart: float
    """From there to the next training loop. Without an array task it has the queue too."""
    repeated_steps: float
    """Steps that were trained again."""
    fewer_nodes: float
    """Steps on fewer devices than the run had before, times the share that was missing."""
    now: float
    """What a failure at the last record would cost: steps since the last complete checkpoint, and
    a mean restart."""


def compute_failure_costs(history: RunHistory) -> FailureCosts:
    """Return what the failures of a run have cost. A planned stop is no failure."""
    launches = list_launches(history)
    starts = [event for event in history.events if event.kind == "start"]
    times = history.columns["time"]
    iterations = history.columns["iteration"]
    seconds = np.nan_to_num(history.columns["seconds"])
    failures = 0
    detection = restart = repeated = fewer = 0.0
    # Without a chronicle nothing tells a failure from a planned stop.
    for (before, after), start in zip(pairwise(launches), starts[1:], strict=False):
        between = [
            event
            for event in history.events
            if before.loop_start <= event.time.timestamp() <= after.loop_start
        ]
        reasons = [event.details.get("reason") for event in between if event.kind == "stop"]
        if any(reason != "error" for reason in reasons):
            continue
        failures += 1
        noticed = [event.time.timestamp() for event in between if event.kind == "restart"]
        seen = min(max([before.end, *noticed]), after.loop_start)
        detection += before.hang_seconds + seen - before.end
        restart += after.loop_start - seen
        lost = (times >= before.loop_start) & (times <= before.end) & ~history.kept
        repeated += float(seconds[lost & (iterations > (start.iteration or 0))].sum())
    most = 0
    for launch, start in zip(launches, starts, strict=False):
        devices = start.details.get("devices")
        # The file may have been edited.
        if type(devices) is not int or devices < 1:
            continue
        most = max(most, devices)
        own = (times >= launch.loop_start) & (times <= launch.end) & history.kept
        fewer += float(seconds[own].sum()) * (1 - devices / most)
    # A start has the iteration that it loaded, which may be before that of an earlier save.
    safe = [event.iteration or 0 for event in history.events if event.kind in ("start", "save")]
    unsaved = history.kept & (iterations > [0, *safe][-1])
    now = float(seconds[unsaved].sum()) + restart / max(1, failures)
    return FailureCosts(failures, detection, restart, repeated, fewer, now)


def list_hosts_that_failed_together(history: RunHistory) -> list[tuple[str, ...]]:
    """Return the hosts of each group of hangs and exclusions that were close in time."""
    groups: list[set[str]] = []
    last = -np.inf
    for moment, hosts in _iterate_failed_hosts(history):
        if moment - last > _TOGETHER_SECONDS:
            groups.append(set())
        groups[-1].update(hosts)
        last = moment
    return [tuple(sorted(group)) for group in groups if len(group) > 1]


def _iterate_failed_hosts(history: RunHistory) -> Iterator[tuple[float, list[str]]]:
    for event in history.events:
        hosts = event.details.get("hosts")
        if event.kind == "exclusion":
            yield event.time.timestamp(), [str(event.details.get("host"))]
        elif event.kind == "hang" and isinstance(hosts, list) and hosts:
            yield event.time.timestamp(), list(map(str, hosts))


def list_failure_facts(history: RunHistory) -> list[tuple[str, str]]:
    """Return (name, value) of what failures cost. It is empty without a failure."""
    costs = compute_failure_costs(history)
    facts = []
    if costs.failures:
        text = ", ".join(
            f"{name.replace('_', ' ')} {format_duration(getattr(costs, name))}"
            for name in ("detection", "restart", "repeated_steps", "fewer_nodes")
        )
        facts.append(("time lost to failures", f"{text} ({costs.failures:,} failures)"))
        facts.append(("a failure now would cost", format_duration(costs.now)))
    groups = list_hosts_that_failed_together(history)
    if groups:
        text = "; ".join(" ".join(group) for group in groups)
        facts.append(("hosts that failed together", text))
    return facts
