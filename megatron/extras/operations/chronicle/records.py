"""What a run's folder records beside its metrics: events, energy, and the loss that was foretold.

Events are read from the chronicle, which `megatron.observe.chronicle` writes, and energy from a
table of codecarbon. A ladder of small runs foretells the loss.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron.base.durable import replace_file
from megatron.base.errors import DataError
from megatron.base.outside_file import iterate_lines, load_json, parse_json


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    time: datetime
    """When it happened. It has a time zone."""
    kind: str
    """One of start, stop, save, skip, alert, recovered, restart, hang, exclusion and note.
    `read_history` adds further kinds."""
    iteration: int | None
    """The run's last iteration at that time. None if it is not known, as for a note."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else is known, by name. The names depend on the kind."""


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation of a validation or test set."""

    name: str
    iteration: int
    loss: float
    time: float
    """Seconds since the epoch."""
    kept: bool
    """Whether no rollback has removed it."""


def read_events(path: Path, damaged: list[str] | None = None) -> list[Event]:
    """Read a chronicle in the order of the file. Lines that are no event are left out.

    The list is empty if the file does not exist. `damaged` receives messages, as in
    `iterate_objects`.

    Raises:
        OSError: The file cannot be read.
    """
    found = map(parse_event, read_objects(path, damaged))
    return [event for event in found if event is not None]


def read_objects(path: Path, damaged: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the JSON objects in the lines of a file, without empty ones. See `iterate_objects`.

    The list is empty if the file does not exist.

    Raises:
        OSError: The file cannot be read.
    """
    if not path.exists():
        return []
    return [record for record in iterate_objects(path, iterate_lines(path), damaged) if record]


def iterate_objects(
    path: Path, lines: Iterable[bytes], damaged: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line, or an empty one where there is none.

    Args:
        path: The file, for messages.
        lines: Its lines.
        damaged: Receives a message for each line that is no such object.
    """
    for number, line in enumerate(lines, 1):
        record = parse_object(line)
        if damaged is not None and not record and line.strip():
            damaged.append(
                f"{path}:{number} is left out: it is no JSON object, or it has a number that is "
                "too large; correct or remove the line"
            )
        yield record


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line, or an empty one if the line is torn or something else.

    An object with a whole number that is too large for a float is something else, too. No program
    of this package writes one, and each calculation with it would fail.
    """
    try:
        # The check of each number is slow, and few lines have so many digits in a row.
        if _LONG_NUMBER.search(line):
            record = parse_json(line, parse_int=_parse_int)
        else:
            record = parse_json(line)
    except (ValueError, OverflowError):
        return {}
    return record if isinstance(record, dict) else {}


_LONG_NUMBER = re.compile(rb"\d{300}")


def _parse_int(digits: str) -> int:
    """Return a whole number.

    Raises:
        OverflowError: It is too large for a float.
    """
    number = int(digits)
    float(number)
    return number


def parse_time(text: Any) -> datetime | None:
    """Return a time with its time zone, or None if the text is no such time."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    if moment.tzinfo is None:
        # Times without a zone could not be compared with the others.
        return moment.replace(tzinfo=UTC)
    return moment


def parse_event(record: Mapping[str, Any]) -> Event | None:
    """Return the event of a record, or None without a time or a kind."""
    time = parse_time(record.get("time"))
    kind = record.get("kind")
    iteration = record.get("iteration")
    if time is None or not isinstance(kind, str):
        return None
    details = record.get("details")
    if not isinstance(details, dict):
        # Another program may have written the event. Nothing of it is lost.
        known = ("time", "kind", "iteration")
        details = {name: value for name, value in record.items() if name not in known}
    # A boolean is an integer in Python.
    if type(iteration) is not int:
        iteration = None
    return Event(time, kind, iteration, details)


@dataclass(frozen=True)
class EnergyUse:
    """Energy and CO2 of a run over time."""

    times: np.ndarray
    """Seconds since the epoch, [n], in order."""
    kilowatt_hours: np.ndarray
    """Energy from the start of the run until then, [n]."""
    kilograms: np.ndarray
    """CO2 equivalent from the start of the run until then, [n]."""


def read_energy(tables: list[Path]) -> EnergyUse | None:
    """Return the energy of a run, or None if no row was found.

    A row has the totals of one launch so far. The totals of all launches sum to those of the run.
    Energy of iterations that were rolled back was used too, so the rows that a rollback removed
    count.

    Args:
        tables: Tables of codecarbon. Tables that do not exist are left out.

    Raises:
        OSError: A table cannot be read.
    """
    rows = sorted(row for path in tables for row in _iterate_rows(path))
    if not rows:
        return None
    # Launch -> its totals so far.
    totals: dict[str, tuple[float, float]] = {}
    points = []
    for time, launch, energy, carbon in rows:
        before = totals.get(launch, (0.0, 0.0))
        totals[launch] = (max(energy, before[0]), max(carbon, before[1]))
        sums = np.sum(list(totals.values()), axis=0)
        points.append((time, sums[0], sums[1]))
    columns = np.array(points).T
    return EnergyUse(columns[0], columns[1], columns[2])


def _iterate_rows(path: Path) -> Iterator[tuple[float, str, float, float]]:
    """Yield (time, launch, kWh, kg) of each complete row."""
    if not path.is_file():
        return
    lines = (line.decode("utf-8", "replace") for line in iterate_lines(path))
    for row in csv.DictReader(lines):
        try:
            # codecarbon writes the host's local time without a zone.
            time = datetime.fromisoformat(row["timestamp"]).timestamp()
            energy = float(row["energy_consumed"])
            carbon = float(row["emissions"])
            launch = str(row["run_id"])
        except (KeyError, TypeError, ValueError, csv.Error):
            # A killed launch or a full disk may have torn the row.
            continue
        if np.isfinite(energy) and np.isfinite(carbon):
            yield time, launch, energy, carbon


PREDICTED_LOSS = "predicted_loss.json"


@dataclass(frozen=True)
class PredictedLoss:
    """The validation loss at the end of a run."""

    iteration: int
    """The last iteration of the run."""
    loss: float
    low: float
    high: float
    """The loss is between `low` and `high` with a probability of 95 %."""


def write_predicted_loss(folder: Path, predicted: PredictedLoss) -> None:
    """Write a prediction into the folder of a run, which may not have started."""
    # A prediction is made before the run, which creates the folder otherwise.
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / PREDICTED_LOSS, json.dumps(asdict(predicted)) + "\n")


def read_predicted_loss(folder: Path) -> PredictedLoss | None:
    """Return the prediction in the folder of a run, or None.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / PREDICTED_LOSS
    if not path.is_file():
        return None
    try:
        found = load_json(path)
        numbers = (float(found[name]) for name in ("loss", "low", "high"))
        return PredictedLoss(int(found["iteration"]), *numbers)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error!r}): write it again with ladder.py predict --run, or "
            "remove it."
        ) from error


def list_departures(
    predicted: PredictedLoss | None, evaluations: Sequence[EvaluationPoint]
) -> Iterator[Event]:
    """Yield an event for the first evaluation of each set that leaves the range.

    The law is that of complete runs. So a loss above the range counts only at the end, and one
    below it at any time.
    """
    if predicted is None:
        return
    seen: set[str] = set()
    for each in evaluations:
        side = "below" if each.loss < predicted.low else "above"
        inside = predicted.low <= each.loss <= predicted.high
        early = each.iteration < predicted.iteration and side == "above"
        if inside or early or each.name in seen or not each.kept:
            continue
        # All later evaluations would say the same.
        seen.add(each.name)
        text = (
            f"the loss of {each.name} is {each.loss:.4f}, {side} the predicted range of "
            f"{predicted.low:.4f} to {predicted.high:.4f} for iteration {predicted.iteration:,}"
        )
        time = datetime.fromtimestamp(each.time, UTC)
        yield Event(time, "prediction", each.iteration, {"text": text})
