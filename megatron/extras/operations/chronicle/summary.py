"""The report of a run as text. The page has the same lines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.base.plain_text import make_plain
from megatron.extras.operations.chronicle.events import (
    describe_events,
    describe_stop,
    find_continued,
    format_value,
    is_decided_rollback,
    list_rollbacks,
    read_setting,
)
from megatron.extras.operations.chronicle.goodput import (
    DROPPED,
    KEPT,
    UNDONE,
    add_up,
    compute_goodput,
    list_failure_facts,
)
from megatron.extras.operations.chronicle.history import RunHistory
from megatron.extras.operations.chronicle.records import Event
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
_MAIN_SETTINGS = {
    "--global-batch-size": "batch size",
    "--train-iters": "iterations",
    "--train-samples": "samples",
    "--lr": "learning rate",
    "--lr-decay-style": "schedule",
    "--optimizer": "optimizer",
    "--bf16": "bf16",
    "--fp16": "fp16",
}
"""Settings that a reader asks for first, with their names in the report."""
_NAMES = {"seq_length": "sequence length", "torch": "PyTorch"}
"""Key of a start -> its name in the report, if that is another word."""


def list_facts(history: RunHistory) -> list[tuple[str, str]]:
    """Return (name, value) of what a run is and how far it is."""
    facts = _list_start(_read_last_start(history))
    facts += _count_launches(history) + list_losses(history)
    kept = history.kept
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
    facts += list_failure_facts(history)
    facts += _compare_prediction(history) + _describe_verification(history)
    if history.energy is not None:
        facts.append(("energy", f"{history.energy.kilowatt_hours[-1]:.6g} kWh"))
        facts.append(("carbon", f"{history.energy.kilograms[-1]:.6g} kg of CO2 equivalent"))
    return facts


def _find_last_start(history: RunHistory) -> Event | None:
    """Return the last start of a run. It may have another version or layout than the first one."""
    return next((event for event in reversed(history.events) if event.kind == "start"), None)


def _read_last_start(history: RunHistory) -> Mapping[str, Any]:
    """Return the details of the last start. They are empty if there is none."""
    start = _find_last_start(history)
    return {} if start is None else start.details


def _list_start(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of what a start says about the run."""
    return [
        (_NAMES.get(name, name.replace("_", " ")), format_value(details[name]))
        for name in _SHOWN_OF_START
        if name in details
    ]


def _count_launches(history: RunHistory) -> list[tuple[str, str]]:
    """Return the number of launches, and how many of them did not record their end."""
    continued = find_continued(history.events)
    within = {*continued, *continued.values()}
    kinds = [
        event.kind
        for number, event in enumerate(history.events)
        if event.kind in ("start", "stop") and number not in within
    ]
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


def list_losses(history: RunHistory) -> list[tuple[str, str]]:
    """Return (name, value) of what went wrong, and what it cost in iterations and time."""
    seconds = compute_goodput(history).seconds
    steps = history.columns["skipped_iterations"] > 0
    dropped = int((steps & history.kept).sum())
    undone = int((~history.kept).sum())
    rollbacks = list_rollbacks(history)
    by_guard = sum(map(is_decided_rollback, rollbacks))
    text = f"{len(rollbacks):,}"
    if by_guard:
        text += f", {by_guard:,} of them by the spike guard without a new launch"
    skipped = sum(last - first + 1 for first, last in list_skipped(history))
    return [
        ("rollbacks", text),
        ("iterations that were undone", _with_time(undone, seconds[UNDONE])),
        ("steps that were dropped", _with_time(dropped, seconds[DROPPED])),
        ("iterations whose data were skipped", f"{skipped:,}"),
    ]


def _with_time(count: int, seconds: float) -> str:
    if not count:
        return "0"
    return f"{count:,} ({format_duration(seconds)})"


def list_skipped(history: RunHistory) -> list[tuple[int, int]]:
    """Return the ranges [first, last] of iterations that the run skipped, in order."""
    trained = history.columns["iteration"][history.kept]
    ranges = set()
    for event in history.events:
        first, last = event.details.get("first"), event.details.get("last")
        # The file may have been edited, and a rollback may have undone the skip.
        if event.kind != "skip" or type(first) is not int or type(last) is not int:
            continue
        if first <= last and not ((trained >= first) & (trained <= last)).any():
            ranges.add((first, last))
    return sorted(ranges)


def describe_outcome(history: RunHistory) -> list[str]:
    """Return some sentences: how far the run is, when it ran, how good it is, what it cost."""
    goodput = compute_goodput(history)
    columns = history.columns
    kept = np.flatnonzero(history.kept)
    sentences = []
    planned = _read_last_start(history).get("train_iterations")
    if kept.size:
        text = f"The run is at iteration {int(columns['iteration'][kept[-1]]):,}"
        if type(planned) is int:
            text += f" of {planned:,}"
        losses = columns["lm_loss"][kept]
        if np.isfinite(losses).any():
            text += f", with a training loss of {losses[np.isfinite(losses)][-1]:.4f}"
        for name, (_, loss) in _find_last_evaluations(history).items():
            text += f" and {loss:.4f} on {make_plain(name)}"
        sentences.append(f"{text}.")
    times = [event.time for event in history.events]
    launches = dict(_count_launches(history)).get("launches")
    if times and launches:
        # A later note, or an alert of a cron tool, does not make the run longer.
        end = datetime.fromtimestamp(add_up(history).end, times[0].tzinfo)
        text = (
            f"It ran from {times[0]:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} "
            f"({times[0].tzname()}), {format_duration(goodput.wall_seconds)} in all. "
            f"Launches: {launches}."
        )
        sentences.append(f"{text}{_describe_last_stop(history)}")
    lost = goodput.wall_seconds - goodput.seconds[KEPT]
    sentences.append(
        f"{goodput.share:.1%} of this time went into steps that count, and "
        f"{format_duration(lost)} into everything else."
    )
    wrong = [f"{name}: {value}" for name, value in list_losses(history) if value != "0"]
    if wrong:
        sentences.append(f"{'; '.join(wrong).capitalize()}.")
    return sentences


def _describe_last_stop(history: RunHistory) -> str:
    """Return a sentence about the end of the last launch.

    It is empty without a record of the end. `_count_launches` then says that the last launch is
    active or was killed.
    """
    last = [event for event in history.events if event.kind in ("start", "stop")][-1]
    if last.kind == "start":
        return ""
    named = {name: last.details.get(name) for name in ("reason", "error")}
    ended = describe_stop({name: value for name, value in named.items() if value})
    return f" The end of the last launch: {ended}."


@dataclass(frozen=True)
class Tile:
    """A number that a reader looks for first."""

    name: str
    value: str
    note: str = ""
    is_bad: bool = False


def list_tiles(history: RunHistory) -> list[Tile]:
    """Return the most important numbers of a run."""
    goodput = compute_goodput(history)
    losses = dict(list_losses(history))
    tiles = []
    kept = np.flatnonzero(history.kept)
    if kept.size:
        row = kept[-1]
        tokens = np.nan_to_num(history.columns["consumed_tokens"][row])
        iteration = int(history.columns["iteration"][row])
        tiles.append(Tile("iteration", f"{iteration:,}", f"{int(tokens):,} tokens"))
        tiles.append(Tile("training loss", f"{history.columns['lm_loss'][row]:.4f}"))
    for name, (iteration, loss) in _find_last_evaluations(history).items():
        tiles.append(Tile(f"loss of {make_plain(name)}", f"{loss:.4f}", f"at {iteration:,}"))
    tiles.append(Tile("wall time", format_duration(goodput.wall_seconds)))
    tiles.append(Tile("goodput", f"{goodput.share:.1%}", "share of steps that count"))
    for name, value in [*_count_launches(history), *losses.items()]:
        count, _, note = value.partition(" ")
        is_bad = name != "launches" and count != "0"
        tiles.append(Tile(name, count.strip(","), note.strip("()"), is_bad))
    return tiles


def describe_model(history: RunHistory) -> str:
    """Return model, layout and main settings of the last launch, as far as they are known."""
    details = _read_last_start(history)
    parts = [f"{name} {value}" for name, value in _list_start(details)]
    settings = details.get("settings")
    if isinstance(settings, dict):
        parts += [
            f"{name} {read_setting(settings[flag])}"
            for flag, name in _MAIN_SETTINGS.items()
            if flag in settings
        ]
    return "; ".join(parts)


def _compare_prediction(history: RunHistory) -> list[tuple[str, str]]:
    """Return the predicted and the measured seconds of a step, if the last start has them.

    The prediction is that of the final batch size and of the layout of the last start, so only the
    steps with this size after this start are compared.
    """
    start = _find_last_start(history)
    predicted = None if start is None else start.details.get("predicted")
    if start is None or not isinstance(predicted, dict):
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
    chosen &= history.columns["time"] >= start.time.timestamp()
    measured = history.columns["seconds"][chosen]
    measured = measured[measured > 0]
    # The first steps compile and allocate. A median leaves them and the saves out.
    if measured.size:
        median = float(np.median(measured))
        text += f" predicted, {median:.4g} s measured ({100 * (seconds / median - 1):+.0f} %)"
    else:
        text += " predicted, not measured yet"
    return [("step", text)]


def _describe_verification(history: RunHistory) -> list[tuple[str, str]]:
    """Return the verdict of --verification, if the last start has one."""
    found = _read_last_start(history).get("verification")
    # The file may have been edited, and anything may be in it.
    if not isinstance(found, dict):
        return []
    text = "the reduced copy equals one process"
    if found.get("verified") is not True:
        text = f"failed at {format_value(found.get('failed'))}"
    others = found.get("other_settings")
    if isinstance(others, list) and others:
        text += f", with other values of {', '.join(map(str, others))}"
    return [("verification", text)]


def _list_epochs(history: RunHistory, tokens: float) -> list[tuple[str, str]]:
    """Return how often each training data set was read, or nothing if that is not known."""
    data: Any = _read_last_start(history).get("data")
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


def format_text(history: RunHistory) -> str:
    """Return the report of a run as text."""
    lines = [str(history.folder), "", *(f"  {each}" for each in describe_outcome(history)), ""]
    lines += [f"  {name}: {value}" for name, value in list_facts(history)]
    goodput = compute_goodput(history)
    lines += ["", f"  goodput: {goodput.share:.1%} of {format_duration(goodput.wall_seconds)}"]
    lines += [
        f"    {share:6.1%}  {seconds:12.1f} s  {cause}"
        for cause, seconds, share in list_goodput(history)
    ]
    lines += ["", "  events:"]
    for described in describe_events(history):
        at = "-" if described.event.iteration is None else f"{described.event.iteration:,}"
        time = described.event.time.isoformat(sep=" ", timespec="seconds")
        lines.append(f"    {time}  {at:>10}  {described.label:<13} {described.text}".rstrip())
    # Names of events, evaluations and folders are foreign text as well.
    return "\n".join(map(make_plain, lines))
