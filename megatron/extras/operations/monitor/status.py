"""Check a run: its jobs in the queue, its main log and its newest checkpoint.

Invariant: PULSE, ALERT and RECOVERED lines are never taken for training output. These lines change
the log's modification time too, so that time does not show when training last wrote. A small file
beside the log records how far the log was read, and when training last wrote to it.

A queue that does not answer or a log that cannot be read is an alert itself. Alerts that depend on
it are then neither raised nor ended.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from megatron.base.durable import replace_file
from megatron.base.errors import CheckpointError, DataError, OperationsError
from megatron.base.outside_file import open_regular
from megatron.checkpoint.folder import find_stored_folder, read_pointed_iteration
from megatron.checkpoint.manifest import MANIFEST
from megatron.extras.operations.chronicle.failures import list_failure_facts
from megatron.extras.operations.chronicle.goodput import compute_goodput, format_goodput
from megatron.extras.operations.chronicle.history import read_history
from megatron.extras.operations.monitor.alerts import (
    CheckFindings,
    format_time,
    parse_own_line_time,
    read_record,
)
from megatron.extras.operations.monitor.queue import (
    QueuedJob,
    ask_queue,
    find_idle_reason,
    format_duration,
    format_pulse,
)
from megatron.observe.log_line import (
    format_training_complete_line,
    parse_kill_switch_line,
    parse_log_line,
    parse_slow_ranks_line,
    starts_launch,
)
from megatron.plan.rules.finding import Finding, error, refuse_errors

_TAIL_BYTES = 8 << 20
"""Bytes that are read from the end of the log, enough for tens of thousands of lines."""
_NEWEST_LINES = 20
"""Number of newest log lines that are searched for a loss that is not finite.

If more lines were written since the last check, all of those are searched.
"""
_SPEED_LINES = 10
"""Number of log lines whose median is the speed.

An evaluation or a save among them does not change it much. At least as many earlier lines are
needed.
"""
_ROUNDED_TFLOPS = 1.0
"""Lowest TFLOPs that are used.

The log line has two decimals, so below this the samples per second are more precise.
"""


@dataclass(frozen=True)
class StatusLimits:
    """When something is an alert."""

    stalled_minutes: float = 60.0
    """Minutes for which the job has run and the log has not grown."""
    slower_than: float = 0.7
    """Fraction of the earlier log lines' median TFLOPs (or samples per second). The median of the
    newest 10 lines must not be below it."""
    checkpoint_minutes: float = 720.0
    """Minutes for which the job has trained since the newest checkpoint was saved (with --run)."""


def check_limits(limits: StatusLimits) -> Iterator[Finding]:
    """Check that there would not always or never be an alert."""
    for flag, minutes in (
        ("--stalled-minutes", limits.stalled_minutes),
        ("--checkpoint-minutes", limits.checkpoint_minutes),
    ):
        if not minutes > 0:
            yield error(f"{flag} {minutes:g} must be above 0")
    if not 0 < limits.slower_than < 1:
        yield error(
            f"--slower-than {limits.slower_than:g} must be a fraction, above 0 and below 1, "
            "such as 0.7"
        )


@dataclass(frozen=True)
class LogTail:
    """The end of a main log."""

    reports: list[dict[str, int | float]]
    """The training lines, as `parse_log_line` returns them."""
    fresh: int
    """Number of these lines that are new since the last check."""
    complete: bool
    """The log has the line `training is complete`, and no training line after it."""
    kill_switch: str | None
    """Path of the kill switch that stopped the run. None if there was no such stop, or if a
    training line follows it."""
    output_at: float | None
    """Time at which training last wrote, in seconds since the epoch.

    If these tools wrote a line after the training's output, it is the time of that line. It is then
    late by at most the time between two checks. None: training never wrote.
    """
    read_bytes: int
    """Size of the log in bytes, including an incomplete last line."""
    slow_ranks: str = ""
    """The ranks that the newest launch found to be slow at last, in words. Empty: none."""


@dataclass
class StatusMemory:
    """What one check records for the next one."""

    read_bytes: int = 0
    """Size of the log."""
    output_at: float | None = None
    """Time at which training last wrote."""
    saved_at: float | None = None
    """Time of the newest checkpoint."""
    unsaved_seconds: float = 0.0
    """Time for which jobs ran since then, without the time in the queue."""
    checked_at: float = 0.0
    """Time of the last check of the checkpoint. 0: never."""

    @staticmethod
    def read(path: Path) -> "StatusMemory":
        """Read the memory of the last check, which is empty before the first one.

        Raises:
            OperationsError: The file exists and cannot be read.
        """
        record = read_record(path)
        try:
            # Unknown names raise TypeError as well.
            if record is None:
                return StatusMemory()
            return StatusMemory(**record).check_numbers()
        except (TypeError, ValueError):
            raise OperationsError(
                f"{path} has an unknown format and is started from scratch"
            ) from None

    def check_numbers(self) -> "StatusMemory":
        """Return the memory if all fields are numbers.

        Raises:
            TypeError: One is not a number.
        """
        for number in (
            self.read_bytes,
            self.output_at or 0,
            self.saved_at or 0,
            self.unsaved_seconds,
            self.checked_at,
        ):
            # JSON may hold anything, and a text would fail only in the middle of a check.
            if not isinstance(number, int | float):
                raise TypeError(number)
        return self

    def write(self, path: Path) -> None:
        """Write the memory for the next check.

        Raises:
            OperationsError: The file cannot be written.
        """
        try:
            replace_file(path, json.dumps(asdict(self)) + "\n")
        except OSError as error:
            way_out = "free disk space, or fix the permissions; until then, a stall is found late"
            raise OperationsError(
                f"{path} cannot be written ({error.strerror}): {way_out}"
            ) from error


@dataclass(frozen=True)
class WatchedRun:
    """One run to check."""

    job_name: str
    """Name of the run's jobs in Slurm."""
    main_log: Path
    """Log that the launches append to."""
    run: Path | None = None
    """Its --save folder. None: the checkpoint is not checked."""
    user: str | None = None
    """User whose jobs are listed. None: the current user."""
    limits: StatusLimits = field(default_factory=StatusLimits)

    @property
    def memory(self) -> Path:
        """File with the memory of the last check."""
        return Path(f"{self.main_log}.status.json")


def check_run(run: WatchedRun, now: float | None = None) -> CheckFindings:
    """Check queue, log and checkpoint, and record what the next check needs.

    Other errors are not raised. They are among the findings.

    Args:
        run: The run.
        now: Time of the check in seconds since the epoch. Default: the present time.

    Raises:
        ConfigError: A limit makes no sense.
    """
    refuse_errors(check_limits(run.limits))
    if now is None:
        now = time.time()
    found = CheckFindings()
    try:
        # A damaged memory only delays some alerts, so the check continues without it.
        before = StatusMemory.read(run.memory)
    except OperationsError as error:
        found.troubles.append(str(error))
        before = StatusMemory()
    # What cannot be examined keeps its last value.
    after = StatusMemory(**asdict(before))
    tail = _look_at_log(run, before, after, found)
    jobs = _look_at_queue(run, found)
    if jobs is not None:
        pulse = _check_queue(run, jobs, tail, found, now)
        found.pulses.append(pulse + _describe_goodput(run, found))
        _check_stall(run, jobs, tail, found, now)
        _check_checkpoint(run, jobs, before, after, found, now)
    if tail is not None:
        _check_finite(run, tail, found)
        # While nothing runs, the newest lines are old, and their speed was already checked.
        if jobs is not None and any(job.runs for job in jobs):
            _check_speed(run, tail, found)
            _check_slow_ranks(run, tail, found)
    try:
        after.write(run.memory)
    except OperationsError as error:
        found.troubles.append(str(error))
    return found


# The queue


def _look_at_queue(run: WatchedRun, found: CheckFindings) -> list[QueuedJob] | None:
    """Return the run's jobs, or None if the queue cannot be asked."""
    kind = f"{run.job_name} queue"
    found.watched.add(kind)
    try:
        return ask_queue(run.job_name, run.user)
    except OperationsError as error:
        found.troubles.append(str(error))
        found.add_alert(kind, f"{run.job_name}: the queue cannot be queried: {error}")
        return None


def _check_queue(
    run: WatchedRun,
    jobs: Sequence[QueuedJob],
    tail: LogTail | None,
    found: CheckFindings,
    now: float,
) -> str:
    """Check that something runs or is queued, and return the PULSE line."""
    kind = f"{run.job_name} idle"
    found.watched.add(kind)
    problem = find_idle_reason(run.job_name, jobs)
    # A run that is complete has no jobs, which is no problem.
    if problem is not None and tail is not None and tail.complete:
        return f"{run.job_name} is finished: {format_training_complete_line()}"
    # A person stopped the run on purpose. That also cancels the pending tasks of its job array.
    if not jobs and tail is not None and tail.kill_switch is not None:
        return (
            f"{run.job_name} was stopped by its kill switch; to continue, remove "
            f"{tail.kill_switch} and submit a job"
        )
    if problem is not None:
        found.add_alert(kind, problem)
    return format_pulse(run.job_name, jobs, now)


# The log


def _look_at_log(
    run: WatchedRun, before: StatusMemory, after: StatusMemory, found: CheckFindings
) -> LogTail | None:
    """Return the end of the log, or None if it cannot be read."""
    kind = f"{run.job_name} log"
    found.watched.add(kind)
    try:
        tail = read_tail(run.main_log, before)
    except OSError as error:
        found.troubles.append(
            f"{run.main_log} cannot be read ({error.strerror}); give the run's main log"
        )
        found.add_alert(kind, f"{run.job_name}: its log cannot be checked: {found.troubles[-1]}")
        return None
    after.read_bytes = tail.read_bytes
    after.output_at = tail.output_at
    return tail


def read_tail(log: Path, before: StatusMemory) -> LogTail:
    """Read the last _TAIL_BYTES of a log, and find out what is new in it since `before`.

    A log that does not exist yet counts as empty.

    Raises:
        OSError: The log cannot be read.
    """
    try:
        file = open_regular(log)
    except FileNotFoundError:
        return LogTail([], 0, False, None, None, 0)
    with file:
        status = os.fstat(file.fileno())
        data, at = _read_last_lines(file, status.st_size)
    # A log that became shorter was cut, for example by a rollback. All of it counts as new.
    known = before.read_bytes
    if known > status.st_size:
        known = 0
    scan = _LogScan(known)
    for line in data.split(b"\n"):
        at += len(line)
        scan.add_line(line.decode(errors="replace"), at)
        # The line end itself.
        at += 1
    if not scan.grown:
        # After a cut, or at the first check, no recorded time applies.
        output_at = before.output_at if known else None
    elif scan.own_line_at is not None:
        output_at = scan.own_line_at
    else:
        # Without a line of ours at the end, training itself changed the modification time last.
        output_at = status.st_mtime
    return LogTail(
        scan.reports,
        scan.fresh,
        scan.complete,
        scan.kill_switch,
        output_at,
        status.st_size,
        scan.slow_ranks,
    )


def _read_last_lines(file: BinaryIO, size: int) -> tuple[bytes, int]:
    """Return the complete lines in the last bytes of a log, and the offset at which they begin.

    An incomplete last line is included.
    """
    begin = max(0, size - _TAIL_BYTES)
    # One byte more is read, so that a line that begins at `begin` is not taken for a torn one.
    file.seek(max(0, begin - 1))
    data = file.read(size - file.tell())
    if not begin:
        return data, 0
    # What is before the first complete line is dropped.
    torn = data.find(b"\n") + 1
    return data[torn:], begin - 1 + torn


@dataclass
class _LogScan:
    """What the lines of a log show, from the first one to the last one that was added."""

    known: int
    """Bytes of the log that the last check had read."""
    reports: list[dict[str, int | float]] = field(default_factory=list)
    """The training lines."""
    fresh: int = 0
    """Number of them that are new."""
    complete: bool = False
    """The training is complete, and was not continued."""
    kill_switch: str | None = None
    """Path of the kill switch that stopped the training, if it was not continued."""
    slow_ranks: str = ""
    """See `LogTail`."""
    grown: bool = False
    """There is new training output."""
    own_line_at: float | None = None
    """Time of the first of our own lines after all training output.

    Our own lines after training output were written later, so it bounds the time of that output.
    """

    def add_line(self, text: str, end: int) -> None:
        """Add the next line.

        Args:
            text: The line without its end.
            end: Offset in the log at which the line ends, without its line end.
        """
        own = parse_own_line_time(text)
        if own is not None:
            if self.own_line_at is None:
                self.own_line_at = own
            return
        if not text.strip():
            return
        self.own_line_at = None
        self.grown = self.grown or end > self.known
        report = parse_log_line(text)
        if report is not None:
            self.reports.append(report)
            self.fresh += end > self.known
            # A training line after `training is complete` means that the run was continued.
            self.complete = False
            self.kill_switch = None
        elif format_training_complete_line() in text:
            self.complete = True
        elif starts_launch(text):
            # Another launch may run on other hosts.
            self.slow_ranks = ""
        elif (slow := parse_slow_ranks_line(text)) is not None:
            self.slow_ranks = slow
        else:
            self.kill_switch = parse_kill_switch_line(text) or self.kill_switch


def _check_stall(
    run: WatchedRun,
    jobs: Sequence[QueuedJob],
    tail: LogTail | None,
    found: CheckFindings,
    now: float,
) -> None:
    """Check that the log grows while a job runs.

    The time before the job started does not count.
    """
    running = [job.running_seconds or 0.0 for job in jobs if job.runs]
    kind = f"{run.job_name} stalled"
    if tail is None:
        return
    found.watched.add(kind)
    if not running:
        return
    # A job that has just started is not silent for longer than it has run.
    if tail.output_at is None:
        silent = max(running)
    else:
        silent = min(max(running), now - tail.output_at)
    if silent > 60.0 * run.limits.stalled_minutes:
        if tail.output_at is None:
            last = "the log has no training output"
        else:
            last = f"the last output was at {format_time(tail.output_at)}"
        found.add_alert(
            kind,
            f"{run.job_name} is running, but has written nothing to {run.main_log} for "
            f"{format_duration(silent)}; {last}",
        )


def _check_finite(run: WatchedRun, tail: LogTail, found: CheckFindings) -> None:
    """Check that losses and gradients are finite."""
    kind = f"{run.job_name} not finite"
    found.watched.add(kind)
    # All lines since the last check are covered, however rarely it is made.
    window = tail.reports[-max(_NEWEST_LINES, tail.fresh) :]
    bad = [
        report
        for report in window
        if report.get("nan_iterations") or not math.isfinite(report.get("lm_loss", 0.0))
    ]
    if bad:
        last = bad[-1]
        if last.get("nan_iterations"):
            nans = f" ({last['nan_iterations']} steps dropped)"
        else:
            nans = ""
        text = (
            f"{len(bad)} of the newest {len(window)} log lines have a loss or gradient "
            "that is not finite"
        )
        text += f", the last at iteration {last['iteration']}{nans}"
        found.add_alert(kind, f"{run.job_name}: {text}")


def _check_speed(run: WatchedRun, tail: LogTail, found: CheckFindings) -> None:
    """Check that the run has not become slower.

    TFLOPs of one device are compared, because neither batch size nor number of nodes changes them
    much. If a log has no usable TFLOPs, tokens or samples per second at the same batch size are
    compared.
    """
    kind = f"{run.job_name} slow"
    for name, unit in (
        ("tflops", "TFLOPs"),
        ("tokens_per_second", "tokens per second"),
        # Older logs have no tokens per second.
        ("samples_per_second", "samples per second"),
    ):
        rates = [
            (report[name], report.get("global_batch_size"))
            for report in tail.reports
            if report.get(name)
        ]
        # These change with the batch size, so only the lines of the present one are compared.
        if name != "tflops":
            rates = [rate for rate in rates if rate[1] == rates[-1][1]]
        # Too few lines give no reliable median.
        if len(rates) < 2 * _SPEED_LINES:
            continue
        earlier, newest = (
            statistics.median(rate for rate, _ in part)
            for part in (rates[:-_SPEED_LINES], rates[-_SPEED_LINES:])
        )
        # The next measure is tried, because two decimals are too few for a small model.
        if name == "tflops" and earlier < _ROUNDED_TFLOPS:
            continue
        found.watched.add(kind)
        if newest < run.limits.slower_than * earlier:
            text = (
                f"{newest:.4g} {unit} (median of the newest {_SPEED_LINES} log lines) "
                f"instead of {earlier:.4g} earlier"
            )
            text += f", {newest / earlier:.0%}"
            found.add_alert(kind, f"{run.job_name} has become slower: {text}")
        return


def _describe_goodput(run: WatchedRun, found: CheckFindings) -> str:
    """Return the end of the PULSE line: the goodput, or nothing if the run has no records yet."""
    if run.run is None:
        return ""
    try:
        history = read_history(run.run)
        facts = "".join(f"; {name}: {value}" for name, value in list_failure_facts(history))
        return f"; {format_goodput(compute_goodput(history))}{facts}"
    # Nothing was trained yet.
    except DataError:
        return ""
    except (OSError, ValueError) as error:
        found.troubles.append(f"the goodput of {run.run} cannot be computed: {error}")
        return ""


def _check_slow_ranks(run: WatchedRun, tail: LogTail, found: CheckFindings) -> None:
    """Check that no rank computes more slowly than the others."""
    kind = f"{run.job_name} slow ranks"
    found.watched.add(kind)
    if tail.slow_ranks:
        found.add_alert(kind, f"{run.job_name}: the others wait for {tail.slow_ranks}")


# The checkpoint


def _check_checkpoint(
    run: WatchedRun,
    jobs: Sequence[QueuedJob],
    before: StatusMemory,
    after: StatusMemory,
    found: CheckFindings,
    now: float,
) -> None:
    """Check that the newest checkpoint is recent enough.

    Only the time in which jobs ran counts. A day in the queue is no alert. Array tasks that die one
    after another before they save are still noticed.
    """
    if run.run is None:
        return
    kind = f"{run.job_name} checkpoint"
    found.watched.add(kind)
    try:
        iteration = read_pointed_iteration(run.run)
        # The manifest is written last, so its time is that of the complete checkpoint.
        if iteration is None:
            saved_at = None
        else:
            saved_at = (find_stored_folder(run.run, iteration) / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError) as error:
        found.add_alert(kind, f"{run.job_name}: the newest checkpoint cannot be found: {error}")
        return
    running = max((job.running_seconds or 0.0 for job in jobs if job.runs), default=0.0)
    # The checkpoint is the same as at the last check, so the time that jobs ran since then is
    # added.
    if before.checked_at and before.saved_at == saved_at:
        unsaved = before.unsaved_seconds + max(0.0, min(running, now - before.checked_at))
    else:
        # With a new checkpoint or at the first check, only the present job counts.
        if saved_at is None:
            unsaved = running
        else:
            unsaved = max(0.0, min(running, now - saved_at))
    after.saved_at = saved_at
    after.unsaved_seconds = unsaved
    after.checked_at = now
    if unsaved > 60.0 * run.limits.checkpoint_minutes:
        if saved_at is None:
            text = f"{run.run} has no checkpoint yet; jobs ran for {format_duration(unsaved)}"
        else:
            text = (
                f"no checkpoint in {run.run} since global_step{iteration}, saved at "
                f"{format_time(saved_at)}"
            )
            text += f"; since then jobs ran for {format_duration(unsaved)}"
        found.add_alert(kind, f"{run.job_name}: {text}")
