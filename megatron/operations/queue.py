"""What Slurm's queue says of a run's jobs, and how that is said in one PULSE line.

Invariant: an answer that is empty because squeue failed is an error, never "nothing is queued". squeue is asked with a format of
our own (-o): its fields are the same in Slurm 22.05 to 24, while the JSON of --json changes from release to release.
"""

import os
import pwd
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import OperationsError
from megatron.operations.alerts import format_time

_SEPARATOR = "\x1f"
"""Not in any name or reason."""
_FORMAT = _SEPARATOR.join(("%i", "%T", "%r", "%N", "%M", "%S", "%E", "%j"))
_TIMEOUT_SECONDS = 120
"""A controller that is restarted answers late; a missing configuration is waited for a minute."""
_SHOWN = 4
"""Jobs in one PULSE line."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, an array element, or the elements of an array that are still pending."""

    id: str
    """1162855, 1162855_4 or 1162855_[5-10%1]."""
    state: str
    """As Slurm spells it: RUNNING, PENDING, COMPLETING, SUSPENDED, ..."""
    reason: str
    """Why it is pending; of several elements all reasons, apart by commas."""
    nodes: str
    """n[1-4]; empty where it has none."""
    running_seconds: float | None
    start: float | None
    """When it started or is expected to, seconds since the epoch; None where Slurm does not know."""
    dependency: str

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"

    @property
    def pends(self) -> bool:
        return self.state in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def stuck(self) -> bool:
        """Pending, and nothing will start it unless a person does something. One that its own user holds is meant so."""
        reason = self.reason.lower()
        held = "held" in reason and "jobhelduser" not in reason
        never = any(
            sign in reason
            for sign in (
                "neversatisfied",
                "badconstraints",
                "launchfailure",
                "invalidaccount",
                "invalidqos",
            )
        )
        return self.pends and (held or never or self.state != "PENDING")

    def describe(self, now: float) -> str:
        """`is running for ...`"""
        where = f"{self.id} on {self.nodes}" if self.nodes else self.id
        if self.runs:
            since = "" if self.start is None else f" since {format_time(self.start)}"
            return f"is running for {format_duration(self.running_seconds or 0.0)}{since} ({where})"
        if not self.pends:
            return f"is {self.state.lower().replace('_', ' ')} ({where})"
        if not self.stuck:
            if "JobArrayTaskLimit" in self.reason:
                return f"is waiting for the previous array element ({self.id}, {self.reason})"
            if "Dependency" in self.reason:
                return f"is waiting on a dependency ({self.id}, {self.dependency})"
            if self.start is not None and self.start > now:
                return f"is scheduled to start in {format_duration(self.start - now)} at {format_time(self.start)} ({self.id}, {self.reason})"
        dependency = f", {self.dependency}" if self.dependency else ""
        return f"is pending for reason {self.reason or self.state} ({self.id}{dependency})"


def ask_queue(job_name: str, user: str | None = None) -> list[QueuedJob]:
    """The user's jobs of that name, those that run first. Default: the current user.

    Raises:
        OperationsError: squeue is not there, fails, or there is no such user.
    """
    if not job_name.strip() or "," in job_name:
        raise OperationsError(
            f"--job-name {job_name!r}: give the one name of the job, as in #SBATCH --job-name; commas part names"
        )
    command = [
        "squeue",
        "--noheader",
        "--all",
        f"--user={_find_uid(user)}",
        f"--name={job_name}",
        f"--format={_FORMAT}",
    ]
    # A user's settings may narrow what is listed or spell times in another way.
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
            "squeue is not there; run this on a host of the Slurm cluster, with Slurm's commands in PATH"
        ) from None
    except OSError as error:
        raise OperationsError(f"squeue cannot be started: {error}") from error
    except subprocess.TimeoutExpired:
        raise OperationsError(
            f"squeue gave no answer in {_TIMEOUT_SECONDS} s; look at the controller with `scontrol ping`"
        ) from None
    complaint = " ".join(done.stderr.split())
    # It also complains and ends with 0, of a user that it does not know for one.
    if done.returncode or (complaint and not done.stdout.strip()):
        raise OperationsError(
            f"squeue failed with code {done.returncode}: {complaint or 'it said nothing'}"
        )
    return read_answer(done.stdout, job_name)


def read_answer(text: str, job_name: str) -> list[QueuedJob]:
    """squeue's lines, in our format.

    Raises:
        OperationsError: a line is of another form.
    """
    jobs = []
    for line in text.split("\n"):
        if not line.strip() or line.startswith(
            "CLUSTER: "
        ):  # a heading where several clusters are asked
            continue
        fields = line.split(_SEPARATOR)
        if len(fields) != 8:
            raise OperationsError(
                f"squeue answered {line!r} where {job_name!r} was asked for; --noheader --format must hold"
            )
        identity, state, reason, nodes, running, start, dependency, _ = (
            each.strip() for each in fields
        )
        reasons = ",".join(each for each in reason.split(",") if each and each != "None")
        dependency = "" if dependency == "(null)" else dependency
        jobs.append(
            QueuedJob(
                identity,
                state,
                reasons,
                nodes,
                _parse_seconds(running),
                _parse_time(start),
                dependency,
            )
        )
    return sorted(jobs, key=lambda job: (not job.runs, job.pends, job.stuck))


def format_pulse(job_name: str, jobs: Sequence[QueuedJob], now: float) -> str:
    """One line: what the run does, then what is queued behind it."""
    if not jobs:
        return f"{job_name} is neither running nor scheduled"
    first, *others = (job.describe(now) for job in jobs[:_SHOWN])
    more = [f"and {len(jobs) - _SHOWN} more"] if len(jobs) > _SHOWN else []
    return "; ".join([f"{job_name} {first}", *(f"another {other}" for other in others), *more])


def find_idle_reason(job_name: str, jobs: Sequence[QueuedJob]) -> str | None:
    """What is wrong where nothing of the run runs or will start by itself; None where something does."""
    if not jobs:
        return (
            f"{job_name} is neither running nor scheduled; nothing trains until a job is submitted"
        )
    if not all(job.stuck for job in jobs):
        return None
    reasons = ", ".join(f"{job.id} ({job.reason or job.state})" for job in jobs[:_SHOWN])
    return f"{job_name} is not running, and nothing that is queued can start by itself: {reasons}"


def format_duration(seconds: float) -> str:
    """D-HH:MM:SS."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"


def _parse_seconds(text: str) -> float | None:
    """Of [D-][HH:]MM:SS; None for INVALID, as squeue says of a job between two states."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _parse_time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None  # N/A


def _find_uid(user: str | None) -> int:
    if user is None:
        return os.getuid()
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise OperationsError(
            f"--user {user}: this host knows no such user; give one whose jobs squeue shows"
        ) from None
