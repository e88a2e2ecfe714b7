"""Run one array task of a Slurm job array, from its start to its end.

The task checks that it may start, checks its nodes, trains, and decides what follows. One srun step
starts the processes of the training and writes to the main log. A task that stops for a reason that
needs a person cancels the rest of the array.

Invariant: a task ends with exactly one `TaskOutcome`. Only `run_array_task` cancels or requeues
jobs, and it records the outcome first.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from megatron.durable import append_lines
from megatron.error_report import FOLDER_VARIABLE, ErrorReport, hosts_at_fault, read_reports
from megatron.errors import HungRanksError, OperationsError
from megatron.observe.log_line import format_training_complete_line
from megatron.operations.monitor.alerts import format_time
from megatron.operations.slurm import attempts, node_report

CHECKOUT = Path(__file__).resolve().parents[3]
"""Root of the repository, if the package runs from a checkout. The steps of srun run there."""
TAIL_BYTES = 1 << 16
"""Number of bytes at the end of the log in which the last lines of the training are searched."""
_TRIES = 4
"""Number of tries of a query to Slurm whose failure would lose the list of excluded hosts."""
_TRY_AGAIN_SECONDS = 2.0
"""Time between two of these tries."""


class TaskOutcome(Enum):
    """Reason why an array task ended. The value is written to the log and to attempts.jsonl."""

    LEFT = "left in order"
    """The training saved and stopped by a time limit or a signal. The next array task continues."""
    COMPLETE = "training is complete"
    KILL_SWITCH = "kill switch"
    ENDED_BY_SLURM = "ended by Slurm"
    """The job was cancelled, preempted or out of time before the training could save.

    Slurm or the operator decides whether it is started again.
    """
    NEEDS_PEOPLE = "error that needs a person"
    BAD_NODES = "bad nodes"
    CRASHED = "crashed"
    CRASH_LOOP = "crash loop"


IN_ORDER = frozenset(
    outcome.value
    for outcome in (
        TaskOutcome.LEFT,
        TaskOutcome.COMPLETE,
        TaskOutcome.KILL_SWITCH,
        TaskOutcome.ENDED_BY_SLURM,
    )
)
"""Recorded outcomes that do not count as failed starts."""
EXIT_CODES = {
    TaskOutcome.LEFT: 0,
    TaskOutcome.COMPLETE: 0,
    TaskOutcome.KILL_SWITCH: 0,
    TaskOutcome.ENDED_BY_SLURM: 1,
    TaskOutcome.CRASHED: 1,
    TaskOutcome.BAD_NODES: 1,
    TaskOutcome.NEEDS_PEOPLE: 2,
    TaskOutcome.CRASH_LOOP: 3,
}
"""Outcome -> exit code of the batch script."""


@dataclass(frozen=True)
class ArrayTask:
    """What one array task runs, and its limits."""

    save: Path
    """The run's --save folder."""
    main_log: Path
    """Log that all launches append to."""
    command: tuple[str, ...]
    """Path of pretrain_gpt.py and its arguments, or `-m megatron.commands.pretrain` and them."""
    kill_switch: Path | None
    """File that stops the run while it exists. None: there is no kill switch."""
    max_failed_starts: int
    """Number of failed starts in a row that ends the array."""
    nodes: node_report.NodeLimits | None
    """What each node must achieve in the check before training. None: nodes are not checked."""
    srun: tuple[str, ...]
    """Additional options of srun."""
    alert: Callable[[str], None]
    """Function that sends a text to an operator."""


def run_array_task(array_task: ArrayTask) -> TaskOutcome:
    """Run one array task and return how it ended.

    After a crash, or if nodes are bad, the job is requeued before the return if Slurm allows it.

    Args:
        array_task: What to run, and its limits.

    Raises:
        OperationsError: This is not a Slurm job.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise OperationsError(
            "SLURM_JOB_ID is not set: this tool runs inside a Slurm job; submit the script with "
            "sbatch"
        )
    # The handlers come first. A signal would otherwise end this script before anything is recorded.
    signals = _Signals()
    attempt: attempts.Attempt | None = None
    bad: dict[str, str] = {}
    try:
        array_task.main_log.parent.mkdir(parents=True, exist_ok=True)
        # The start is recorded before anything can fail. A start that is killed counts as failed,
        # because nothing records its end.
        attempt = attempts.begin(array_task.save)
        outcome = _may_start(array_task, attempt)
        if outcome is None and array_task.nodes is not None:
            outcome, bad = _check_nodes(array_task, array_task.nodes, signals)
        if outcome is None:
            outcome, bad = _train(array_task, signals)
    except (OperationsError, OSError) as error:
        # A task that cannot run would fail the same way again. It is not requeued.
        array_task.alert(f"array task {_name()} cannot run: {error}")
        outcome = TaskOutcome.NEEDS_PEOPLE
    try:
        if attempt is not None:
            # The end is recorded before the requeue, because the requeue ends this script.
            attempts.end(array_task.save, attempt, outcome.value)
    except OSError as error:
        # A start without a recorded end counts as failed, so this is safe and only logged.
        _say(array_task, f"the end of this array task could not be recorded: {error}")
    _say(
        array_task,
        f"array task {_name()} ended at iteration "
        f"{attempts.read_reached_iteration(array_task.save)}: {outcome.value}",
    )
    if outcome in (
        TaskOutcome.COMPLETE,
        TaskOutcome.KILL_SWITCH,
        TaskOutcome.NEEDS_PEOPLE,
        TaskOutcome.CRASH_LOOP,
    ):
        _cancel_pending(array_task, outcome)
    # Only these two can succeed on another try. The limit on failed starts ends a crash loop.
    elif outcome in (TaskOutcome.CRASHED, TaskOutcome.BAD_NODES):
        _requeue(array_task, outcome, sorted(bad))
    return outcome


def _may_start(array_task: ArrayTask, attempt: attempts.Attempt) -> TaskOutcome | None:
    """Return None if the training may start, otherwise the outcome that prevents it."""
    if array_task.kill_switch is not None and array_task.kill_switch.exists():
        _say(array_task, f"{array_task.kill_switch} exists; nothing starts until it is removed")
        return TaskOutcome.KILL_SWITCH
    # The last entry of the list is this attempt. It has no outcome yet and does not count.
    failed = attempts.list_failed_in_a_row(array_task.save, attempt.job, IN_ORDER)[:-1]
    if len(failed) < array_task.max_failed_starts:
        return None
    outcomes = "; ".join(
        f"{past.attempt.nodes}: {past.outcome or 'no recorded end'}" for past in failed
    )
    array_task.alert(
        f"{len(failed)} starts in a row trained nothing after iteration {attempt.iteration} "
        f"({outcomes}); the array ends here. "
        f"Fix the cause and submit again; {array_task.main_log} has the reasons"
    )
    return TaskOutcome.CRASH_LOOP


def _check_nodes(
    array_task: ArrayTask, limits: node_report.NodeLimits, signals: "_Signals"
) -> tuple[TaskOutcome | None, dict[str, str]]:
    """Check the nodes of this job before training.

    Returns:
        The outcome that ends the task, or None if all nodes are good.
        The bad hosts, each with the reason.
    """
    hosts = _run_or_raise("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    tasks = node_report.parse_tasks_per_node(os.environ.get("SLURM_TASKS_PER_NODE", ""), len(hosts))
    folder = array_task.save / f".nodes-{os.environ['SLURM_JOB_ID']}"
    # A start that was killed may have left reports, which must not be taken for those of this
    # start.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        program = [
            "-m",
            "megatron.commands.node_check",
            "--report",
            str(folder),
            *limits.format_flags(),
        ]
        # A step that hangs is not an error here. The ranks that did not report show which hosts
        # hang.
        with contextlib.suppress(subprocess.TimeoutExpired):
            _run_srun(
                array_task,
                # One bad rank must not end the others. All bad hosts have to be found in one check.
                ["--kill-on-bad-exit=0", "--wait=0"],
                program,
                # The probe ends itself after `limits.seconds`. The additional minute is for
                # starting the step.
                timeout=limits.seconds + 60,
            )
        bad = node_report.find_bad_hosts(
            node_report.read(folder), dict(zip(hosts, tasks, strict=True)), limits
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if signals.received:
        # Slurm ended the probe, so a missing report shows nothing about the node.
        return TaskOutcome.ENDED_BY_SLURM, {}
    # If more than half of the nodes fail the check, the check itself is assumed to be
    # misconfigured. Excluding them would leave the job without nodes.
    if len(hosts) > 1 and 2 * len(bad) > len(hosts):
        host, reason = next(iter(bad.items()))
        array_task.alert(
            f"the node check failed on {len(bad)} of {len(hosts)} nodes, so the check itself is "
            f"probably wrong ({host}: {reason}); "
            "change --disk, --memory-gib or --seconds, or remove --check-nodes"
        )
        return TaskOutcome.NEEDS_PEOPLE, {}
    for host, reason in bad.items():
        array_task.alert(f"node {host} is not used any more: {reason}")
    return (TaskOutcome.BAD_NODES if bad else None), bad


def _train(array_task: ArrayTask, signals: "_Signals") -> tuple[TaskOutcome, dict[str, str]]:
    """Run the training to its end.

    Returns:
        How it ended.
        The hosts whose own I/O errors ended it, each with the reason.
    """
    # The log also holds earlier launches. Only what follows this byte is from this one.
    if array_task.main_log.exists():
        where = array_task.main_log.stat().st_size
    else:
        where = 0
    _say(array_task, f"array task {_name()} starts on {os.environ.get('SLURM_JOB_NODELIST', '?')}")
    folder = array_task.save / f".errors-{os.environ['SLURM_JOB_ID']}"
    # As for the node check, no reports of an earlier start may be read.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        variables = {FOLDER_VARIABLE: str(folder.absolute())}
        code = _run_srun(
            # Ranks that outlive a failed one would wait in a collective until its timeout, so srun
            # ends them. Python's -u keeps the last lines of a killed rank from being lost in a
            # buffer.
            array_task,
            ["--kill-on-bad-exit=1"],
            ["-u", *array_task.command],
            variables=variables,
        )
        reports, unreadable = read_reports(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if unreadable:
        _say(
            array_task,
            "error reports that cannot be read, probably because their ranks were killed: "
            f"{', '.join(unreadable[:10])}",
        )
    hangs = [report for report in reports if report.kind == HungRanksError.__name__]
    others = [report for report in reports if report.kind != HungRanksError.__name__]
    # Reports come before the exit code. The code does not show which host failed, or why.
    if others:
        return _follow_reports(array_task, others, signals)
    # Code 0 means complete, or saved and stopped. Only the log shows which of the two.
    if code == 0:
        if format_training_complete_line() in _read_log_end(array_task.main_log, where):
            return TaskOutcome.COMPLETE, {}
        stopped = array_task.kill_switch is not None and array_task.kill_switch.exists()
        return (TaskOutcome.KILL_SWITCH if stopped else TaskOutcome.LEFT), {}
    # scancel may end the ranks some time before its signal reaches this script. A requeue would
    # then bring the job back.
    if signals.received or _is_cancelled():
        _say(array_task, f"Slurm ended the job before the training could save (code {code})")
        return TaskOutcome.ENDED_BY_SLURM, {}
    if hangs:
        # No flag is wrong, and a new start may help.
        _say(array_task, hangs[0].message)
        return TaskOutcome.CRASHED, {}
    _say(array_task, f"the training ended with code {code}, and no rank reported an error")
    return TaskOutcome.CRASHED, {}


def _follow_reports(
    array_task: ArrayTask, reports: list[ErrorReport], signals: "_Signals"
) -> tuple[TaskOutcome, dict[str, str]]:
    """Decide what follows from the errors that the ranks reported.

    Hosts with I/O errors of their own are excluded. Every other error needs a person. The returned
    values are those of `_train`.
    """
    bad = hosts_at_fault(reports, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    if not bad:
        io_hosts = sorted({report.host for report in reports if report.io_error is not None})
        if len(io_hosts) > 1:
            shared = f" (I/O errors on {len(io_hosts)} hosts: {', '.join(io_hosts[:10])})"
        else:
            shared = ""
        # An error that is not an I/O error is the one that needs a person, so it is reported first.
        first = next((report for report in reports if report.io_error is None), reports[0])
        described = first.describe()
        if len(reports) > 1 and len({(report.kind, report.message) for report in reports}) == 1:
            # All ranks met the same error, so no rank is named.
            described = f"{first.kind}: {first.message}"
        array_task.alert(
            f"the training ended with an error that a person must fix: {described}{shared}"
        )
        return TaskOutcome.NEEDS_PEOPLE, {}
    if signals.received:
        # The job is not requeued here. A requeue would bring back a job that somebody cancelled.
        array_task.alert(f"Slurm ended the job, and {_in_words(bad)}")
        return TaskOutcome.ENDED_BY_SLURM, {}
    for host, reason in bad.items():
        array_task.alert(f"node {host} is not used any more: {reason}")
    return TaskOutcome.BAD_NODES, bad


def _in_words(bad: Mapping[str, str]) -> str:
    """Describe the bad hosts and their errors in one text."""
    return "; ".join(f"node {host} had an I/O error: {reason}" for host, reason in bad.items())


def _run_srun(
    array_task: ArrayTask,
    options: Sequence[str],
    program: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Run a step with this job's tasks and return its exit code.

    Its output is appended to the main log.

    Raises:
        OperationsError: srun cannot be started.
        subprocess.TimeoutExpired: The step took longer than `timeout` seconds.
    """
    line = ["srun", *options, *array_task.srun, sys.executable, *program]
    # In a checkout, `pretrain_gpt.py` is a path relative to it. An installed package has no such
    # file, and the paths are relative to the job's folder.
    folder = CHECKOUT if (CHECKOUT / "pretrain_gpt.py").is_file() else None
    environment = {**os.environ, **(variables or {})}
    # In append mode each write goes to the end of the file, because this script writes there too.
    with open(array_task.main_log, "ab") as log:
        # srun would forward this script's standard input to the tasks.
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        try:
            done = subprocess.run(
                line, **streams, cwd=folder, env=environment, timeout=timeout, check=False
            )  # type: ignore[call-overload]
        except OSError as error:
            raise OperationsError(
                f"srun cannot be started: {error}; Slurm's client must be on the PATH"
            ) from error
    return int(done.returncode)


def _cancel_pending(array_task: ArrayTask, outcome: TaskOutcome) -> None:
    """Cancel the pending tasks of the array, because they would end the same way."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is None:
        return
    # Without the filter by state, scancel would end this running task as well.
    if _try("scancel", "--state=PENDING", array) is None:
        array_task.alert(
            f"the pending tasks of array {array} could not be cancelled and would end the same "
            f"way; run scancel --state=PENDING {array}"
        )
    else:
        _say(array_task, f"the pending tasks of array {array} are cancelled: {outcome.value}")


def _is_cancelled() -> bool:
    """Return whether Slurm's controller reports that this job was cancelled."""
    described = _try("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])
    return described is not None and "JobState=CANCELLED" in described


def _requeue(array_task: ArrayTask, outcome: TaskOutcome, bad: Sequence[str]) -> None:
    """Requeue this array task, and exclude the bad hosts.

    The hosts are also excluded from the pending tasks of the array.
    """
    job = _name_for_slurm()
    excluded = list(bad)
    if bad:
        earlier = _list_excluded(job)
        if earlier is None:
            array_task.alert(
                f"the hosts that job {job} already excludes could not be read; from now on it "
                f"excludes only {', '.join(bad)}"
            )
        excluded = sorted({*(earlier or ()), *bad})
    # The requeue sends SIGTERM to this script too. The script ignores it, because the hosts are
    # excluded after the requeue. Slurm's KillWait (30 s by default) limits the time for that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _try("scontrol", "requeue", job) is None:
        _say(
            array_task,
            f"job {job} could not be requeued (is --requeue missing?); the next array task "
            "continues the training",
        )
    else:
        _say(array_task, f"job {job} is requeued: {outcome.value}")
    if not bad:
        return
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        # This fails if no task of the array is pending, which is not an error.
        _exclude(array, excluded)
    end = time.monotonic() + 20
    # Slurm accepts the change only once the requeued job is pending.
    while not _exclude(job, excluded):
        if time.monotonic() > end:
            array_task.alert(
                f"{', '.join(bad)} could not be excluded from job {job}; run scontrol update "
                f"jobid={job} ExcNodeList={','.join(excluded)}"
            )
            return
        time.sleep(0.2)


def _list_excluded(job: str) -> list[str] | None:
    """Return the hosts that Slurm already excludes from a job, or None if it does not answer."""
    # An update replaces the list. A single failure of the controller must therefore not look like
    # an empty list, which would allow the hosts that were excluded earlier.
    described = _try_repeatedly("scontrol", "show", "job", job)
    if described is None:
        return None
    found = re.search(r"ExcNodeList=(\S+)", described)
    if found is None or found[1] == "(null)":
        return []
    # Slurm expands ranges such as n[1-4] to single names.
    names = _try_repeatedly("scontrol", "show", "hostnames", found[1])
    if names is None:
        return None
    return names.split()


def _exclude(job: str, hosts: Sequence[str]) -> bool:
    """Set the excluded hosts of a pending job, and return whether Slurm accepted it."""
    return _try("scontrol", "update", f"jobid={job}", f"ExcNodeList={','.join(hosts)}") is not None


def _read_log_end(log: Path, where: int) -> str:
    """Return the end of what was written to the log after byte `where`."""
    with open(log, "rb") as file:
        file.seek(max(where, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        # The first byte may be in the middle of a character, hence errors="replace".
        return file.read().decode(errors="replace")


def _name_for_slurm() -> str:
    """Return the identifier of this job for Slurm's commands.

    An array task is never identified by its bare job number. The number of the last array task is
    also the number of the array, and would mean all tasks.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array:
        return f"{array}_{task}"
    return os.environ["SLURM_JOB_ID"]


def _name() -> str:
    """Return the identifier of this job for messages, with the number of restarts."""
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    if restart == "0":
        return _name_for_slurm()
    return f"{_name_for_slurm()} (restart {restart})"


def _say(array_task: ArrayTask, text: str) -> None:
    """Print a line with the time, and append it to the main log."""
    line = f"[{format_time(time.time())}] {text}"
    print(line, flush=True)
    try:
        # A full disk must not end this script. The line is already in Slurm's own output.
        append_lines(array_task.main_log, [line])
    except OSError as error:
        print(
            f"error: {array_task.main_log} cannot be written: {error}", file=sys.stderr, flush=True
        )


def _try(*command: str) -> str | None:
    """Run a command and return its output, or None if it fails."""
    try:
        # A controller that does not answer must not hang this script.
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout
    return None


def _try_repeatedly(*command: str) -> str | None:
    """Run a command until it succeeds. Return its output, or None if no try succeeded."""
    for _ in range(_TRIES - 1):
        output = _try(*command)
        if output is not None:
            return output
        time.sleep(_TRY_AGAIN_SECONDS)
    return _try(*command)


def _run_or_raise(*command: str) -> str:
    """Run a command and return its output. Raise OperationsError if it fails."""
    found = _try(*command)
    if found is None:
        raise OperationsError(
            f"{shlex.join(command)} failed; check that Slurm's client is on the PATH, and that "
            "`scontrol ping` reaches its controller"
        )
    return found


class _Signals:
    """Record Slurm's signals, and keep this script alive.

    Slurm signals the training as well, which then saves and exits. This script must survive the
    signal to record how the training ended.
    """

    def __init__(self) -> None:
        """Install the handlers."""
        self.received = 0
        # Slurm sends SIGTERM when it ends a job. SIGUSR1 or SIGUSR2 is the signal before the time
        # limit (--signal=USR1@600), which goes to the tasks and may reach this script too.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal, and do nothing else, because a handler may interrupt any code."""
        self.received = number
