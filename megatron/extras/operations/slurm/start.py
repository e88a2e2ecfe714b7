"""One start of the training in a Slurm job: the check of its nodes, the step, and how it ended.

An array task may start the training several times, on the same nodes or on spare ones. The reports
of the errors that ended the ranks name the hosts at fault.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from megatron.base import exit_codes
from megatron.base.code_version import get_code_version
from megatron.base.error_report import FOLDER_VARIABLE, ErrorReport
from megatron.base.errors import FaultyHostError, HungRanksError, OperationsError
from megatron.base.outside_file import load_json, open_regular
from megatron.checkpoint.lease import RESTART_VARIABLE
from megatron.extras.operations.chronicle.records import read_events
from megatron.extras.operations.slurm import attempts, client, node_report
from megatron.extras.operations.slurm.client import Allocation, Signals, log, run_step
from megatron.extras.operations.slurm.exclusion import HostExclusion
from megatron.extras.operations.slurm.fewer_nodes import CHANGE, ReturnWatch, choose_layout
from megatron.extras.operations.slurm.node_report import NodeLimits
from megatron.extras.operations.slurm.warm_up import warm_spares
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.log_line import format_training_complete_line


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


EXIT_CODES = {
    TaskOutcome.LEFT: exit_codes.SUCCESS,
    TaskOutcome.COMPLETE: exit_codes.SUCCESS,
    TaskOutcome.KILL_SWITCH: exit_codes.SUCCESS,
    TaskOutcome.ENDED_BY_SLURM: exit_codes.FOUND,
    TaskOutcome.CRASHED: exit_codes.FOUND,
    TaskOutcome.BAD_NODES: exit_codes.FOUND,
    TaskOutcome.NEEDS_PEOPLE: exit_codes.USER_ERROR,
    TaskOutcome.CRASH_LOOP: exit_codes.NOT_DONE,
}
"""Outcome -> exit code of the batch script."""
IN_ORDER = frozenset(
    outcome.value
    for outcome, code in EXIT_CODES.items()
    if code == exit_codes.SUCCESS or outcome is TaskOutcome.ENDED_BY_SLURM
)
"""Recorded outcomes that do not count as failed starts."""


@dataclass(frozen=True)
class ArrayTaskOptions:
    """What an array task may do. The command line has these options."""

    save: Path
    """The run's --save folder."""
    main_log: Path
    """The run's log. All array tasks append to it."""
    kill_switch: Path | None = None
    """The file of --kill-switch-path. Nothing starts while it exists."""
    max_failed_starts: int = 3
    """Starts in a row that train nothing, after which the array ends."""
    max_restarts: int = 5
    """Restarts in the same job within --restart-hours. After that, a crash requeues the array task.
    0: each crash requeues it."""
    restart_hours: float = 6.0
    """Length of the time in which restarts are counted, in hours."""
    handover_steps: int | None = None
    """After a change of the code version, train this many recorded steps again, and go on only if
    they are equal. See tools/handover.py."""
    handover_required: bool = False
    """Do not go on either if the run has too few recorded steps for that."""
    train_nodes: int | None = None
    """Nodes that the training needs. The other nodes of the job (sbatch --nodes) are spares. None:
    all nodes."""
    fewer_nodes: int | Literal["never"] = "never"
    """Fewest nodes with which the training goes on after its spares are used up. The planner
    chooses the layout. never: the array task is requeued."""
    grow_after: float = 10.0
    """Minutes for which lost nodes must be healthy before the training takes them back. It saves,
    and the array task is requeued."""
    plan: tuple[str, ...] = ()
    """More options of tools/plan.py for --fewer-nodes, as in --plan=--hardware=h100."""


@dataclass(frozen=True, kw_only=True)
class ArrayTask(ArrayTaskOptions):
    """What one array task runs, and its limits."""

    command: tuple[str, ...]
    """Path of pretrain_gpt.py and its arguments, or `-m megatron.commands.pretrain` and them."""
    nodes: NodeLimits | None
    """What each node must achieve in the check before training. None: nodes are not checked."""
    srun: tuple[str, ...]
    """Additional options of srun."""
    alert: Callable[[str], None]
    """Function that sends a text to an operator."""


def read_reports(folder: Path) -> tuple[list[ErrorReport], list[str]]:
    """Read all reports in a folder.

    Returns:
        The reports in the order of ranks, and the names of files that hold no report.

    Raises:
        OSError: If the folder cannot be read.
    """
    reports: list[ErrorReport] = []
    unreadable: list[str] = []
    for path in sorted(folder.iterdir()):
        try:
            # A rank that was killed leaves a file with another suffix.
            if path.suffix != ".json":
                raise ValueError(path.suffix)
            reports.append(_parse_report(load_json(path)))
        # One bad file must not hide the others. TypeError means other fields than ErrorReport has,
        # and AttributeError that the file holds no object.
        except (OSError, ValueError, TypeError, AttributeError):
            unreadable.append(path.name)
    return sorted(reports, key=lambda report: report.rank), unreadable


def _parse_report(record: dict[str, Any]) -> ErrorReport:
    """Return the report of a JSON object.

    Raises:
        TypeError: It has other fields than ErrorReport has, or other types.
        AttributeError: It is no object.
    """
    # JSON has no tuples.
    report = ErrorReport(**{**record, "hung_hosts": tuple(record.get("hung_hosts", ()))})
    texts = (report.host, report.kind, report.message, *report.hung_hosts)
    # Another type would only fail when the array task decides what follows.
    if not isinstance(report.rank, int) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{record!r} has a value of another type than ErrorReport")
    return report


def hosts_at_fault(reports: list[ErrorReport], hosts: int) -> dict[str, str]:
    """Return the hosts whose own I/O errors ended the step.

    An error that is not an I/O error needs a person, with one exception. After an I/O error in a
    checkpoint, all ranks end with the message of the rank that had it. If more than half of several
    hosts have I/O errors, the cause is the shared file system or the configuration.

    Args:
        reports: Reports of one step, at least one.
        hosts: Number of hosts of the job.

    Returns:
        Host -> the reason. Empty if a person is needed.
    """
    # A rank without an I/O error that repeats such a message has learned it from that rank.
    failed = [report for report in reports if report.io_error is not None]
    explained = {report.message for report in failed}
    if any(report.message not in explained for report in reports):
        return {}
    bad: dict[str, str] = {}
    # The first report of each host is enough for the reason.
    for report in failed:
        bad.setdefault(report.host, f"rank {report.rank}: {report.kind}: {report.message}")
    if hosts > 1 and 2 * len(bad) > hosts:
        return {}
    return bad


TAIL_BYTES = 1 << 16
"""Number of bytes at the end of the log in which the last lines of the training are searched."""
_TASK_ENDED = re.compile(r"^srun: error: (\S+: tasks? .+)$", re.MULTILINE)
"""Line of srun about a task that failed, such as "srun: error: n2: task 3: Killed"."""
_MISTAKE_CODE = 2
"""Exit code of a training that ends with an error that a person must fix."""


@dataclass(frozen=True)
class StartEnd:
    """How a start of the training ended."""

    outcome: TaskOutcome
    reason: str = ""
    """What happened, for people. Empty if the outcome says it all."""


class TrainingStarts:
    """Starts the training in this job. It keeps the hosts that turned out to be bad."""

    def __init__(self, array_task: ArrayTask, signals: Signals, exclusion: HostExclusion) -> None:
        """Store what to run.

        Args:
            array_task: What to run, and its limits.
            signals: The signals that Slurm has sent.
            exclusion: Records what happens to hosts, and excludes them.
        """
        self.task = array_task
        self.signals = signals
        self.exclusion = exclusion
        fewer = array_task.fewer_nodes
        least = None if fewer == "never" else fewer
        self.allocation = Allocation(array_task.train_nodes, least)
        self._layout_flags: tuple[str, ...] = ()
        self.has_lost_hosts_back = False
        """Whether the last step ended because lost hosts can be used again."""

    def shrink(self) -> dict[str, Any]:
        """Choose a layout on fewer hosts, report it, and return it for the chronicle.

        Raises:
            OperationsError: No layout is possible, or none is allowed.
        """
        task, allocation = self.task, self.allocation
        good = allocation.good_hosts
        left = f"{len(good)} good nodes are left, and the training needs {allocation.complete}"
        if task.fewer_nodes == "never" or len(good) < task.fewer_nodes:
            raise OperationsError(left)
        try:
            found = choose_layout(
                task.command, task.plan, allocation.complete_tasks, good, task.fewer_nodes
            )
        except OperationsError as error:
            raise OperationsError(f"{left}, and no layout is possible on fewer: {error}") from error
        allocation.shrink(found.nodes)
        self._layout_flags = found.flags
        text = f"{found.nodes} of {allocation.complete} nodes, {found.text}"
        task.alert(f"array task {client.describe_job()} goes on with {text}")
        return {CHANGE: found.nodes, "layout": text}

    def start(self, restart: int) -> StartEnd:
        """Check the nodes and train until the training ends.

        Args:
            restart: Number of earlier starts in this allocation.

        Raises:
            OperationsError: Slurm's commands do not run, or the job has too few nodes.
            OSError: A folder cannot be written.
        """
        if restart == 0:
            self._read_allocation()
        if self.task.nodes is not None:
            end = self._check_nodes(self.task.nodes)
            if end is not None:
                return end
        # A restart in the same job has the same code.
        if restart == 0 and self.task.handover_steps is not None:
            end = self._rehearse(self.task.handover_steps)
            if end is not None:
                return end
        task = self.task
        with warm_spares(self.allocation, task.srun, task.command, task.main_log):
            return self._train(restart)

    def _read_allocation(self) -> None:
        """Read the hosts of the job. If they are fewer than the complete training needs, shrink.

        Raises:
            OperationsError: See `start`.
        """
        allocation = self.allocation
        allocation.read()
        if allocation.is_large_enough:
            return
        # `sbatch --nodes=3-4` allows it, for example after the first host was lost.
        past = client.expand_hosts(",".join(attempts.list_past_nodes(self.task.save)))
        excluded = client.list_excluded(client.get_job_name()) or ()
        allocation.past = [host for host in past if host not in excluded]
        reason = f"the job has started with {len(allocation.good_hosts)} nodes"
        self.exclusion.record("restart", {"reason": reason, **self.shrink()})

    def _rehearse(self, steps: int) -> StartEnd | None:
        """Train recorded steps again if the code is another one than that of the last start.

        Returns:
            The end of this start, or None if the training may go on.
        """
        task = self.task
        events = read_events(task.save / CHRONICLE)
        versions = [event.details.get("version") for event in events if event.kind == "start"]
        if not versions or versions[-1] == get_code_version():
            return None
        self._log(f"the code was {versions[-1]} and is {get_code_version()}: a rehearsal begins")
        # All nodes see the folder of the log.
        folders = [str(path.absolute()) for path in (task.save, task.main_log.parent)]
        tool = [sys.executable, "-m", "megatron.commands.handover", folders[0]]
        tool += ["--scratch", folders[1], "--steps", str(steps), "--"]
        hosts = self.allocation.train_hosts
        program = ["-u", *task.command, *self._layout_flags]
        code = self._run_step(hosts, ["--kill-on-bad-exit=1"], program, before=tool)
        if code == exit_codes.SUCCESS:
            return None
        if self.signals.received:
            return StartEnd(TaskOutcome.ENDED_BY_SLURM)
        text = f"the rehearsal ended with code {code}, see {task.main_log}"
        if code == exit_codes.NOT_DONE and not task.handover_required:
            self._log(f"{text}; the training goes on without it")
            return None
        task.alert(f"{text}; the training does not go on with this code")
        return StartEnd(TaskOutcome.NEEDS_PEOPLE, text)

    def _check_nodes(self, limits: node_report.NodeLimits) -> StartEnd | None:
        """Check all nodes that are not known to be bad, spares included.

        Returns:
            The end of this start, or None if enough nodes are good.
        """
        hosts = self.allocation.good_hosts
        folder = self.task.save / f".nodes-{os.environ['SLURM_JOB_ID']}"
        # A start that was killed may have left reports, which must not be taken for those of this
        # start.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            program = [
                "-m",
                "megatron.extras.operations.commands.node_check",
                "--report",
                str(folder),
                *limits.format_flags(),
            ]
            # A step that hangs is not an error here. The ranks that did not report show which hosts
            # hang.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._run_step(
                    hosts,
                    # One bad rank must not end the others. All bad hosts have to be found in one
                    # check.
                    ["--kill-on-bad-exit=0", "--wait=0"],
                    program,
                    # The probe ends itself after `limits.seconds`. The additional minute is for
                    # starting the step.
                    timeout=limits.seconds + 60,
                )
            bad = node_report.find_bad_hosts(node_report.read(folder), hosts, limits)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self.signals.received:
            # Slurm ended the probe, so a missing report shows nothing about the node.
            return StartEnd(TaskOutcome.ENDED_BY_SLURM)
        # If more than half of the nodes fail the check, the check itself is assumed to be
        # misconfigured. Excluding them would leave the job without nodes.
        if len(hosts) > 1 and 2 * len(bad) > len(hosts):
            host, reason = next(iter(bad.items()))
            text = (
                f"the node check failed on {len(bad)} of {len(hosts)} nodes, so the check itself "
                f"is probably wrong ({host}: {reason}); "
                "change --disk, --memory-gib or --seconds, or remove --check-nodes"
            )
            self.task.alert(text)
            return StartEnd(TaskOutcome.NEEDS_PEOPLE, text)
        self._remove_hosts(bad)
        if self.allocation.is_large_enough:
            return None
        return StartEnd(TaskOutcome.BAD_NODES, "the node check found bad nodes")

    def _train(self, restart: int) -> StartEnd:
        """Run the training to its end."""
        task = self.task
        hosts = self.allocation.train_hosts
        # The log also holds earlier launches. Only what follows this byte is from this one.
        where = 0
        if task.main_log.exists():
            where = task.main_log.stat().st_size
        # Slurm's notation is shorter than the names of a thousand hosts.
        nodes = os.environ["SLURM_JOB_NODELIST"]
        if self.allocation.format_srun_options(hosts):
            nodes = ",".join(hosts)
        self._log(f"array task {client.describe_job()} starts on {nodes}")
        folder = task.save / f".errors-{os.environ['SLURM_JOB_ID']}"
        # As for the node check, no reports of an earlier start may be read.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            variables = {
                FOLDER_VARIABLE: str(folder.absolute()),
                RESTART_VARIABLE: str(restart),
            }
            # A complete training lacks no host, and nothing is watched.
            lost = self.allocation.lost_hosts
            # Good hosts that the smaller layout leaves idle are there already.
            missing = self.allocation.complete - len(self.allocation.good_hosts)
            with ReturnWatch(lost, missing, task.grow_after, task.save, self._log) as watch:
                code = self._run_step(
                    hosts,
                    # Ranks that outlive a failed one would wait in a collective until its timeout,
                    # so srun ends them. Python's -u keeps the last lines of a killed rank from
                    # being lost in a buffer.
                    ["--kill-on-bad-exit=1"],
                    ["-u", *task.command, *self._layout_flags],
                    variables=variables,
                )
            self.has_lost_hosts_back = watch.has_ended_step
            reports, unreadable = read_reports(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if unreadable:
            self._log(
                "error reports that cannot be read, probably because their ranks were killed: "
                f"{', '.join(unreadable[:10])}"
            )
        hangs = [report for report in reports if report.kind == HungRanksError.__name__]
        others = [report for report in reports if report.kind != HungRanksError.__name__]
        # Reports come before the exit code. The code does not show which host failed, or why. A
        # killed rank writes none, and neither do the ranks that lost it, so the code decides then.
        if others:
            return self._follow_errors(others, hosts)
        # Code 0 means complete, or saved and stopped. Only the log shows which of the two.
        if code == 0:
            if format_training_complete_line() in _read_log_end(task.main_log, where):
                return StartEnd(TaskOutcome.COMPLETE)
            stopped = task.kill_switch is not None and task.kill_switch.exists()
            return StartEnd(TaskOutcome.KILL_SWITCH if stopped else TaskOutcome.LEFT)
        # scancel may end the ranks, or keep srun from starting them, before its signal reaches this
        # script. A requeue would then bring the job back.
        if self.signals.received or client.is_ending():
            self._log(f"Slurm ended the job before the training could save (code {code})")
            return StartEnd(TaskOutcome.ENDED_BY_SLURM)
        if hangs:
            return self._follow_hang(hangs, hosts)
        return self._follow_crash(code, where)

    def _follow_crash(self, code: int, where: int) -> StartEnd:
        """Decide what follows from an exit code that no report explains.

        Args:
            code: The exit code of srun.
            where: Size of the log at the start of the step, in bytes.
        """
        task = self.task
        # srun returns the largest code, so no rank was killed and none crashed. An example is an
        # error report that could not be written, or a script that does not exist.
        if code == _MISTAKE_CODE:
            text = f"the training ended with code {code}, which means a mistake to fix"
            task.alert(f"{text}; {task.main_log} has the reason")
            return StartEnd(TaskOutcome.NEEDS_PEOPLE, text)
        text = f"the training ended with code {code}, and no rank reported an error"
        # srun names the first task that ended before it ends the others.
        died = _TASK_ENDED.search(_read_log_end(task.main_log, where))
        if died is not None:
            text += f" ({died[1]})"
        self._log(text)
        return StartEnd(TaskOutcome.CRASHED, text)

    def _follow_errors(self, reports: Sequence[ErrorReport], hosts: Mapping[str, int]) -> StartEnd:
        """Decide what follows from the errors that the ranks reported.

        Hosts with I/O errors of their own are excluded. Every other error needs a person.

        Args:
            reports: The reports, at least one, and none of a hang.
            hosts: The hosts of the training.
        """
        bad = hosts_at_fault(list(reports), len(hosts))
        what = "had an I/O error"
        if not bad:
            bad = self._find_faulty_hosts(reports, hosts)
            what = "computed wrong numbers"
        if not bad:
            io_hosts = sorted({report.host for report in reports if report.io_error is not None})
            shared = ""
            if len(io_hosts) > 1:
                shared = f" (I/O errors on {len(io_hosts)} hosts: {', '.join(io_hosts[:10])})"
            # An error that is not an I/O error is the one that needs a person, so it is reported
            # first.
            first = next((report for report in reports if report.io_error is None), reports[0])
            described = first.describe()
            if len(reports) > 1 and len({(report.kind, report.message) for report in reports}) == 1:
                # All ranks met the same error, so no rank is named.
                described = f"{first.kind}: {first.message}"
            self.task.alert(
                f"the training ended with an error that a person must fix: {described}{shared}"
            )
            return StartEnd(TaskOutcome.NEEDS_PEOPLE, described)
        described = "; ".join(f"node {host} {what}: {reason}" for host, reason in bad.items())
        if self.signals.received:
            # The job is not requeued here. A requeue would bring back a job that somebody
            # cancelled.
            self.task.alert(f"Slurm ended the job, and {described}")
            return StartEnd(TaskOutcome.ENDED_BY_SLURM, described)
        self._remove_hosts(bad)
        return StartEnd(TaskOutcome.BAD_NODES, described)

    def _find_faulty_hosts(
        self, reports: Sequence[ErrorReport], hosts: Mapping[str, int]
    ) -> dict[str, str]:
        """Return the hosts that a replay names, each with the reason.

        It is empty if they are more than half of several hosts. Another cause is more probable
        then, such as a driver.
        """
        faulty = [report for report in reports if report.kind == FaultyHostError.__name__]
        named = [host for report in faulty[:1] for host in report.hung_hosts]
        bad = {
            node_report.find_slurm_name(host, list(hosts)): "two passes of a replay differ there"
            for host in named
        }
        if len(hosts) > 1 and 2 * len(bad) > len(hosts):
            return {}
        return bad

    def _follow_hang(self, hangs: Sequence[ErrorReport], hosts: Mapping[str, int]) -> StartEnd:
        """Count the hang for the hosts that it names, and exclude those that hung before.

        No flag is wrong, and a new start may help.
        """
        # The ranks that only follow the verdict do not know its hosts.
        verdict = next((report for report in hangs if report.hung_hosts), hangs[0])
        self._log(verdict.message)
        self._remove_hosts(self.exclusion.record_hang(verdict, hosts))
        # The second line names the first of the ranks that the others wait for.
        return StartEnd(TaskOutcome.CRASHED, " ".join(verdict.message.split("\n")[:2]))

    def _remove_hosts(self, bad: Mapping[str, str]) -> None:
        """Do not use these hosts any more, in this job and in later ones."""
        if bad:
            self.allocation.bad |= bad
            self.exclusion.exclude(bad)

    def _run_step(
        self,
        hosts: Mapping[str, int],
        options: Sequence[str],
        program: Sequence[str],
        **further: Any,
    ) -> int:
        """Run a step on these hosts. See `run_step`, which has the further arguments."""
        own = [*options, *self.allocation.format_srun_options(hosts), *self.task.srun]
        return run_step(self.task.main_log, own, program, **further)

    def _log(self, text: str) -> None:
        log(self.task.main_log, text)


def _read_log_end(path: Path, where: int) -> str:
    """Return the end of what was written to the log after byte `where`."""
    with open_regular(path) as file:
        file.seek(max(where, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        # The first byte may be in the middle of a character, hence errors="replace".
        return file.read().decode(errors="replace")
