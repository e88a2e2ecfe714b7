"""Slurm's commands, what they report about this job, and the hosts that the next step uses.

Steps of srun, and the lines of the main log about them, are here too.

Invariant: no query of the controller hangs if it does not answer.

A job may have more hosts than the training needs. The additional ones are spares. They replace
hosts that failed, so that the training can start again in the same job.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron.base.code_version import PACKAGE
from megatron.base.durable import append_lines
from megatron.base.errors import OperationsError
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.extras.operations.monitor.alerts import format_time
from megatron.extras.operations.slurm.node_report import parse_tasks_per_node


class Allocation:
    """The hosts of this job that are not known to be bad. `read` must be called first."""

    def __init__(self, train_nodes: int | None, least: int | None = None) -> None:
        """Store what the training needs.

        Args:
            train_nodes: Number of hosts of the complete training. None: all hosts of the job.
            least: Fewest hosts with which it may start. None: all of them.
        """
        self._train_nodes = train_nodes
        self._least = least
        self.past: list[str] = []
        """Hosts of this job and of its earlier allocations, for `lost_hosts`."""
        self._fewer: int | None = None
        self._tasks: dict[str, int] = {}
        """Host -> number of its tasks, for all hosts that the job started with."""
        self._present: list[str] = []
        """Hosts that the job has now."""
        self.bad: dict[str, str] = {}
        """Host that is not used any more -> the reason."""

    def read(self) -> None:
        """Read with which hosts the job started.

        Raises:
            OperationsError: Slurm's commands do not run, or the job has too few hosts for the
                training.
        """
        hosts = expand_hosts(os.environ["SLURM_JOB_NODELIST"])
        counts = parse_tasks_per_node(os.environ.get("SLURM_TASKS_PER_NODE", ""), len(hosts))
        self._tasks = dict(zip(hosts, counts, strict=True))
        self._present = hosts
        flag = "--fewer-nodes" if self._least else "--train-nodes"
        if (needed := self._least or self.complete) > len(hosts):
            raise OperationsError(
                f"{flag} {needed} must be at most the number of nodes of the job, which is "
                f"{len(hosts)}; change it, sbatch --nodes, or --fewer-nodes"
            )

    def shrink(self, nodes: int) -> None:
        """Train on fewer hosts from now on."""
        self._fewer = nodes

    @property
    def lost_hosts(self) -> list[str]:
        """The hosts that the job had and does not have now, without the bad ones."""
        hosts = dict.fromkeys([*self._tasks, *self.past])
        return [host for host in hosts if host not in {*self._present, *self.bad}]

    def refresh(self) -> None:
        """Leave out the hosts that the job has lost since it started."""
        # If the controller does not answer, the next step shows which hosts are missing.
        present = read_job_hosts() or self._present
        self._present = [host for host in self._present if host in present]

    @property
    def complete(self) -> int:
        """Number of hosts of the complete training."""
        return self._train_nodes or len(self._tasks)

    @property
    def complete_tasks(self) -> list[int]:
        """The number of tasks of each host of the complete training."""
        counts = list(self._tasks.values())[: self.complete]
        return counts + [max(counts)] * (self.complete - len(counts))

    @property
    def needed(self) -> int:
        """Number of hosts that the training needs now."""
        return self._fewer or self.complete

    @property
    def is_large_enough(self) -> bool:
        """Whether enough good hosts are left for the training."""
        return len(self.good_hosts) >= self.needed

    @property
    def good_hosts(self) -> Mapping[str, int]:
        """Each host that may be used, spares included, with the number of its tasks."""
        return {host: self._tasks[host] for host in self._present if host not in self.bad}

    @property
    def train_hosts(self) -> Mapping[str, int]:
        """Each host that the training uses, with the number of its tasks. The spares are last."""
        return dict(list(self.good_hosts.items())[: self.needed])

    def format_srun_options(self, hosts: Mapping[str, int]) -> list[str]:
        """Return the options with which srun starts a step on some hosts of the job."""
        # By default srun uses all hosts that the job started with.
        if len(hosts) == len(self._tasks):
            return []
        options = [
            f"--nodes={len(hosts)}",
            f"--ntasks={sum(hosts.values())}",
            f"--nodelist={','.join(hosts)}",
        ]
        if len(self._present) < len(self._tasks):
            # A dead host never reports the end of its step. Slurm would not start another one.
            options.append("--overlap")
        return options


_TRIES = 4
"""Number of tries of a query to Slurm whose failure would lose the list of excluded hosts."""
_TRY_AGAIN_SECONDS = 2.0
"""Time between two of these tries."""


def try_command(*command: str) -> str | None:
    """Run a command and return its output, or None if it fails."""
    try:
        # A controller that does not answer must not hang this script.
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout
    return None


def try_repeatedly(*command: str) -> str | None:
    """Run a command until it succeeds. Return its output, or None if no try succeeded."""
    for _ in range(_TRIES - 1):
        output = try_command(*command)
        if output is not None:
            return output
        time.sleep(_TRY_AGAIN_SECONDS)
    return try_command(*command)


def get_job_name() -> str:
    """Return the identifier of this job for Slurm's commands.

    An array task is never identified by its bare job number. The number of the last array task is
    also the number of the array, and would mean all tasks.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array:
        return f"{array}_{task}"
    return os.environ["SLURM_JOB_ID"]


def describe_job() -> str:
    """Return the identifier of this job for messages, with the number of requeues."""
    requeues = os.environ.get("SLURM_RESTART_COUNT", "0")
    if requeues == "0":
        return get_job_name()
    return f"{get_job_name()} (requeue {requeues})"


def is_ending() -> bool:
    """Return whether Slurm's controller reports that this job does not run any more.

    While the processes of a cancelled job end, its state is COMPLETING and not CANCELLED.
    """
    # One failed query must not look like a job that still runs, because it is then requeued.
    described = try_repeatedly("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])
    state = re.search(r"\bJobState=(\w+)", described or "")
    return state is not None and state[1] != "RUNNING"


def is_running() -> bool:
    """Return whether Slurm's controller reports that this job runs, and is not about to end."""
    described = try_repeatedly("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])
    return described is not None and "JobState=RUNNING" in described


def expand_hosts(nodes: str) -> list[str]:
    """Return the hosts of a list in Slurm's notation, such as n1 and n2 for "n[1-2]".

    Raises:
        OperationsError: scontrol does not run.
    """
    command = ("scontrol", "show", "hostnames", nodes)
    found = try_repeatedly(*command)
    if found is None:
        raise OperationsError(
            f"{shlex.join(command)} failed; check that Slurm's client is on the PATH, and that "
            "`scontrol ping` reaches its controller"
        )
    return found.split()


def read_job_hosts() -> list[str] | None:
    """Return the hosts that this job has now, or None if Slurm does not answer.

    A job with --no-kill loses a host that fails, and SLURM_JOB_NODELIST still names it.
    """
    described = try_repeatedly("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])
    found = re.search(r"\bNodeList=(\S+)", described or "")
    if found is None:
        return None
    try:
        return expand_hosts(found[1])
    except OperationsError:
        return None


def list_idle_hosts(hosts: Sequence[str]) -> list[str]:
    """Return the hosts that Slurm reports as idle, without those that are drained or down."""
    output = try_command(
        "sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T"
    )
    lines = [line.split() for line in (output or "").splitlines()]
    # A host has a line for each of its partitions. "idle*" does not respond.
    return sorted({line[0] for line in lines if line[1:] == ["idle"]})


def signal_steps(name: str) -> bool:
    """Send a signal to the steps of this job, and return whether Slurm accepted it."""
    return try_command("scancel", f"--signal={name}", get_job_name()) is not None


def list_excluded(job: str, *, only_pending: bool = False) -> list[str] | None:
    """Return the hosts that Slurm already excludes from a job, or None if it does not answer.

    Args:
        job: Slurm's name of a job, an array task or an array.
        only_pending: Whether the running tasks of an array are left out.
    """
    # An update replaces the list. A single failure of the controller must therefore not look like
    # an empty list, which would allow the hosts that were excluded earlier.
    described = try_repeatedly("scontrol", "show", "job", job)
    if described is None:
        return None
    # An array has a record for its pending tasks, and one for each running task.
    records = described.split("\n\n")
    if only_pending:
        records = [record for record in records if "JobState=PENDING" in record]
    found = {name for record in records for name in re.findall(r"ExcNodeList=(\S+)", record)}
    found.discard("(null)")
    if not found:
        return []
    # Slurm expands ranges such as n[1-4] to single names.
    names = try_repeatedly("scontrol", "show", "hostnames", ",".join(sorted(found)))
    if names is None:
        return None
    return names.split()


def exclude(job: str, hosts: Sequence[str]) -> bool:
    """Set the excluded hosts of a pending job, and return whether Slurm accepted it.

    For an array, Slurm changes all pending tasks. It then still reports a failure if a task runs.
    """
    update = ("scontrol", "update", f"jobid={job}", f"ExcNodeList={','.join(hosts)}")
    return try_command(*update) is not None


CHECKOUT = PACKAGE.parent
"""Root of the repository, if the package runs from a checkout. The steps of srun run there."""


def find_training_folder() -> Path | None:
    """Return the folder in which the training starts. None: that of the job.

    In a checkout, `pretrain_gpt.py` is a path relative to it. An installed package has no such
    file, and the paths are relative to the job's folder.
    """
    return CHECKOUT if (CHECKOUT / "pretrain_gpt.py").is_file() else None


def run_step(
    main_log: Path,
    options: Sequence[str],
    program: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
    before: Sequence[str] = (),
) -> int:
    """Run a step of this job and return its exit code.

    Its output is appended to the main log. With `before`, these words start another program, which
    gets the command of the step.

    Raises:
        OperationsError: srun cannot be started.
        subprocess.TimeoutExpired: The step took longer than `timeout` seconds.
    """
    line = [*before, "srun", *options, sys.executable, *program]
    # In append mode each write goes to the end of the file, because this script writes there too.
    with open(main_log, "ab") as log_file:
        # srun would forward this script's standard input to the tasks.
        try:
            done = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                cwd=find_training_folder(),
                env={**os.environ, **(variables or {})},
                timeout=timeout,
                check=False,
            )
        except OSError as error:
            raise OperationsError(
                f"srun cannot be started: {error}; Slurm's client must be on the PATH"
            ) from error
    return done.returncode


def log(main_log: Path, text: str) -> None:
    """Print a line with the time, and append it to the main log."""
    line = f"[{format_time(time.time())}] {text}"
    print_line(line)
    try:
        # A full disk must not end this script. The line is already in Slurm's own output.
        append_lines(main_log, [line])
    except OSError as error:
        print_to_stderr(f"error: {main_log} cannot be written: {error}")


class Signals:
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
