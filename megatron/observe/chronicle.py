"""The chronicle: what happened to a run over all its launches, one JSON line for each event.

It has what no other file of the run has. Iterations and evaluations are in the metrics file, and
rollbacks are in `interventions.jsonl`.

Invariants:
- A line is written by one call and ends in a newline. A killed run tears at most its last line, and
  the next event starts a new one.
- No line is ever changed or removed, also not by a rollback.
- A chronicle that cannot be written does not end training.

Example:
    {"time": "2026-01-31T12:00:00.123+00:00", "kind": "start", "iteration": 0, "details": {...}}
    {"time": ..., "kind": "save", "iteration": 100, "details": {}}
    {"time": ..., "kind": "stop", "iteration": 120, "details": {"reason": "signal"}}
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.base.durable import append_lines
from megatron.base.plain_text import print_line
from megatron.observe.report import ReportEvent, RunEvent, Sink

CHRONICLE = "chronicle.jsonl"
"""File name of the chronicle, in the run's --save folder."""


class Chronicle(Sink):
    """Writer of the chronicle. Use it from one rank only.

    If the file cannot be written, this is reported once. Each further event is attempted again.
    When one succeeds, the number of lost events is reported.
    """

    def __init__(self, path: Path, *, log: Callable[[str], None] = print_line) -> None:
        """Store the path. The file is created with the first event.

        Args:
            path: The file to append to.
            log: Prints a line of the log.
        """
        self._path = path
        self._log = log
        self._lost_events = 0
        self._last: RunEvent | None = None

    def write(self, event: ReportEvent) -> None:
        """Record what happened to the run."""
        if isinstance(event, RunEvent):
            if event.at_close:
                self._last = event
            else:
                self.record(event.kind, event.iteration, event.details)

    def close(self) -> None:
        """Record the last event."""
        if self._last is not None:
            self.record(self._last.kind, self._last.iteration, self._last.details)

    def record(self, kind: str, iteration: int | None, details: Mapping[str, Any]) -> None:
        """Append one event with the current time.

        Args:
            kind: Kind of the event: start, stop, save, skip, alert or note. Tools add others.
            iteration: The run's last iteration. None if it is not known.
            details: What else is known, by name. The names depend on the kind.
        """
        try:
            append_event(self._path, kind, iteration, details)
        except OSError as error:
            self._lost_events += 1
            if self._lost_events == 1:
                self._log(
                    f"cannot write the chronicle {self._path}: {error.strerror}; training "
                    "continues, and each event is tried again"
                )
            return
        if self._lost_events:
            self._log(
                f"the chronicle {self._path} is written again; {self._lost_events} events were lost"
            )
            self._lost_events = 0


def append_event(path: Path, kind: str, iteration: int | None, details: Mapping[str, Any]) -> None:
    """Append one event with the current time to a chronicle. The line is on the disk afterwards.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "kind": kind,
        "iteration": iteration,
        "details": dict(details),
    }
    # One call writes the line, so that a kill cannot mix two events.
    append_lines(path, [json.dumps(record)])
