"""Ask Slurm's queue for the jobs of a run, and describe them in one PULSE line.

Invariant: an answer that is empty because squeue failed is an error, and never "nothing is queued".
squeue is called with a format of our own (-o). Its fields are the same in Slurm 22.05 to 24, while
the JSON of --json changes from release to release.
"""

import os
import pwd
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import OperationsError
from megatron.extras.operations.monitor.alerts import format_time, parse_local_time

_SEPARATOR = "\x1f"
"""The unit separator, which is not in any name or reason."""
_FORMAT = _SEPARATOR.join(("%i", "%T", "%r", "%N", "%M", "%S", "%E", "%j"))
"""Identifier, state, reason, nodes, time used, start, dependency and name."""
_TIMEOUT_SECONDS = 120
"""Time limit of squeue.

A controller that is restarting answers late. With a missing configuration squeue itself waits for a
minute.
"""
_NEVER = re.compile(r"neversatisfied|badconstraints|launchfailure|invalidaccount|invalidqos")
"""Reasons, in lower case, for which a job cannot start by itself."""
_SHOWN = 4
"""Largest number of jobs in one PULSE line."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, an array task, or the array tasks that are still pending."""

    id: str
    """Such as 1162855, 1162855_4 or 1162855_[5-10%1]."""
    state: str
    """State as Slurm spells it, such as RUNNING, PENDING, COMPLETING or SUSPENDED."""
    reason: str
    """Why the job is pending. Several array tasks have all their reasons, separated by commas."""
    nodes: str
    """Such as n[1-4]. Empty if the job has none."""
    running_seconds: float | None
    """Time for which the job has run. None if squeue gives no valid time."""
    start: float | None
    """Time at which the job started or is expected to start, in seconds since the epoch.

    None if Slurm does not know.
    """
    dependency: str
    """Jobs that this job waits for, as Slurm spells them."""

    @property
    def runs(self) -> bool:
        """Whether the job is running."""
        return self.state == "RUNNING"

    @property
    def pends(self) -> bool:
        """Whether the job waits in the queue, including the two states in which Slurm holds it."""
        return self.state in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def stuck(self) -> bool:
        """Whether the job is pending and cannot start unless a person acts.

        A job that its own user holds is not stuck, because the user intended it.
        """
        reason = self.reason.lower()
        held = "held" in reason and "jobhelduser" not in reason
        never = _NEVER.search(reason) is not None
        # REQUEUE_HOLD and SPECIAL_EXIT wait until somebody releases the job.
        return self.pends and (held or never or self.state != "PENDING")

    def describe(self, now: float) -> str:
        """Return what the job does, beginning with a verb: `is running for ...`."""
        where = self.id
        if self.nodes:
            where += f" on {self.nodes}"
        if self.runs:
            since = ""
            if self.start is not None:
                since = f" since {format_time(self.start)}"
            return f"is running for {format_duration(self.running_seconds or 0.0)}{since} ({where})"
        if not self.pends:
            return f"is {self.state.lower().replace('_', ' ')} ({where})"
        # A job that is stuck skips these texts, because they suggest that it starts by itself.
        if not self.stuck:
            if "JobArrayTaskLimit" in self.reason:
                return f"is waiting for the previous array task ({self.id}, {self.reason})"
            if "Dependency" in self.reason:
                return f"is waiting on a dependency ({self.id}, {self.dependency})"
            if self.start is not None and self.start > now:
                return (
                    f"is scheduled to start in {format_duration(self.start - now)} at "
                    f"{format_time(self.start)} ({self.id}, {self.reason})"
                )
        dependency = f", {self.dependency}" * bool(self.dependency)
        return f"is pending for reason {self.reason or self.state} ({self.id}{dependency})"


def ask_queue(job_name: str, user: str | None = None) -> list[QueuedJob]:
    """Return the user's jobs of one name, running jobs first.

    Args:
        job_name: The name in #SBATCH --job-name.
        user: Name or number of the user. Default: the current user.

    Raises:
        OperationsError: squeue is missing or fails, or the user does not exist.
    """
    # squeue takes a list of names. A comma would select the jobs of other runs as well.
    if not job_name.strip() or "," in job_name:
        raise OperationsError(
            f"--job-name {job_name!r}: give the one name of the job, as in #SBATCH --job-name; "
            "commas separate names"
        )
    command = [
        "squeue",
        "--noheader",
        # Jobs in hidden partitions are listed only with --all.
        "--all",
        f"--user={_find_uid(user)}",
        f"--name={job_name}",
        f"--format={_FORMAT}",
    ]
    # A user's SQUEUE_ variables can limit the list or change the format of times. Only the
    # standard format of SLURM_TIME_FORMAT can be parsed.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    environment |= {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise OperationsError(
            "squeue was not found; run this on a host of the Slurm cluster, with Slurm's "
            "commands in PATH"
        ) from None
    except OSError as error:
        raise OperationsError(f"squeue cannot be started: {error}") from error
    except subprocess.TimeoutExpired:
        raise OperationsError(
            f"squeue did not answer within {_TIMEOUT_SECONDS} s; check the controller with "
            "`scontrol ping`"
        ) from None
    # squeue can print an error and still return 0, for example for an unknown user.
    complaint = " ".join(done.stderr.split())
    if done.returncode or (complaint and not done.stdout.strip()):
        raise OperationsError(
            f"squeue failed with code {done.returncode}: {complaint or 'it printed no error'}"
        )
    return read_answer(done.stdout, job_name)


def read_answer(text: str, job_name: str) -> list[QueuedJob]:
    """Parse what squeue printed in our format, and return the jobs, running jobs first.

    Raises:
        OperationsError: A line has another format.
    """
    jobs = []
    # str.splitlines would also split at control characters inside a name.
    for line in text.split("\n"):
        # With several clusters squeue prints a heading for each.
        if not line.strip() or line.startswith("CLUSTER: "):
            continue
        fields = line.split(_SEPARATOR)
        # A line of another form must not be read as an empty queue.
        if len(fields) != 8:
            raise OperationsError(
                f"squeue printed {line!r} for --name={job_name}, which is not in the format that "
                "was asked for; it must support --noheader and --format"
            )
        identity, state, reason, nodes, running, start, dependency, _ = (
            each.strip() for each in fields
        )
        # An array task without a reason is listed with None.
        reasons = ",".join(each for each in reason.split(",") if each and each != "None")
        dependency = dependency.replace("(null)", "")
        # squeue prints the host's local time.
        times = _parse_seconds(running), parse_local_time(start, "%Y-%m-%dT%H:%M:%S")
        jobs.append(QueuedJob(identity, state, reasons, nodes, *times, dependency))
    # Running jobs come first, then jobs between two states, pending jobs, and stuck jobs.
    return sorted(jobs, key=lambda job: (not job.runs, job.pends, job.stuck))


def format_pulse(job_name: str, jobs: Sequence[QueuedJob], now: float) -> str:
    """Return one line with what the run does and what else is queued."""
    if not jobs:
        return f"{job_name} is neither running nor scheduled"
    first, *others = (job.describe(now) for job in jobs[:_SHOWN])
    parts = [f"{job_name} {first}", *(f"another {other}" for other in others)]
    if len(jobs) > _SHOWN:
        parts.append(f"and {len(jobs) - _SHOWN} more")
    return "; ".join(parts)


def find_idle_reason(job_name: str, jobs: Sequence[QueuedJob]) -> str | None:
    """Return what is wrong if no job of the run is running or will start by itself.

    Return None if a job is running or will start.
    """
    if not jobs:
        return (
            f"{job_name} is neither running nor scheduled; nothing trains until a job is submitted"
        )
    # One job that runs or can start is enough.
    if not all(job.stuck for job in jobs):
        return None
    reasons = ", ".join(f"{job.id} ({job.reason or job.state})" for job in jobs[:_SHOWN])
    return f"{job_name} is not running, and nothing that is queued can start by itself: {reasons}"


def format_duration(seconds: float) -> str:
    """Format seconds as D-HH:MM:SS."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"


def _parse_seconds(text: str) -> float | None:
    """Parse [D-][HH:]MM:SS.

    Return None for INVALID, which squeue prints for a job between two states.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _find_uid(user: str | None) -> int:
    """Return the number of a user, by default of the current one.

    Raises:
        OperationsError: The user does not exist.
    """
    if user is None:
        return os.getuid()
    try:
        # The name is resolved here, because squeue returns 0 for a user that it does not know.
        if user.isdecimal():
            return int(user)
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise OperationsError(
            f"--user {user}: this host has no such user; give one whose jobs squeue shows"
        ) from None
