"""Whether a run is well: its jobs in the queue, its main log, its newest checkpoint.

Invariant: PULSE, ALERT and RECOVERED lines are never taken for training output. When training last wrote cannot be read from the
log's time of change, which these lines move, too: a small file beside the log remembers how far it was read and when it had grown.
What could not be looked at (a queue that does not answer) neither raises an alert nor ends one.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron.checkpoint.folder import find_stored_folder, read_pointed_iteration
from megatron.checkpoint.manifest import MANIFEST
from megatron.durable import replace_file
from megatron.errors import CheckpointError, OperationsError
from megatron.observe.log_line import format_training_complete_line, parse_log_line
from megatron.operations.alerts import Alert, format_time, parse_own_line_time, read_record
from megatron.operations.queue import (
    QueuedJob,
    ask_queue,
    find_idle_reason,
    format_duration,
    format_pulse,
)

_TAIL_BYTES = 8 << 20
"""Of a log of gigabytes, enough for tens of thousands of lines."""
_NEWEST_LINES = 20
"""A loss that is not finite counts for so many lines, and longer if there are more since the last check."""
_SPEED_LINES = 10
"""Median of so many, so that an evaluation or a save among them does not count; as many must have been before."""
_ROUNDED_TFLOPS = 1.0
"""The log line has two decimals; below this, samples per second are the better measure."""


@dataclass(frozen=True)
class StatusLimits:
    """When something is an alert."""

    stalled_minutes: float = 60.0
    """The job runs, and the log has not grown for so long."""
    slower_than: float = 0.7
    """The median TFLOPs (else samples per second) of the newest 10 log lines are below this fraction of the earlier ones."""
    checkpoint_minutes: float = 720.0
    """The job has trained for so long since the newest checkpoint was saved (with --run)."""

    def check(self) -> None:
        """
        Raises:
            OperationsError: one of them can never, or always, be passed.
        """
        for flag, minutes in (
            ("--stalled-minutes", self.stalled_minutes),
            ("--checkpoint-minutes", self.checkpoint_minutes),
        ):
            if not minutes > 0:
                raise OperationsError(f"{flag} {minutes:g} must be above 0")
        if not 0 < self.slower_than < 1:
            raise OperationsError(
                f"--slower-than {self.slower_than:g} must be a fraction, above 0 and below 1, such as 0.7"
            )


@dataclass
class StatusFindings:
    """Of one look."""

    pulse: str | None = None
    """None where the queue could not be asked."""
    alerts: list[Alert] = field(default_factory=list)
    watched: set[str] = field(default_factory=set)
    """Kinds of alerts that were looked for."""
    troubles: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""


@dataclass(frozen=True)
class LogTail:
    """The end of a main log."""

    reports: list[dict[str, int | float]]
    """Of the training lines, as `parse_log_line` gives them."""
    fresh: int
    """How many of these were not there at the last check."""
    complete: bool
    """The run said that training is complete, and nothing trained after it."""
    output_at: float | None
    """When training last wrote, seconds since the epoch; at most one check too late. None: it never did."""
    read_bytes: int
    """Of the whole log, a half last line included."""


@dataclass
class StatusMemory:
    """Between two checks."""

    read_bytes: int = 0
    output_at: float | None = None
    saved_at: float | None = None
    """The newest checkpoint."""
    unsaved_seconds: float = 0.0
    """The jobs' time since then, without the waiting in the queue between them."""
    checked_at: float = 0.0
    """The checkpoint; 0: never."""

    @staticmethod
    def read(path: Path) -> "StatusMemory":
        """
        Raises:
            OperationsError: it is there and cannot be read.
        """
        record = read_record(path)
        try:
            return StatusMemory() if record is None else StatusMemory(**record).check_numbers()
        except (TypeError, ValueError):
            raise OperationsError(
                f"{path} is not what this tool writes and is begun afresh"
            ) from None

    def check_numbers(self) -> "StatusMemory":
        """Raises TypeError where one is no number."""
        for number in (
            self.read_bytes,
            self.output_at or 0,
            self.saved_at or 0,
            self.unsaved_seconds,
            self.checked_at,
        ):
            if not isinstance(number, int | float):
                raise TypeError(number)
        return self

    def write(self, path: Path) -> None:
        """
        Raises:
            OperationsError: it cannot be written.
        """
        try:
            replace_file(path, json.dumps(asdict(self)) + "\n")
        except OSError as error:
            way_out = "make room, or mend the permissions; without it a stalled log is seen later"
            raise OperationsError(
                f"{path} cannot be written ({error.strerror}): {way_out}"
            ) from error


@dataclass(frozen=True)
class WatchedRun:
    """One run."""

    job_name: str
    main_log: Path
    run: Path | None = None
    """Its --save folder."""
    user: str | None = None
    limits: StatusLimits = field(default_factory=StatusLimits)

    @property
    def memory(self) -> Path:
        return Path(f"{self.main_log}.status.json")


def check_run(run: WatchedRun, now: float | None = None) -> StatusFindings:
    """Look at queue, log and checkpoint, and remember what the next look needs.

    Raises:
        OperationsError: a limit makes no sense. All else that goes wrong is among the findings.
    """
    run.limits.check()
    now = time.time() if now is None else now
    found = StatusFindings()
    try:
        before = StatusMemory.read(run.memory)
    except OperationsError as error:
        found.troubles.append(str(error))
        before = StatusMemory()
    after = StatusMemory(**asdict(before))
    tail = _look_at_log(run, before, after, found)
    jobs = _look_at_queue(run, found)
    if jobs is not None:
        found.pulse = _check_queue(run, jobs, tail, found, now)
        _check_stall(run, jobs, tail, found, now)
        _check_checkpoint(run, jobs, before, after, found, now)
    if tail is not None:
        _check_finite(run, tail, found)
        if jobs is not None and any(job.runs for job in jobs):
            _check_speed(run, tail, found)
    try:
        after.write(run.memory)
    except OperationsError as error:
        found.troubles.append(str(error))
    return found


# The queue


def _look_at_queue(run: WatchedRun, found: StatusFindings) -> list[QueuedJob] | None:
    kind = f"{run.job_name} queue"
    found.watched.add(kind)
    try:
        return ask_queue(run.job_name, run.user)
    except OperationsError as error:
        found.troubles.append(str(error))
        found.alerts.append(Alert(kind, f"{run.job_name}: the queue cannot be looked at: {error}"))
        return None


def _check_queue(
    run: WatchedRun,
    jobs: Sequence[QueuedJob],
    tail: LogTail | None,
    found: StatusFindings,
    now: float,
) -> str:
    """Returns the PULSE."""
    kind = f"{run.job_name} idle"
    found.watched.add(kind)
    problem = find_idle_reason(run.job_name, jobs)
    if problem is not None and tail is not None and tail.complete:
        return f"{run.job_name} is finished: {format_training_complete_line()}"
    if problem is not None:
        found.alerts.append(Alert(kind, problem))
    return format_pulse(run.job_name, jobs, now)


# The log


def _look_at_log(
    run: WatchedRun, before: StatusMemory, after: StatusMemory, found: StatusFindings
) -> LogTail | None:
    kind = f"{run.job_name} log"
    found.watched.add(kind)
    try:
        tail = read_tail(run.main_log, before)
    except OSError as error:
        found.troubles.append(
            f"{run.main_log} cannot be read ({error.strerror}); give the run's main log"
        )
        found.alerts.append(
            Alert(kind, f"{run.job_name}: its log cannot be looked at: {found.troubles[-1]}")
        )
        return None
    after.read_bytes, after.output_at = tail.read_bytes, tail.output_at
    return tail


def read_tail(log: Path, before: StatusMemory) -> LogTail:
    """What is new in a log since `before`, and enough of what was there. A log that is not there yet is empty.

    Raises:
        OSError: it cannot be read.
    """
    try:
        file = open(log, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return LogTail([], 0, False, None, 0)
    with file:
        status = os.fstat(file.fileno())
        known = (
            before.read_bytes if before.read_bytes <= status.st_size else 0
        )  # else it was cut, by a rollback for one
        begin = max(0, status.st_size - _TAIL_BYTES)
        file.seek(max(0, begin - 1))
        data = file.read(status.st_size - file.tell())
    if begin:  # the first whole line
        torn = data.find(b"\n") + 1
        data, begin = data[torn:], begin - 1 + torn
    reports: list[dict[str, int | float]] = []
    fresh, complete, grown, at = 0, False, False, begin
    told_at: float | None = None
    """Of the first of our own lines that stand behind all training output."""
    for line in data.split(b"\n"):
        text, at = line.decode(errors="replace"), at + len(line)
        own = parse_own_line_time(text)
        if own is not None:
            told_at = own if told_at is None else told_at
        elif text.strip():
            told_at, grown = None, grown or at > known
            report = parse_log_line(text)
            if report is not None:
                reports.append(report)
                fresh += at > known
            complete = report is None and (complete or format_training_complete_line() in text)
        at += 1
    if grown:
        output_at: float | None = status.st_mtime if told_at is None else told_at
    else:
        output_at = before.output_at if known else None
    return LogTail(reports, fresh, complete, output_at, status.st_size)


def _check_stall(
    run: WatchedRun,
    jobs: Sequence[QueuedJob],
    tail: LogTail | None,
    found: StatusFindings,
    now: float,
) -> None:
    """A log is only expected to grow while a job runs, and not before it began to."""
    running = [job.running_seconds or 0.0 for job in jobs if job.runs]
    kind = f"{run.job_name} stalled"
    if tail is None:
        return
    found.watched.add(kind)
    if not running:
        return
    silent = max(running) if tail.output_at is None else min(max(running), now - tail.output_at)
    if silent > 60.0 * run.limits.stalled_minutes:
        last = (
            "nothing at all"
            if tail.output_at is None
            else f"the last at {format_time(tail.output_at)}"
        )
        found.alerts.append(
            Alert(
                kind,
                f"{run.job_name} runs, and has written nothing to {run.main_log} for {format_duration(silent)}; {last}",
            )
        )


def _check_finite(run: WatchedRun, tail: LogTail, found: StatusFindings) -> None:
    kind = f"{run.job_name} not finite"
    found.watched.add(kind)
    window = tail.reports[-max(_NEWEST_LINES, tail.fresh) :]
    bad = [
        report
        for report in window
        if report.get("nan_iterations") or not math.isfinite(report.get("lm_loss", 0.0))
    ]
    if bad:
        last = bad[-1]
        nans = f" ({last['nan_iterations']} steps dropped)" if last.get("nan_iterations") else ""
        text = f"{len(bad)} of the newest {len(window)} log lines tell of a loss or gradient that is not finite"
        found.alerts.append(
            Alert(kind, f"{run.job_name}: {text}, the last at iteration {last['iteration']}{nans}")
        )


def _check_speed(run: WatchedRun, tail: LogTail, found: StatusFindings) -> None:
    """By TFLOPs of one device, which neither batch size nor number of nodes moves much; by samples a second at the same batch size
    where a log has no TFLOPs worth reading."""
    kind = f"{run.job_name} slow"
    for name, unit in (("tflops", "TFLOPs"), ("samples_per_second", "samples per second")):
        rates = [
            (report[name], report.get("global_batch_size"))
            for report in tail.reports
            if report.get(name)
        ]
        if name == "samples_per_second":
            rates = [rate for rate in rates if rate[1] == rates[-1][1]]
        if len(rates) < 2 * _SPEED_LINES:
            continue
        earlier, newest = (
            statistics.median(rate for rate, _ in part)
            for part in (rates[:-_SPEED_LINES], rates[-_SPEED_LINES:])
        )
        if name == "tflops" and earlier < _ROUNDED_TFLOPS:
            continue
        found.watched.add(kind)
        if newest < run.limits.slower_than * earlier:
            text = f"{newest:.4g} {unit} (median of the newest {_SPEED_LINES} log lines) against {earlier:.4g} before"
            found.alerts.append(
                Alert(kind, f"{run.job_name} has become slower: {text}, {newest / earlier:.0%}")
            )
        return


# The checkpoint


def _check_checkpoint(
    run: WatchedRun,
    jobs: Sequence[QueuedJob],
    before: StatusMemory,
    after: StatusMemory,
    found: StatusFindings,
    now: float,
) -> None:
    """Counts the time in which jobs ran, so that neither a day in the queue is an alert, nor elements that die one after another
    before they save pass unseen."""
    if run.run is None:
        return
    kind = f"{run.job_name} checkpoint"
    found.watched.add(kind)
    try:
        iteration = read_pointed_iteration(run.run)
        saved_at = (
            None
            if iteration is None
            else (find_stored_folder(run.run, iteration) / MANIFEST).stat().st_mtime
        )
    except (CheckpointError, OSError) as error:
        found.alerts.append(
            Alert(kind, f"{run.job_name}: the newest checkpoint cannot be found: {error}")
        )
        return
    running = max((job.running_seconds or 0.0 for job in jobs if job.runs), default=0.0)
    if before.checked_at and before.saved_at == saved_at:
        unsaved = before.unsaved_seconds + max(0.0, min(running, now - before.checked_at))
    else:
        unsaved = running if saved_at is None else max(0.0, min(running, now - saved_at))
    after.saved_at, after.unsaved_seconds, after.checked_at = saved_at, unsaved, now
    if unsaved > 60.0 * run.limits.checkpoint_minutes:
        if saved_at is None:
            text = f"{run.run} has no checkpoint yet; jobs ran for {format_duration(unsaved)}"
        else:
            text = f"no checkpoint in {run.run} since global_step{iteration}, saved at {format_time(saved_at)}"
            text += f"; since then jobs ran for {format_duration(unsaved)}"
        found.alerts.append(Alert(kind, f"{run.job_name}: {text}"))
