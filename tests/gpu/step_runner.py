"""Runs commands one after the other, each with a time limit, and keeps what they measured.

Invariant: the report is complete after each step. A step that fails or hangs does not stop the
next one. Whatever ends this program, the rows that a step had measured by then are in the folder of
the report, because steps add them to a file there (`benchmarks/results.py`).

The module needs nothing outside of Python's library, so it also reports that a package is missing.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from results import VARIABLE, read_rows  # noqa: E402

_LOG_BYTES = 2 << 20
"""A step that prints more is ended, so that the log stays small enough to be copied."""
_SHORTEST_SECONDS = 5.0
"""A step does not start with less time than this."""
_END_SECONDS = 10.0
"""Time for a step to end after SIGTERM, before it is killed."""
_POLL_SECONDS = 0.2
_MOST_LINES = 40
"""Lines of a step's output that become rows."""
_TAIL = 2000
"""Characters of a step's output in the report."""


@dataclass(frozen=True)
class Step:
    """A command with a time limit."""

    title: str
    seconds: float
    command: tuple[str, ...]
    answers: str = ""
    """What the step answers, for the report."""
    environment: tuple[tuple[str, str], ...] = ()
    table: str | None = None
    """Table to which the printed lines are added, for a program that adds no rows."""


@dataclass
class Outcome:
    """What became of a step."""

    title: str
    answers: str = ""
    """What the step answers."""
    status: str = "not started"
    """not started, running, passed, failed, timed out, too much output, or interrupted."""
    seconds: float = 0.0
    limit: float = 0.0
    exit_code: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    tail: str = ""
    """The end of the output of a step that did not pass."""


class Report:
    """The results of one part: PART.json, and PART.log with the output of its steps."""

    def __init__(
        self, folder: Path, name: str, steps: Sequence[Step], note: dict[str, Any]
    ) -> None:
        """Create the report, with all steps not started.

        Args:
            folder: Folder of the report.
            name: Name of the part, such as part1.
            steps: The steps.
            note: Other entries of the report.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        self.rows = folder / f"{name}.rows.jsonl"
        self._json = folder / f"{name}.json"
        self._note = note
        self.outcomes = [Outcome(step.title, step.answers) for step in steps]
        for path in (self.log, self.rows):
            path.write_bytes(b"")
        self.write()

    def write(self) -> None:
        """Replace PART.json by the present state."""
        text = json.dumps(
            {**self._note, "steps": [asdict(each) for each in self.outcomes]}, indent=1
        )
        partial = self._json.with_suffix(".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self._json)

    def finish(self) -> None:
        """Write the report. The rows are in it, so their own file is removed."""
        self.write()
        self.rows.unlink()


def run_steps(
    steps: Sequence[Step], report: Report, budget: float, say: Callable[[str], None]
) -> bool:
    """Run the steps within a budget of seconds, and return whether all of them passed.

    SIGTERM and SIGINT end the running step, and the report is completed.
    """
    end = time.monotonic() + budget
    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # An exception could come before the process of a step is known, and leave it running.
        interrupted.set()

    previous = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        for step, outcome in zip(steps, report.outcomes, strict=True):
            if interrupted.is_set():
                say("interrupted")
                break
            left = end - time.monotonic()
            if left < _SHORTEST_SECONDS:
                say(f"--- {step.title}: not started, {left:.0f} s are left")
                continue
            outcome.limit = min(step.seconds, left)
            outcome.status = "running"
            report.write()
            say(f"==> {step.title} (at most {outcome.limit:.0f} s)")
            _run_step(step, outcome, report, interrupted)
            report.write()
            say(_describe(outcome))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        report.finish()
    return all(outcome.status == "passed" for outcome in report.outcomes)


def _run_step(step: Step, outcome: Outcome, report: Report, interrupted: threading.Event) -> None:
    """Run a step, and fill in its outcome."""
    begin = report.log.stat().st_size
    first_row = report.rows.stat().st_size
    start = time.monotonic()
    environment = {**os.environ, **dict(step.environment), VARIABLE: str(report.rows)}
    with open(report.log, "ab") as log:
        log.write(f"\n==> {step.title}\n".encode())
        log.flush()
        # A session of its own, so that all processes of the step can be ended together.
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        outcome.status = _wait(process, start + outcome.limit, report.log, begin, interrupted)
    finally:
        _end(process)
        # The step may have printed more before its end.
        if report.log.stat().st_size > begin + _LOG_BYTES:
            os.truncate(report.log, begin + _LOG_BYTES)
        outcome.exit_code = process.returncode
        outcome.seconds = round(time.monotonic() - start, 1)
        if step.table is not None:
            # The first two lines of the log name the step.
            lines = _read_from(report.log, begin).splitlines()[2:][:_MOST_LINES]
            rows = [json.dumps({"table": step.table, "line": line}) + "\n" for line in lines]
            with open(report.rows, "a", encoding="utf-8") as file:
                file.writelines(rows)
        outcome.rows = read_rows(_read_from(report.rows, first_row))
        if outcome.status != "passed":
            outcome.tail = _read_from(report.log, begin)[-_TAIL:]


def _wait(
    process: subprocess.Popen[bytes],
    end: float,
    log: Path,
    begin: int,
    interrupted: threading.Event,
) -> str:
    """Wait for the end of a step, and return its status."""
    while process.poll() is None:
        if interrupted.is_set():
            return "interrupted"
        if time.monotonic() > end:
            return "timed out"
        if log.stat().st_size - begin > _LOG_BYTES:
            return "too much output"
        time.sleep(_POLL_SECONDS)
    return "passed" if process.returncode == 0 else "failed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a step that still run."""
    for number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, _END_SECONDS)):
        # The leader may have ended and left others, which have its number as their group.
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        end = time.monotonic() + seconds
        while time.monotonic() < end and _is_alive(process):
            time.sleep(0.05)
    process.wait()


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process of the group still runs."""
    # Without this, the ended leader would stay in the group.
    process.poll()
    for entry in Path("/proc").iterdir():
        try:
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            # It is no process, or has ended.
            continue
        # A zombie stays if the first process of a container does not collect it.
        if group == str(process.pid) and state != "Z":
            return True
    return False


def _read_from(path: Path, begin: int) -> str:
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read().decode("utf-8", "replace")


def _describe(outcome: Outcome) -> str:
    text = f"--- {outcome.title}: {outcome.status} after {outcome.seconds:.0f} s"
    text += f", {len(outcome.rows)} rows"
    if outcome.status != "passed":
        text += f", exit code {outcome.exit_code}\n{outcome.tail[-800:]}"
    return text
