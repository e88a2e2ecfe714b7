"""The metrics file: JSON lines, one for each iteration and evaluation, over all launches of a run.

Invariants:
- Each line is written by one call and ends in a newline. A killed run tears at most its last line,
  and the next launch starts a new one.
- Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity". `float()` reads them.
  An infinite gradient norm thus differs from an undefined one.
- Iterations that a kill has undone stay in the file, and the reader leaves them out. These are the
  ones after the iteration from which a later launch continues. A rollback moves the iterations that
  it undoes to another file.

Example (lines are shortened):

    {"kind": "start", "iteration": 0, "time": ...}
    {"kind": "train", "iteration": 1, "lm_loss": 9.1, ..., "seconds": 0.8, ..., "time": ...}
    {"kind": "validation", "iteration": 1, "name": "validation", "lm_loss": 9.2,
     "time": "2026-01-31T12:00:00.123+00:00"}
    {"kind": "task", "iteration": 1, "name": "piqa", "scores": {"acc": 0.5}, "time": ...}
    {"kind": "filters", "iteration": 100, "name": "web", "counts": {...}, "time": ...}
    {"kind": "ranks", "iteration": 100, "name": "block forward", "times": {...}, "time": ...}
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.base.outside_file import iterate_lines
from megatron.base.plain_text import print_line
from megatron.observe.report import (
    EvaluationReport,
    IterationReport,
    LaunchStart,
    NamedNumbers,
    ReportEvent,
    Sink,
)
from megatron.observe.timers import FORWARD_BACKWARD, compute_seconds

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RESULTS = {
    "validation": ("validation", "lm_loss"),
    "task": ("tasks", "scores"),
    "filters": ("filters", "counts"),
    "ranks": ("ranks", "times"),
}
"""Kind of a line -> the key that the reader collects it under, and the field with its result."""


class MetricsFile(Sink):
    """Writer that appends to the metrics file. Use it from one rank only.

    If the file cannot be written (disk full, no permission), this is reported once and training
    goes on. Each further line is attempted again. When one succeeds, the number of lost lines is
    reported.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, log: Callable[[str], None] = print_line
    ) -> None:
        """Store the path. The file and its folder are created with the first line.

        Args:
            path: The file to append to.
            log: Prints a line of the log.
        """
        self._path = Path(path)
        self._log = log
        self._lost_lines = 0
        # Not known before the file is open, so the first line starts with a newline if needed.
        self._at_line_start = False
        self._descriptor: int | None = None

    def write(self, event: ReportEvent) -> None:
        """Append the line of an event.

        After the start of a launch, readers drop the later iterations of earlier launches.
        """
        match event:
            case LaunchStart():
                self._append({"kind": "start", "iteration": event.iteration})
            case IterationReport():
                self._write_training(event)
            case EvaluationReport():
                record = {
                    "kind": "validation",
                    "iteration": event.at.iteration,
                    "name": event.name,
                    "lm_loss": event.loss,
                    "accuracy": event.accuracy,
                    "bits_per_byte": event.bits_per_byte,
                }
                self._append({key: value for key, value in record.items() if value is not None})
            case NamedNumbers():
                record = {"kind": event.kind, "iteration": event.iteration, "name": event.name}
                _, key = _RESULTS[event.kind]
                self._append({**record, key: dict(event.numbers)})

    def _write_training(self, report: IterationReport) -> None:
        """Write one iteration.

        The statistics of layers are fields of the iterations that have them. Phases appear as
        `<phase>_seconds`. The field `compute_seconds` is the time of forward pass, backward pass
        and optimizer, without their communication. On a GPU, the first iteration of a launch does
        not have these. See `Timers.take`.
        """
        record: dict[str, Any] = {"kind": "train", **vars(report)}
        record |= record.pop("layer_statistics")
        record |= record.pop("experts")
        phases = dict(record.pop("phase_seconds"))
        record |= {
            f"{phase.replace('-', '_')}_seconds": seconds for phase, seconds in phases.items()
        }
        if FORWARD_BACKWARD in phases:
            record["compute_seconds"] = compute_seconds(phases)
        self._append(record)

    def close(self) -> None:
        """Close the file. A network file system may report a failed write only at this point."""
        try:
            self._close()
        except OSError as error:
            self._log(
                f"cannot write metrics to {self._path}: {error.strerror}; lines at its end may be "
                "lost"
            )

    def _close(self) -> None:
        descriptor = self._descriptor
        self._descriptor = None
        if descriptor is not None:
            os.close(descriptor)

    def _append(self, record: dict[str, Any]) -> None:
        """Write one record with the current time. A failure is counted and reported once."""
        record["time"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = (
            json.dumps({key: encode_non_finite(value) for key, value in record.items()}).encode()
            + b"\n"
        )
        try:
            self._write(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                # The next line opens the file again. It may have been moved, or its mount may have
                # become stale.
                self._close()
            self._lost_lines += 1
            if self._lost_lines == 1:
                self._log(
                    f"cannot write metrics to {self._path}: {error.strerror}; training "
                    "continues, and each line is tried again"
                )
            return
        if self._lost_lines:
            self._log(
                f"metrics are written to {self._path} again; {self._lost_lines} lines were lost"
            )
            self._lost_lines = 0

    def _write(self, line: bytes) -> None:
        """Write one complete line.

        Raises:
            OSError: The line was not written, or only a part of it.
        """
        if self._descriptor is None:
            self._descriptor = self._open()
        # After a torn line a newline comes first. The torn part then spoils no other line.
        if not self._at_line_start:
            line = b"\n" + line
        self._at_line_start = False
        written = os.write(self._descriptor, line)
        if written < len(line):
            raise OSError(errno.ENOSPC, "only a part of a line could be written")
        self._at_line_start = True

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # With O_APPEND and one write for each line, no data is in a buffer that a kill could lose.
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(descriptor).st_size
        self._at_line_start = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        return descriptor


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the iterations of a run in order, each once.

    An iteration has "validation": {name: loss} and "tasks": {name: {metric: score}} only if it was
    evaluated. It has "filters": {data set: counts} only if it was saved, and documents are left out
    of streamed data. It has "ranks": {what: times} only if the ranks were compared.

    Iterations after the one from which a later launch continued are left out, and so are torn
    lines. An evaluation without an iteration of its own (--eval-only) gives an entry with
    "iteration" and its results only.
    """
    entries: dict[int, dict[str, Any]] = {}
    last = 0
    for line in iterate_lines(path):
        record = _parse(line)
        if record is None:
            continue
        kind = record.pop("kind")
        iteration = record["iteration"]
        if kind in _RESULTS:
            entry = entries.setdefault(iteration, {"iteration": iteration})
            group, result = _RESULTS[kind]
            entry.setdefault(group, {})[record["name"]] = record[result]
            continue
        # A start at an iteration, or an iteration that comes again, undoes all later ones.
        keep = iteration - 1
        if kind == "start":
            keep = iteration
        if keep < last:
            entries = {number: entry for number, entry in entries.items() if number <= keep}
        if kind == "train":
            # The line of an evaluation may precede the line of its iteration.
            entries[iteration] = entries.get(iteration, {}) | record
        last = iteration
    return [entries[number] for number in sorted(entries)]


def encode_non_finite(value: Any) -> Any:
    """Return a value with the numbers that JSON lacks as strings, in lists and dictionaries too."""
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return _change_items(value, encode_non_finite)


def _decode_non_finite(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    return _change_items(value, _decode_non_finite)


def _change_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a list or a dictionary with changed items, and anything else as it is."""
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is not a complete record of a known kind."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        # The line is torn, or not text.
        return None
    known = ("start", "train", *_RESULTS)
    if not isinstance(record, dict) or record.get("kind") not in known:
        return None
    record = {key: _decode_non_finite(value) for key, value in record.items()}
    if _has_valid_numbers(record):
        return record
    return None


def _has_valid_numbers(record: dict[str, Any]) -> bool:
    """Return whether a record has what the reader needs. Another program may have written it."""
    numbers = [record.get("lm_loss", 0.0), record.get("learning_rate", 0.0)]
    if record["kind"] in _RESULTS:
        _, result = _RESULTS[record["kind"]]
        if not {"name", result} <= record.keys():
            return False
    # The loss of a dropped step is None.
    valid = all(number is None or isinstance(number, int | float) for number in numbers)
    return valid and isinstance(record.get("iteration"), int)
