"""What the failures of a run have cost, what one would cost now, and hosts that fail together."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron.extras.operations.chronicle.goodput import list_launches
from megatron.extras.operations.chronicle.history import RunHistory
from megatron.schedule.clock import format_duration

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
        parts = {
            "detection": costs.detection,
            "restart": costs.restart,
            "repeated steps": costs.repeated_steps,
            "fewer nodes": costs.fewer_nodes,
        }
        text = ", ".join(f"{name} {format_duration(lost)}" for name, lost in parts.items())
        facts.append(("time lost to failures", f"{text} ({costs.failures:,} failures)"))
        facts.append(("a failure now would cost", format_duration(costs.now)))
    groups = list_hosts_that_failed_together(history)
    if groups:
        text = "; ".join(" ".join(group) for group in groups)
        facts.append(("hosts that failed together", text))
    return facts
