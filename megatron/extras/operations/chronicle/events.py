"""The events of a run in plain words, each of them once.

The log and `interventions.jsonl` both record a spike of the loss. A rollback by the spike guard is
in the chronicle too, as a stop and a start within one launch. Here each of them is one event.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.base.outside_file import parse_json
from megatron.base.plain_text import make_plain
from megatron.extras.operations.chronicle.history import RunHistory
from megatron.extras.operations.chronicle.records import Event
from megatron.schedule.clock import format_duration

CONTINUED = "continued"
"""Label of a start within the launch before it, after a rollback by the spike guard."""
_LABELS = {
    "start": "launch",
    "save": "checkpoint",
    "skip": "skipped data",
    "alert": "warning",
    "exclusion": "host excluded",
    "spike-guard": "spike",
}
"""Kind of an event -> what the report calls it, if that is another word."""
_STOPS = {
    "complete": "the training is complete",
    "interval": "at --exit-interval",
    "duration": "at the end of the time that was allowed",
    "kill switch": "by the kill switch",
    "signal": "by a signal",
    "rollback": "for a rollback by the spike guard",
    "error": "by an error",
}
_ENDINGS = {
    "switch-to-log": ", and the spike guard only logs after that",
    "stop": ", and the spike guard ends the run",
}
_PHASES = {
    "save_seconds": "the last checkpoint took",
    "evaluate_seconds": "the last evaluation took",
}
_SPIKE_ALERT = re.compile(r"spike guard: iteration (\d+) is a spike")
_GUARD_REASON = re.compile(r"spike guard at iteration (\d+): ")


@dataclass(frozen=True)
class DescribedEvent:
    """An event as the report shows it."""

    event: Event
    label: str
    """What kind of event it is."""
    text: str
    """What happened, on one line."""


@dataclass(frozen=True)
class _Spike:
    """Neighbouring iterations to which the spike guard responded in the same way."""

    event: Event
    """The first of them."""
    last: int

    def is_followed_by(self, event: Event) -> bool:
        """Return whether the event is the same response to the next iteration."""
        decision = event.details.get("decision")
        is_same = decision == self.event.details.get("decision")
        return is_same and event.iteration == self.last + 1

    def describe(self) -> str:
        """Return what the guard did, and why it did so at the first iteration."""
        details = self.event.details
        dropped = details.get("dropped", details.get("decision") == "skip-step")
        done = "dropped" if dropped else "applied"
        done += _ENDINGS.get(str(details.get("decision")), "")
        reason = make_plain(self.event.details.get("reason"))
        first = self.event.iteration or 0
        if self.last > first:
            return (
                f"iterations {first:,} to {self.last:,}: {self.last - first + 1:,} steps {done}; "
                f"at the first, {reason}"
            )
        return f"step {done}: {reason}"


def is_important(described: DescribedEvent) -> bool:
    """Return whether a reader must know about the event, unlike a checkpoint or a clean stop."""
    event = described.event
    # A launch with the same settings as the one before is what array tasks do.
    if event.kind == "start":
        return "; changed: " in described.text
    # Other stops, as by a time limit, are planned.
    if event.kind == "stop":
        return event.details.get("reason") in ("error", "signal", "kill switch")
    return described.label in (
        "killed",
        "rollback",
        "hang",
        "host excluded",
        "restart",
        "note",
        "prediction",
    )


def find_continued(events: Sequence[Event]) -> dict[int, int]:
    """Return the starts that belong to the launch before them: position -> that of its stop."""
    found = [number for number, event in enumerate(events) if event.kind in ("start", "stop")]
    return {
        number: before
        for before, number in pairwise(found)
        if events[number].kind == "start"
        and events[before].kind == "stop"
        and events[before].details.get("reason") == "rollback"
    }


def is_decided_rollback(event: Event) -> bool:
    """Return whether the event is the decision of the spike guard to roll back."""
    return event.kind == "spike-guard" and event.details.get("decision") == "rollback"


def list_rollbacks(history: RunHistory) -> list[Event]:
    """Return each rollback once, as the record of the one who decided on it."""
    decided = {event.iteration for event in history.events if is_decided_rollback(event)}
    return [
        event
        for event in history.events
        if is_decided_rollback(event)
        # The rollback that the guard decided on is recorded once more when it is carried out.
        or (
            event.kind == "rollback"
            and _read_iteration(_GUARD_REASON, event.details.get("reason")) not in decided
        )
    ]


def _read_iteration(pattern: re.Pattern[str], text: object) -> int | None:
    """Return the iteration that a text names at its beginning, or None."""
    found = pattern.match(str(text))
    return None if found is None else int(found[1])


def describe_events(history: RunHistory) -> list[DescribedEvent]:
    """Return the events of a run. A launch lists the settings that changed since the last one."""
    continued = find_continued(history.events)
    described: list[DescribedEvent] = []
    spike: _Spike | None = None
    settings: object = None
    is_active = False
    for number, event in _list_once(history):
        if event.kind == "start":
            # A process that was killed records no end, so the next start shows it.
            if is_active and number not in continued:
                described.append(_describe_kill(history, event))
            text = _describe_launch(event, settings, is_within=number in continued)
            settings = event.details.get("settings")
        elif event.kind == "spike-guard" and not is_decided_rollback(event):
            # Bad data last for several iterations, and one line about them is enough.
            if spike is not None and spike.is_followed_by(event):
                spike = replace(spike, last=event.iteration or 0)
                described[-1] = DescribedEvent(spike.event, "spike", spike.describe())
                continue
            spike = _Spike(event, event.iteration or 0)
            described.append(DescribedEvent(event, "spike", spike.describe()))
            continue
        else:
            text = _describe(event)
        spike = None
        is_active = event.kind == "start" or (is_active and event.kind != "stop")
        label = CONTINUED if number in continued else _get_label(event)
        described.append(DescribedEvent(event, label, text))
    return described


def _list_once(history: RunHistory) -> Iterator[tuple[int, Event]]:
    """Yield each event and its position, without those that repeat another one."""
    events = history.events
    stops = set(find_continued(events).values())
    spikes = {event.iteration for event in events if event.kind == "spike-guard"}
    rollbacks = list_rollbacks(history)
    for number, event in enumerate(events):
        spike = _read_iteration(_SPIKE_ALERT, event.details.get("text"))
        is_repeated = (
            number in stops
            or (event.kind == "alert" and spike in spikes)
            or (event.kind == "rollback" and event not in rollbacks)
        )
        if not is_repeated:
            yield number, event


def _get_label(event: Event) -> str:
    if is_decided_rollback(event):
        return "rollback"
    return _LABELS.get(event.kind, make_plain(event.kind))


def _describe_kill(history: RunHistory, following: Event) -> DescribedEvent:
    """Return the end of a launch that could not record it, as the launch after it shows it."""
    times = history.columns["time"]
    rows = np.flatnonzero(times < following.time.timestamp())
    event = Event(following.time, "killed", following.iteration)
    text = "the launch was killed or lost, and recorded no end"
    if rows.size:
        last = int(history.columns["iteration"][rows[-1]])
        event = Event(datetime.fromtimestamp(times[rows[-1]], UTC), "killed", last)
        lost = last - (following.iteration or 0)
        if lost > 0:
            text += f"; iterations lost since the last checkpoint: {lost:,}"
    return DescribedEvent(event, "killed", text)


def _describe_rollback(event: Event) -> str:
    details = event.details
    text = f"from iteration {format_value(event.iteration)} to {format_value(details.get('to'))}"
    if event.kind == "spike-guard":
        text = f"by the spike guard {text}"
    if details.get("skip"):
        text += f"; skips the data of {_format_ranges(details['skip'])}"
    if details.get("lr"):
        text += f"; learning rate {format_value(details['lr'])}"
    if details.get("reason"):
        text += f"; reason: {make_plain(details['reason'])}"
    return text


def _format_ranges(skip: object) -> str:
    """Return ranges of iterations, given as [first, last] or as a list of FIRST-LAST."""
    if not isinstance(skip, list):
        return make_plain(skip)
    if all(isinstance(each, int) for each in skip):
        return " to ".join(map(format_value, skip))
    return " and ".join(make_plain(each).replace("-", " to ") for each in skip)


def _describe(event: Event) -> str:
    details = event.details
    if event.kind == "rollback" or is_decided_rollback(event):
        return _describe_rollback(event)
    if event.kind == "stop":
        return describe_stop(details)
    if event.kind == "skip" and {"first", "last"} <= set(details):
        return f"iterations {_format_ranges([details['first'], details['last']])} were skipped"
    # A note and an alert have only their text. Who sent it is of no interest.
    if set(details) - {"source"} == {"text"}:
        return format_value(details["text"])
    return "; ".join(
        f"{make_plain(name).replace('_', ' ')} {format_value(value)}"
        for name, value in details.items()
    )


def _describe_launch(event: Event, before: object, *, is_within: bool) -> str:
    details = event.details
    parts = []
    if event.iteration:
        parts.append(f"after iteration {event.iteration:,}")
    if is_within:
        return "; ".join(["in the same launch", *parts])
    if "devices" in details:
        parts.append(f"devices: {format_value(details['devices'])}")
    parts += [format_value(details[name]) for name in ("layout", "version") if name in details]
    text = "; ".join(parts)
    changes = [
        f"{flag} {old or 'default'} -> {new or 'default'}"
        for flag, (old, new) in compare_settings([before, details.get("settings")]).items()
    ]
    if changes:
        return f"{text}; changed: {', '.join(changes)}"
    return text


def compare_settings(settings: Sequence[object]) -> dict[str, list[str | None]]:
    """Return the flags whose values differ, with the value of each. None is the default.

    Args:
        settings: The settings of launches or runs, as the chronicle has them. Nothing is compared
            if one of them is missing.
    """
    tables = [each for each in settings if isinstance(each, Mapping)]
    if len(tables) < len(settings):
        return {}
    flags = sorted({make_plain(flag) for table in tables for flag in table})
    rows = {flag: [read_setting(table.get(flag)) for table in tables] for flag in flags}
    return {flag: values for flag, values in rows.items() if len(set(values)) > 1}


def read_setting(value: object) -> str | None:
    """Return a setting as text, or None if it is not set. The chronicle has JSON in a string."""
    if value is None:
        return None
    text = str(value)
    try:
        decoded = parse_json(text)
    except ValueError:
        return make_plain(text)
    if isinstance(decoded, str):
        return make_plain(decoded)
    if isinstance(decoded, list):
        return make_plain(" ".join(map(str, decoded)))
    return make_plain(text)


def describe_stop(details: Mapping[str, Any]) -> str:
    """Return why a launch stopped, and how long it took to stop."""
    reason = make_plain(details.get("reason"))
    text = _STOPS.get(reason, reason)
    if "error" in details:
        text += f": {make_plain(details['error'])}"
    for name, words in _PHASES.items():
        seconds = details.get(name)
        # The file may have been edited.
        if isinstance(seconds, int | float) and 0 < seconds < 1e11:
            text += f"; {words} {format_duration(seconds)}"
    if "replays" in details:
        differed = format_value(details.get("replays_with_difference"))
        text += f"; {format_value(details['replays'])} replays, {differed} with a difference"
    return text


def format_value(value: Any) -> str:
    """Return a value on one line, see `make_plain`."""
    if value is None:
        return "unknown"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return " ".join(map(format_value, value))
    return make_plain(value)
