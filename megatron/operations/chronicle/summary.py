"""The report of a run as text. The page has the same lines."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.observe.chronicle import Event
from megatron.operations.chronicle.goodput import compute_goodput
from megatron.operations.chronicle.history import RunHistory
from megatron.plain_text import make_plain
from megatron.schedule.clock import format_duration

_SHOWN_OF_START = (
    "version",
    "torch",
    "devices",
    "layout",
    "parameters",
    "layers",
    "hidden_size",
    "attention_heads",
    "seq_length",
)


def list_facts(history: RunHistory) -> list[tuple[str, str]]:
    """Return (name, value) of what a run is and how far it is."""
    facts = []
    # The last launch may have another version or layout than the first one.
    for event in reversed(history.events):
        if event.kind == "start":
            facts = [
                (name.replace("_", " "), _format_value(event.details[name]))
                for name in _SHOWN_OF_START
                if name in event.details
            ]
            break
    facts += _count_launches(history)
    kept = history.kept
    undone = int((~kept).sum())
    if kept.any():
        # Undone rows may have a later time than kept ones, so they are left out.
        last = {name: values[kept][-1] for name, values in history.columns.items()}
        facts += [
            ("iteration", f"{int(last['iteration']):,}"),
            ("samples", f"{int(np.nan_to_num(last['consumed_samples'])):,}"),
            ("tokens", f"{int(np.nan_to_num(last['consumed_tokens'])):,}"),
            ("training loss", f"{last['lm_loss']:.4f}"),
            *_list_epochs(history, float(np.nan_to_num(last["consumed_tokens"]))),
        ]
    for name, (iteration, loss) in _find_last_evaluations(history).items():
        facts.append((f"loss of {name}", f"{loss:.4f} after iteration {iteration:,}"))
    facts += _compare_prediction(history)
    facts.append(("iterations that were undone", f"{undone:,}"))
    if history.energy is not None:
        facts.append(("energy", f"{history.energy.kilowatt_hours[-1]:.6g} kWh"))
        facts.append(("carbon", f"{history.energy.kilograms[-1]:.6g} kg of CO2 equivalent"))
    return facts


def _count_launches(history: RunHistory) -> list[tuple[str, str]]:
    """Return the number of launches, and how many of them did not record their end."""
    kinds = [event.kind for event in history.events if event.kind in ("start", "stop")]
    if "start" not in kinds:
        return []
    text = f"{kinds.count('start'):,}"
    # A process that is killed cannot write a stop.
    killed = sum(kind == following == "start" for kind, following in pairwise(kinds))
    if killed:
        text += f", {killed:,} of them killed or lost"
    if kinds[-1] == "start":
        text += ", the last one active or killed"
    return [("launches", text)]


def _compare_prediction(history: RunHistory) -> list[tuple[str, str]]:
    """Return the predicted and the measured seconds of a step, if the last start has them.

    The prediction is that of the final batch size and of the layout of the last start, so only the
    steps with this size after this start are compared.
    """
    starts = [event for event in history.events if event.kind == "start"]
    predicted = starts[-1].details.get("predicted") if starts else None
    if not isinstance(predicted, dict):
        return []
    seconds = predicted.get("seconds")
    # The file may have been edited, and anything may be in it.
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        return []
    batch_size = predicted.get("batch_size")
    if not isinstance(batch_size, int | float):
        return []
    text = f"{seconds:.4g} s on {predicted.get('hardware')}"
    chosen = history.kept & (history.columns["global_batch_size"] == batch_size)
    chosen &= history.columns["time"] >= starts[-1].time.timestamp()
    measured = history.columns["seconds"][chosen]
    measured = measured[measured > 0]
    # The first steps compile and allocate. A median leaves them and the saves out.
    if measured.size:
        median = float(np.median(measured))
        text += f" predicted, {median:.4g} s measured ({100 * (seconds / median - 1):+.0f} %)"
    else:
        text += " predicted, not measured yet"
    return [("step", text)]


def _list_epochs(history: RunHistory, tokens: float) -> list[tuple[str, str]]:
    """Return how often each training data set was read, or nothing if that is not known."""
    data: Any = None
    for event in history.events:
        if event.kind == "start":
            data = event.details.get("data")
    try:
        epochs = [float(tokens * each["share"] / each["tokens"]) for each in data]
    except (TypeError, KeyError, ValueError, ZeroDivisionError, OverflowError):
        # An older version did not record the data.
        return []
    if not epochs:
        return []
    if len(epochs) == 1:
        return [("epochs", f"{epochs[0]:.3g}")]
    shown = f"{min(epochs):.3g} to {max(epochs):.3g} of {len(epochs)} data sets"
    return [("epochs", shown)]


def _find_last_evaluations(history: RunHistory) -> dict[str, tuple[int, float]]:
    return {
        found.name: (found.iteration, found.loss) for found in history.evaluations if found.kept
    }


def list_goodput(history: RunHistory) -> list[tuple[str, float, float]]:
    """Return (cause, seconds, share of the wall time) of each cause that took time."""
    goodput = compute_goodput(history)
    return [
        (cause, seconds, goodput.compute_share(cause))
        for cause, seconds in goodput.seconds.items()
        if seconds > 0
    ]


def describe_events(history: RunHistory) -> list[tuple[Event, str]]:
    """Return each event with its description. A start lists what changed since the last one."""
    described = []
    settings: Mapping[str, str] | None = None
    for event in history.events:
        details = dict(event.details)
        if event.kind == "start":
            # All settings would be too long for one line. Only the changed ones are shown.
            now = details.pop("settings", None)
            text = _describe_start(details, settings, now)
            if isinstance(now, dict):
                settings = now
        else:
            text = _describe_details(details)
        described.append((event, text))
    return described


def _describe_start(details: dict[str, Any], before: Mapping[str, str] | None, now: Any) -> str:
    names = ("version", "devices", "layout")
    shown: dict[str, Any] = {name: details[name] for name in names if name in details}
    text = _describe_details(shown)
    if before is None or not isinstance(now, dict):
        return text
    changes = [
        f"{flag} {before.get(flag, 'default')} -> {now.get(flag, 'default')}"
        for flag in sorted({*before, *now})
        if before.get(flag) != now.get(flag)
    ]
    if changes:
        return f"{text}; changed: {', '.join(changes)}"
    return text


def _describe_details(details: Mapping[str, Any]) -> str:
    # A note and an alert have only their text.
    if set(details) == {"text"}:
        return _format_value(details["text"])
    return ", ".join(f"{name} {_format_value(value)}" for name, value in details.items())


def _format_value(value: Any) -> str:
    """Return a value on one line, see `make_plain`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return " ".join(map(_format_value, value))
    return make_plain(value)


def format_text(history: RunHistory) -> str:
    """Return the report of a run as text."""
    lines = [str(history.folder), ""]
    lines += [f"  {name}: {value}" for name, value in list_facts(history)]
    goodput = compute_goodput(history)
    lines += ["", f"  goodput: {goodput.share:.1%} of {format_duration(goodput.wall_seconds)}"]
    lines += [
        f"    {share:6.1%}  {seconds:12.1f} s  {cause}"
        for cause, seconds, share in list_goodput(history)
    ]
    lines += ["", "  events:"]
    for event, text in describe_events(history):
        at = "-" if event.iteration is None else f"{event.iteration:,}"
        time = event.time.isoformat(sep=" ", timespec="seconds")
        lines.append(f"    {time}  {at:>10}  {_format_value(event.kind):<8}  {text}".rstrip())
    # Names of events, evaluations and folders are foreign text as well.
    return "\n".join(map(make_plain, lines))
