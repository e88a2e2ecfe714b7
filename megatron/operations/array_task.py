"""One element of a job array, from its first second to its last: may it start, are its nodes good, train, what follows.

Invariant: what the next element finds does not depend on how this one ended; nothing is decided twice. The training's own processes
are started by one srun, which writes to the one main log; an element that stops for a reason that needs a person stops the array.
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
from megatron.errors import OperationsError
from megatron.observe.log_line import format_training_complete_line
from megatron.operations import attempts, node_report
from megatron.operations.alerts import format_time

REPOSITORY = Path(__file__).resolve().parents[2]
TAIL_BYTES = 1 << 16
"""Of the log, in which the last words of the training are looked for."""


class TaskOutcome(Enum):
    """Why an element ended; the value is what is noted."""

    LEFT = "left in order"
    """Saved and stopped by time or signal: the next element goes on."""
    COMPLETE = "training is complete"
    KILL_SWITCH = "kill switch"
    ENDED_BY_SLURM = "ended by Slurm"
    """Cancelled, out of time or preempted before the training could save: Slurm, or the operator, says whether it comes back."""
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


@dataclass(frozen=True)
class ArrayTask:
    save: Path
    """The run's --save folder."""
    main_log: Path
    command: tuple[str, ...]
    """pretrain_gpt.py and its arguments."""
    kill_switch: Path | None
    max_failed_starts: int
    nodes: node_report.NodeLimits | None
    """None: nodes are not checked."""
    srun: tuple[str, ...]
    """More options of srun."""
    alert: Callable[[str], None]


def run_array_task(array_task: ArrayTask) -> TaskOutcome:
    """Returns how it ended; on a crash or bad nodes the job has been requeued by then, where Slurm allows it.

    Raises:
        OperationsError: this is no Slurm job.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise OperationsError(
            "there is no SLURM_JOB_ID: this starts inside a Slurm job; submit the script with sbatch"
        )
    signals = _Signals()
    attempt: attempts.Attempt | None = None
    bad: dict[str, str] = {}
    try:
        array_task.main_log.parent.mkdir(parents=True, exist_ok=True)
        attempt = attempts.begin(array_task.save)
        outcome = _may_start(array_task, attempt)
        if outcome is None and array_task.nodes is not None:
            outcome, bad = _check_nodes(array_task, array_task.nodes, signals)
        if outcome is None:
            outcome, bad = _train(array_task, signals)
    except (OperationsError, OSError) as error:
        array_task.alert(f"element {_name()} cannot run: {error}")
        outcome = TaskOutcome.NEEDS_PEOPLE
    try:
        if attempt is not None:
            attempts.end(array_task.save, attempt, outcome.value)
    except OSError as error:
        _say(array_task, f"the end of this element could not be noted: {error}")
    _say(
        array_task,
        f"element {_name()} ended at iteration {attempts.read_reached_iteration(array_task.save)}: {outcome.value}",
    )
    if outcome in (
        TaskOutcome.COMPLETE,
        TaskOutcome.KILL_SWITCH,
        TaskOutcome.NEEDS_PEOPLE,
        TaskOutcome.CRASH_LOOP,
    ):
        _cancel_pending(array_task, outcome)
    elif outcome in (TaskOutcome.CRASHED, TaskOutcome.BAD_NODES):
        _requeue(array_task, outcome, sorted(bad))
    return outcome


def _may_start(array_task: ArrayTask, attempt: attempts.Attempt) -> TaskOutcome | None:
    """None: yes."""
    if array_task.kill_switch is not None and array_task.kill_switch.exists():
        _say(array_task, f"{array_task.kill_switch} is there; nothing starts until it is removed")
        return TaskOutcome.KILL_SWITCH
    failed = attempts.list_failed_in_a_row(array_task.save, attempt.job, IN_ORDER)[
        :-1
    ]  # the last is this one
    if len(failed) < array_task.max_failed_starts:
        return None
    told = "; ".join(
        f"{past.attempt.nodes}: {past.outcome or 'ended without a word'}" for past in failed
    )
    array_task.alert(
        f"{len(failed)} starts in a row trained nothing behind iteration {attempt.iteration} ({told}); the array ends here. "
        f"Mend it and submit anew; {array_task.main_log} has the reasons"
    )
    return TaskOutcome.CRASH_LOOP


def _check_nodes(
    array_task: ArrayTask, limits: node_report.NodeLimits, signals: "_Signals"
) -> tuple[TaskOutcome | None, dict[str, str]]:
    """None: they are good. And bad hosts, with what is wrong."""
    hosts = _run_or_raise("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    tasks = node_report.parse_tasks_per_node(os.environ.get("SLURM_TASKS_PER_NODE", ""), len(hosts))
    folder = array_task.save / f".nodes-{os.environ['SLURM_JOB_ID']}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier start that was killed
    folder.mkdir()
    try:
        program = [
            str(REPOSITORY / "tools" / "node_check.py"),
            "--report",
            str(folder),
            *limits.format_flags(),
        ]
        with contextlib.suppress(subprocess.TimeoutExpired):
            _run_srun(
                array_task,
                ["--kill-on-bad-exit=0", "--wait=0"],
                program,
                timeout=limits.seconds + 60,
            )
        bad = node_report.find_bad_hosts(
            node_report.read(folder), dict(zip(hosts, tasks, strict=True)), limits
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if signals.received:
        return TaskOutcome.ENDED_BY_SLURM, {}  # who did not answer was ended
    if len(hosts) > 1 and 2 * len(bad) > len(hosts):
        host, reason = next(iter(bad.items()))
        array_task.alert(
            f"the node check failed on {len(bad)} of {len(hosts)} nodes, which is not the nodes' fault ({host}: {reason}); change "
            "what it asks for (--disk, --memory-gib, --seconds), or leave --check-nodes out"
        )
        return TaskOutcome.NEEDS_PEOPLE, {}
    for host, reason in bad.items():
        array_task.alert(f"node {host} is not used any more: {reason}")
    return (TaskOutcome.BAD_NODES if bad else None), bad


def _train(array_task: ArrayTask, signals: "_Signals") -> tuple[TaskOutcome, dict[str, str]]:
    """Train. Returns how it ended, and the hosts whose own I/O errors ended it, with the reasons."""
    where = array_task.main_log.stat().st_size if array_task.main_log.exists() else 0
    _say(array_task, f"element {_name()} starts on {os.environ.get('SLURM_JOB_NODELIST', '?')}")
    folder = array_task.save / f".errors-{os.environ['SLURM_JOB_ID']}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier start that was killed
    folder.mkdir()
    try:
        variables = {FOLDER_VARIABLE: str(folder.absolute())}
        code = _run_srun(
            array_task, ["--kill-on-bad-exit=1"], ["-u", *array_task.command], variables=variables
        )
        reports, unreadable = read_reports(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if unreadable:
        _say(
            array_task,
            f"error reports that cannot be read, for their ranks were killed: {', '.join(unreadable[:10])}",
        )
    if reports:
        return _follow_reports(array_task, reports, signals)
    if code == 0:
        if format_training_complete_line() in _read_log_end(array_task.main_log, where):
            return TaskOutcome.COMPLETE, {}
        stopped = array_task.kill_switch is not None and array_task.kill_switch.exists()
        return (TaskOutcome.KILL_SWITCH if stopped else TaskOutcome.LEFT), {}
    if signals.received:
        _say(array_task, f"Slurm ended the job before the training could save (code {code})")
        return TaskOutcome.ENDED_BY_SLURM, {}
    _say(array_task, f"the training ended with code {code}, and no rank could say why")
    return TaskOutcome.CRASHED, {}


def _follow_reports(
    array_task: ArrayTask, reports: list[ErrorReport], signals: "_Signals"
) -> tuple[TaskOutcome, dict[str, str]]:
    """Decide by what the ranks reported: hosts with I/O errors of their own are left out, all else needs a person."""
    bad = hosts_at_fault(reports, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    if not bad:
        io_hosts = sorted({report.host for report in reports if report.io_error is not None})
        shared = (
            f" (I/O errors on {len(io_hosts)} hosts: {', '.join(io_hosts[:10])})"
            if len(io_hosts) > 1
            else ""
        )
        first = next((report for report in reports if report.io_error is None), reports[0])
        array_task.alert(f"training needs a person: {first.describe()}{shared}")
        return TaskOutcome.NEEDS_PEOPLE, {}
    if signals.received:
        array_task.alert(f"Slurm ended the job, and {_in_words(bad)}")
        return TaskOutcome.ENDED_BY_SLURM, {}
    for host, reason in bad.items():
        array_task.alert(f"node {host} is not used any more: {reason}")
    return TaskOutcome.BAD_NODES, bad


def _in_words(bad: Mapping[str, str]) -> str:
    return "; ".join(f"node {host} had an I/O error: {reason}" for host, reason in bad.items())


def _run_srun(
    array_task: ArrayTask,
    options: Sequence[str],
    program: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Exit code of a step that has this job's tasks; its output goes to the main log. Raises subprocess.TimeoutExpired."""
    line = ["srun", *options, *array_task.srun, sys.executable, *program]
    environment = {**os.environ, **(variables or {})}
    with open(array_task.main_log, "ab") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        try:
            done = subprocess.run(
                line, **streams, cwd=REPOSITORY, env=environment, timeout=timeout, check=False
            )  # type: ignore[call-overload]
        except OSError as error:
            raise OperationsError(
                f"srun cannot be started: {error}; Slurm's client must be on the PATH"
            ) from error
    return int(done.returncode)


def _cancel_pending(array_task: ArrayTask, outcome: TaskOutcome) -> None:
    """What is left of the array would end the same way."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is None:
        return
    if _try("scancel", "--state=PENDING", array) is None:
        array_task.alert(
            f"what is still pending of array {array} could not be cancelled: scancel it, for it would end the same way"
        )
    else:
        _say(array_task, f"what is still pending of array {array} is cancelled: {outcome.value}")


def _requeue(array_task: ArrayTask, outcome: TaskOutcome, bad: Sequence[str]) -> None:
    """This element comes back, without the bad hosts, and so do those of the array that are pending."""
    job, excluded = _name_for_slurm(), sorted({*_list_excluded(_name_for_slurm()), *bad})
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # requeueing ends this script, too; KillWait is left for what follows
    if _try("scontrol", "requeue", job) is None:
        _say(
            array_task,
            f"job {job} could not be requeued (is --requeue missing?); the next element goes on",
        )
    else:
        _say(array_task, f"job {job} is requeued: {outcome.value}")
    if not bad:
        return
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        _exclude(array, excluded)  # fails where nothing is pending
    end = time.monotonic() + 20
    while not _exclude(job, excluded):  # Slurm takes it when the job is pending
        if time.monotonic() > end:
            array_task.alert(
                f"{', '.join(bad)} could not be excluded from job {job}: scontrol update jobid={job} ExcNodeList=..."
            )
            return
        time.sleep(0.2)


def _list_excluded(job: str) -> list[str]:
    """Names that hold a range stay as they are."""
    found = re.search(r"ExcNodeList=(\S+)", _try("scontrol", "show", "job", job) or "")
    if found is None or found[1] == "(null)":
        return []
    return (_try("scontrol", "show", "hostnames", found[1]) or "").split()


def _exclude(job: str, hosts: Sequence[str]) -> bool:
    return _try("scontrol", "update", f"jobid={job}", f"ExcNodeList={','.join(hosts)}") is not None


def _read_log_end(log: Path, where: int) -> str:
    """The end of what was written after `where`."""
    with open(log, "rb") as file:
        file.seek(max(where, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _name_for_slurm() -> str:
    """Never the bare number of an array's element: the last element's is the array's, and means all of it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]


def _name() -> str:
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    return _name_for_slurm() if restart == "0" else f"{_name_for_slurm()} (restart {restart})"


def _say(array_task: ArrayTask, text: str) -> None:
    line = f"[{format_time(time.time())}] {text}"
    print(line, flush=True)
    try:
        append_lines(array_task.main_log, [line])
    except OSError as error:
        print(
            f"error: {array_task.main_log} cannot be written: {error}", file=sys.stderr, flush=True
        )


def _try(*command: str) -> str | None:
    """What it prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _run_or_raise(*command: str) -> str:
    found = _try(*command)
    if found is None:
        raise OperationsError(
            f"{shlex.join(command)} failed; is Slurm's client on the PATH, and its controller alive?"
        )
    return found


class _Signals:
    """Slurm signals the training as well, which saves and leaves; this script outlives it, to say how it ended."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = number
