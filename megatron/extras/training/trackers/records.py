"""Conversion of the lines of the metrics file to the values that a tracker gets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.base.outside_file import iterate_lines
from megatron.extras.operations.chronicle.records import parse_object


def flatten_record(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of the metrics file, by the names that the tracker shows."""
    kind = record["kind"]
    if kind == "train":
        prefix = ""
        numbers: Any = {key: record[key] for key in record if key not in ("kind", "iteration")}
    elif kind == "validation":
        prefix = f"validation/{record.get('name')}/"
        measures = ("lm_loss", "accuracy", "bits_per_byte")
        numbers = {key: record[key] for key in measures if key in record}
    elif kind == "task":
        prefix = f"tasks/{record.get('name')}/"
        numbers = record.get("scores")
    elif kind == "ranks":
        # The names of the slow ranks are text, which is left out below.
        prefix = f"ranks/{record.get('name')}/"
        numbers = record.get("times")
    else:
        prefix = f"filters/{record.get('name')}/"
        numbers = record.get("counts")
    values = {}
    for key, value in _iterate_numbers(numbers):
        values[f"{prefix}{key}"] = value
    return values


def _iterate_numbers(values: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a dictionary. A list has one for each layer."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if isinstance(value, list):
            width = len(str(len(value) - 1))
            layers = {f"{key}/{layer:0{width}}": each for layer, each in enumerate(value)}
            yield from _iterate_numbers(layers)
        elif value in ("NaN", "Infinity", "-Infinity"):
            # JSON lacks these numbers.
            yield key, float(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def read_backlog(path: Path, end: int, after: int, until: int) -> list[dict[str, Any]]:
    """Read the records of the run's lineage for iterations in (after, until].

    Args:
        path: The metrics file.
        end: Number of its bytes that are read. The later ones belong to this launch.
        after: The iteration before the first one that is read.
        until: The last iteration that is read.

    Raises:
        OSError: The file cannot be read.
    """
    found: list[dict[str, Any]] = []
    if after >= until or not path.exists():
        return found
    last = 0
    read = 0
    for line in iterate_lines(path):
        read += len(line)
        if read > end:
            break
        record = parse_record(line)
        if record is None:
            continue
        iteration = record["iteration"]
        # A start at an iteration, or an iteration that comes again, undoes all later ones.
        keep = iteration - (record["kind"] == "train")
        if record["kind"] in ("start", "train"):
            if keep < last:
                found = [each for each in found if each["iteration"] <= keep]
            last = iteration
        if record["kind"] != "start" and iteration > after:
            found.append(record)
    return [each for each in found if each["iteration"] <= until]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is torn or of another kind."""
    record = parse_object(line)
    known = ("start", "train", "validation", "task", "filters", "ranks")
    if record.get("kind") not in known or type(record.get("iteration")) is not int:
        return None
    return record
