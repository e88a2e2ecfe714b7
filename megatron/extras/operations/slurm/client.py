"""Slurm's commands, and what they report about this job.

Invariant: no function here hangs if the controller does not answer.
"""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence

from megatron.base.errors import OperationsError

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
