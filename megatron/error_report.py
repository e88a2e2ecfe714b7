"""What each rank reports of the error that ended it, for the array task that decides what follows.

Invariant: one file for each rank, renamed into place. A reader sees a whole report or none, however many ranks write at once.
"""

import errno
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.durable import replace_file
from megatron.errors import CheckpointError

FOLDER_VARIABLE = "MEGATRON_ERROR_FOLDER"
"""Environment variable that names the folder of the reports. The array task sets it for all ranks."""

_DEVICE_OR_MOUNT = frozenset(
    {
        errno.EIO,
        errno.ENXIO,
        errno.ENODEV,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EUCLEAN,
        errno.EREMOTEIO,
    }
)
"""A disk, or this host's mount of a file system, does not work. A wrong path or permission is none of these."""
_LOCAL_DISK = frozenset({errno.ENOSPC, errno.EROFS})
"""A fault of the host where the folder is on its own disk. The checkpoints' folder is shared: there a person must act."""


@dataclass(frozen=True)
class ErrorReport:
    """The error that ended one rank."""

    rank: int
    host: str
    """As Slurm names it, where there is Slurm."""
    kind: str
    """Class of the error."""
    message: str
    io_error: int | None = None
    """errno of the I/O error behind it that can be a fault of the host; None: there is none."""

    def describe(self) -> str:
        """Return the line for people."""
        prefix = f"rank {self.rank} on {self.host}: " if self.rank > 0 else ""
        return f"{prefix}{self.kind}: {self.message}"


def build_report(error: BaseException, environment: Mapping[str, str] = os.environ) -> ErrorReport:
    """Describe the error of this rank."""
    return ErrorReport(
        rank=int(environment.get("RANK") or environment.get("SLURM_PROCID") or 0),
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        kind=type(error).__name__,
        message=str(error),
        io_error=host_io_error(error),
    )


def host_io_error(error: BaseException) -> int | None:
    """Return the errno of the I/O error that caused `error`, if a fault of this host alone can be the reason."""
    faults = (
        _DEVICE_OR_MOUNT if isinstance(error, CheckpointError) else _DEVICE_OR_MOUNT | _LOCAL_DISK
    )
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in faults:
            return cause.errno
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
    return None


def write_report(folder: Path, report: ErrorReport) -> None:
    """Write the report of one rank, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(folder / f"rank_{report.rank:06d}.json", json.dumps(asdict(report)))


def read_reports(folder: Path) -> tuple[list[ErrorReport], list[str]]:
    """Read all reports.

    Returns:
        The reports in the order of ranks, and the names of files that hold none.

    Raises:
        OSError: the folder cannot be read.
    """
    reports: list[ErrorReport] = []
    unreadable: list[str] = []
    for path in sorted(folder.iterdir()):
        try:
            report = (
                ErrorReport(**json.loads(path.read_bytes())) if path.suffix == ".json" else None
            )
        except (OSError, ValueError, TypeError):
            report = None
        if report is None:
            unreadable.append(path.name)
        else:
            reports.append(report)
    return sorted(reports, key=lambda report: report.rank), unreadable


def hosts_at_fault(reports: list[ErrorReport], hosts: int) -> dict[str, str]:
    """Find the hosts whose own I/O errors ended the step.

    An error that is not an I/O error needs a person, unless it repeats the message of a rank that had one: ranks agree on
    what happens to a checkpoint, and all of them end with the same message. I/O errors on more than half of several hosts
    are the shared file system's, or the configuration's.

    Args:
        reports: of one step, at least one.
        hosts: number of hosts of the job.

    Returns:
        Host -> the reason. Empty: a person is needed.
    """
    failed = [report for report in reports if report.io_error is not None]
    explained = {report.message for report in failed}
    if any(report.message not in explained for report in reports):
        return {}
    bad: dict[str, str] = {}
    for report in failed:
        bad.setdefault(report.host, f"rank {report.rank}: {report.kind}: {report.message}")
    if hosts > 1 and 2 * len(bad) > hosts:
        return {}
    return bad
