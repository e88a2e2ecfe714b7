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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from megatron.base.errors import CheckpointError, DataError, OperationsError
from megatron.base.outside_file import open_regular
from megatron.checkpoint.folder import find_stored_folder, read_pointed_iteration
from megatron.checkpoint.manifest import MANIFEST
from megatron.extras.operations.chronicle.goodput import (
    compute_goodput,
    format_goodput,
    list_failure_facts,
)
from megatron.extras.operations.chronicle.history import read_history
from megatron.extras.operations.monitor.alerts import (
    CheckFindings,
    format_time,
    parse_own_line_time,
    read_record,
    write_record,
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


@dataclass
class LogTail:
    """The end of a main log, up to the last line that was added."""

    known: int = 0
    """Bytes of the log that the last check had read."""
    read_bytes: int = 0
    """Size of the log in bytes, including an incomplete last line."""
    reports: list[dict[str, int | float]] = field(default_factory=list)
    """The training lines, as `parse_log_line` returns them."""
    fresh: int = 0
    """Number of these lines that are new since the last check."""
    complete: bool = False
    """The log has the line `training is complete`, and no training line after it."""
    kill_switch: str | None = None
    """Path of the kill switch that stopped the run. None if there was no such stop, or if a
    training line follows it."""
    slow_ranks: str = ""
    """The ranks that the newest launch found to be slow at last, in words. Empty: none."""
    output_at: float | None = None
    """Time at which training last wrote, in seconds since the epoch.

    If these tools wrote a line after the training's output, it is the time of that line. It is then
    late by at most the time between two checks. None: training never wrote.
    """
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
    def parse(record: Any) -> "StatusMemory":
        """Check the content of a memory file, and convert it. See `read_record`."""
        # Unknown names raise TypeError as well.
        memory = StatusMemory(**record)
        for each in fields(memory):
            number = getattr(memory, each.name)
            # JSON may hold anything, and a text would fail only in the middle of a check.
            if not isinstance(number, int | float) and (number, each.default) != (None, None):
                raise TypeError(number)
        return memory


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
    check = _Check(run, now)
    check.examine()
    return check.found


class _Check:
    """One check of a run. Its parts add to the findings."""

    def __init__(self, run: WatchedRun, now: float) -> None:
        self._run = run
        self._now = now
        self.found = CheckFindings()
        # A damaged memory only delays some alerts, so the check continues without it.
        memory = read_record(run.memory, StatusMemory.parse, self.found.troubles)
        self._before = memory or StatusMemory()
        # What cannot be examined keeps its last value.
        self._after = replace(self._before)

    def examine(self) -> None:
        """Check queue, log and checkpoint, and write the memory."""
        tail = self._read_log()
        jobs = self._ask_queue()
        if jobs is not None:
            self.found.pulses.append(self._check_queue(jobs, tail) + self._describe_goodput())
            running = [job.running_seconds or 0.0 for job in jobs if job.runs]
            if tail is not None:
                self._check_stall(running, tail)
            if self._run.run is not None:
                self._check_checkpoint(self._run.run, max(running, default=0.0))
        if tail is not None:
            self._check_finite(tail)
            # While nothing runs, the newest lines are old, and their speed was already checked.
            if jobs is not None and any(job.runs for job in jobs):
                self._check_speed(tail)
                self._check_slow_ranks(tail)
        remark = ": free disk space, or fix the permissions; until then, a stall is found late"
        text = json.dumps(asdict(self._after))
        write_record(self._run.memory, text, self.found.troubles, remark)

    def _watch(self, subject: str) -> str:
        """Note that a kind of alert is checked, and return it."""
        return self.found.watch(f"{self._run.job_name} {subject}")

    # The queue

    def _ask_queue(self) -> list[QueuedJob] | None:
        """Return the run's jobs, or None if the queue cannot be asked."""
        kind = self._watch("queue")
        try:
            return ask_queue(self._run.job_name, self._run.user)
        except OperationsError as error:
            self.found.troubles.append(str(error))
            text = f"{self._run.job_name}: the queue cannot be queried: {error}"
            self.found.add_alert(kind, text)
            return None

    def _check_queue(self, jobs: Sequence[QueuedJob], tail: LogTail | None) -> str:
        """Check that something runs or is queued, and return the PULSE line."""
        name = self._run.job_name
        kind = self._watch("idle")
        problem = find_idle_reason(name, jobs)
        # A run that is complete has no jobs, which is no problem.
        if problem is not None and tail is not None and tail.complete:
            return f"{name} is finished: {format_training_complete_line()}"
        # A person stopped the run on purpose. That also cancels the pending tasks of its job array.
        if not jobs and tail is not None and tail.kill_switch is not None:
            return (
                f"{name} was stopped by its kill switch; to continue, remove {tail.kill_switch} "
                "and submit a job"
            )
        if problem is not None:
            self.found.add_alert(kind, problem)
        return format_pulse(name, jobs, self._now)

    def _describe_goodput(self) -> str:
        """Return the end of the PULSE line: the goodput, or nothing if there are no records yet."""
        folder = self._run.run
        if folder is None:
            return ""
        try:
            history = read_history(folder)
            facts = "".join(f"; {name}: {value}" for name, value in list_failure_facts(history))
            return f"; {format_goodput(compute_goodput(history))}{facts}"
        # Nothing was trained yet.
        except DataError:
            return ""
        except (OSError, ValueError) as error:
            self.found.troubles.append(f"the goodput of {folder} cannot be computed: {error}")
            return ""

    # The log

    def _read_log(self) -> LogTail | None:
        """Return the end of the log, or None if it cannot be read."""
        log = self._run.main_log
        kind = self._watch("log")
        try:
            tail = read_tail(log, self._before)
        except OSError as error:
            trouble = f"{log} cannot be read ({error.strerror}); give the run's main log"
            self.found.troubles.append(trouble)
            text = f"{self._run.job_name}: its log cannot be checked: {trouble}"
            self.found.add_alert(kind, text)
            return None
        self._after.read_bytes = tail.read_bytes
        self._after.output_at = tail.output_at
        return tail

    def _check_stall(self, running: Sequence[float], tail: LogTail) -> None:
        """Check that the log grows while jobs run, for these seconds.

        The time before a job started does not count.
        """
        kind = self._watch("stalled")
        if not running:
            return
        # A job that has just started is not silent for longer than it has run.
        silent = max(running)
        last = "the log has no training output"
        if tail.output_at is not None:
            silent = min(silent, self._now - tail.output_at)
            last = f"the last output was at {format_time(tail.output_at)}"
        if silent > 60.0 * self._run.limits.stalled_minutes:
            self.found.add_alert(
                kind,
                f"{self._run.job_name} is running, but has written nothing to "
                f"{self._run.main_log} for {format_duration(silent)}; {last}",
            )

    def _check_finite(self, tail: LogTail) -> None:
        """Check that losses and gradients are finite."""
        kind = self._watch("not finite")
        # All lines since the last check are covered, however rarely it is made.
        window = tail.reports[-max(_NEWEST_LINES, tail.fresh) :]
        bad = [
            report
            for report in window
            if report.get("nan_iterations") or not math.isfinite(report.get("lm_loss", 0.0))
        ]
        if bad:
            text = (
                f"{self._run.job_name}: {len(bad)} of the newest {len(window)} log lines have a "
                "loss or gradient that is not finite, the last at iteration "
                f"{bad[-1]['iteration']}"
            )
            if bad[-1].get("nan_iterations"):
                text += f" ({bad[-1]['nan_iterations']} steps dropped)"
            self.found.add_alert(kind, text)

    def _check_speed(self, tail: LogTail) -> None:
        """Check that the run has not become slower.

        TFLOPs of one device are compared, because neither batch size nor number of nodes changes
        them much. If a log has no usable TFLOPs, tokens or samples per second at the same batch
        size are compared.
        """
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
            kind = self._watch("slow")
            if newest < self._run.limits.slower_than * earlier:
                self.found.add_alert(
                    kind,
                    f"{self._run.job_name} has become slower: {newest:.4g} {unit} (median of the "
                    f"newest {_SPEED_LINES} log lines) instead of {earlier:.4g} earlier, "
                    f"{newest / earlier:.0%}",
                )
            return

    def _check_slow_ranks(self, tail: LogTail) -> None:
        """Check that no rank computes more slowly than the others."""
        kind = self._watch("slow ranks")
        if tail.slow_ranks:
            text = f"{self._run.job_name}: the others wait for {tail.slow_ranks}"
            self.found.add_alert(kind, text)

    # The checkpoint

    def _check_checkpoint(self, folder: Path, running: float) -> None:
        """Check that the newest checkpoint is recent enough.

        Only the time in which jobs ran counts. A day in the queue is no alert. Array tasks that die
        one after another before they save are still noticed.

        Args:
            folder: The run's --save folder.
            running: Seconds for which the present job has run.
        """
        name = self._run.job_name
        kind = self._watch("checkpoint")
        saved_at = None
        try:
            iteration = read_pointed_iteration(folder)
            # The manifest is written last, so its time is that of the complete checkpoint.
            if iteration is not None:
                saved_at = (find_stored_folder(folder, iteration) / MANIFEST).stat().st_mtime
        except (CheckpointError, OSError) as error:
            self.found.add_alert(kind, f"{name}: the newest checkpoint cannot be found: {error}")
            return
        before = self._before
        # With a new checkpoint or at the first check, only the present job counts.
        earlier, since = 0.0, saved_at
        # If it is the same checkpoint as at the last check, the time that jobs ran since is added.
        if before.checked_at and before.saved_at == saved_at:
            earlier, since = before.unsaved_seconds, before.checked_at
        unsaved = running
        if since is not None:
            unsaved = earlier + max(0.0, min(running, self._now - since))
        self._after.saved_at = saved_at
        self._after.unsaved_seconds = unsaved
        self._after.checked_at = self._now
        if unsaved > 60.0 * self._run.limits.checkpoint_minutes:
            text = f"{folder} has no checkpoint yet;"
            if saved_at is not None:
                text = (
                    f"no checkpoint in {folder} since global_step{iteration}, saved at "
                    f"{format_time(saved_at)}; since then"
                )
            self.found.add_alert(kind, f"{name}: {text} jobs ran for {format_duration(unsaved)}")


# The end of the log


def read_tail(log: Path, before: StatusMemory) -> LogTail:
    """Read the last _TAIL_BYTES of a log, and find out what is new in it since `before`.

    A log that does not exist yet counts as empty.

    Raises:
        OSError: The log cannot be read.
    """
    try:
        file = open_regular(log)
    except FileNotFoundError:
        return LogTail()
    with file:
        status = os.fstat(file.fileno())
        data, at = _read_last_lines(file, status.st_size)
    # A log that became shorter was cut, for example by a rollback. All of it counts as new.
    known = before.read_bytes
    if known > status.st_size:
        known = 0
    tail = LogTail(known, status.st_size)
    for line in data.split(b"\n"):
        at += len(line)
        tail.add_line(line.decode(errors="replace"), at)
        # The line end itself.
        at += 1
    if not tail.grown:
        # After a cut, or at the first check, no recorded time applies.
        tail.output_at = before.output_at if known else None
    elif tail.own_line_at is not None:
        tail.output_at = tail.own_line_at
    else:
        # Without a line of ours at the end, training itself changed the modification time last.
        tail.output_at = status.st_mtime
    return tail


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
