"""The metrics file: JSON lines, one for each iteration and one for each evaluation, appended over all launches of a run.

Invariants: each line is written by one call and ends in a newline, so that a killed run tears its last line at most, and the next
launch starts on a fresh one; numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity" (`float()` reads them, and
an infinite gradient norm stays apart from an undefined one); what a rollback undid stays in the file, but the reader leaves it
out.

    {"kind": "start", "iteration": 0, "time": ...}
    {"kind": "train", "iteration": 1, "lm_loss": 9.1, ..., "seconds": 0.8, "data_wait_seconds": 0.01, ..., "time": ...}
    {"kind": "validation", "iteration": 1, "name": "validation", "lm_loss": 9.2, "time": "2026-01-31T12:00:00.123+00:00"}
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

from megatron.observe.report import IterationReport
from megatron.observe.timers import compute_seconds

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends to `path`, making its folder; use from one rank only.

    Where it cannot be written (disk full, no permission) `say` reports it once and training goes on. Each further line is attempted
    again; when that works, `say` reports how many were lost.
    """

    def __init__(self, path: str | os.PathLike[str], *, say: Callable[[str], None] = print) -> None:
        self._path = Path(path)
        self._say = say
        self._lost_lines = 0
        self._at_line_start = False  # not known before the file is open
        self._descriptor: int | None = None

    def start(self, iteration: int) -> None:
        """Training starts behind `iteration` (0, or the loaded checkpoint's): readers drop what the file has of later ones."""
        self._append({"kind": "start", "iteration": iteration})

    def write_training(self, report: IterationReport) -> None:
        """One iteration. Phases appear as `<phase>_seconds`, and `compute_seconds` is the work without its communication."""
        record: dict[str, Any] = {"kind": "train", **vars(report)}
        phases = dict(record.pop("phase_seconds"))
        record |= {
            f"{phase.replace('-', '_')}_seconds": seconds for phase, seconds in phases.items()
        }
        record["compute_seconds"] = compute_seconds(phases)
        self._append(record)

    def write_validation(self, iteration: int, lm_loss: float, name: str = "validation") -> None:
        """One evaluation of one validation or test set."""
        self._append(
            {"kind": "validation", "iteration": iteration, "name": name, "lm_loss": lm_loss}
        )

    def close(self) -> None:
        """Close the file. A network file system may report here what it could not write."""
        try:
            self._close()
        except OSError as error:
            self._say(
                f"cannot write metrics to {self._path}: {error.strerror}; lines at its end may be lost"
            )

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _append(self, record: dict[str, Any]) -> None:
        record["time"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = (
            json.dumps({key: _encode_non_finite(value) for key, value in record.items()}).encode()
            + b"\n"
        )
        try:
            self._write(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._close()  # opened again for the next line: the file may have been moved, or its mount have gone stale
            self._lost_lines += 1
            if self._lost_lines == 1:
                self._say(
                    f"cannot write metrics to {self._path}: {error.strerror}; training goes on, each line is attempted again"
                )
            return
        if self._lost_lines:
            self._say(
                f"metrics are written to {self._path} again; {self._lost_lines} lines were lost"
            )
            self._lost_lines = 0

    def _write(self, line: bytes) -> None:
        """Raises OSError: the line is not there, or not whole."""
        if self._descriptor is None:
            self._descriptor = self._open()
        line = line if self._at_line_start else b"\n" + line
        self._at_line_start = False
        written = os.write(self._descriptor, line)
        if written < len(line):
            raise OSError(errno.ENOSPC, "only a part of a line could be written")
        self._at_line_start = True

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND and one write a line: nothing stays in a buffer that a kill could lose.
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(descriptor).st_size
        self._at_line_start = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        return descriptor


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The run's iterations in order, each once: {..., "validation": {name: loss}} with "validation" only where one was made.

    Iterations of a lost run (behind the one from which a later launch started) are left out, torn lines passed over. An
    evaluation without an iteration of its own (--eval-only) gives an entry that has "iteration" and "validation" only.
    """
    entries: dict[int, dict[str, Any]] = {}
    last = 0
    with open(path, "rb") as file:
        for line in file:
            record = _parse(line)
            if record is None:
                continue
            kind, iteration = record.pop("kind"), record["iteration"]
            if kind == "validation":
                entry = entries.setdefault(iteration, {"iteration": iteration})
                entry.setdefault("validation", {})[record["name"]] = record["lm_loss"]
                continue
            keep = iteration if kind == "start" else iteration - 1
            if keep < last:
                entries = {number: entry for number, entry in entries.items() if number <= keep}
            if kind == "train":
                # An evaluation may stand before its iteration's line.
                entries[iteration] = entries.get(iteration, {}) | record
            last = iteration
    return [entries[number] for number in sorted(entries)]


def _encode_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # torn, or not text
        return None
    if not isinstance(record, dict) or record.get("kind") not in ("start", "train", "validation"):
        return None
    return {
        key: _NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in record.items()
    }
