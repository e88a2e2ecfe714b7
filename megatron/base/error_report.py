"""Reports of the errors that ended the ranks, for the array task that decides what happens next.

Invariant: each rank writes one file and renames it to its final name. A reader sees a complete
report or none, even if many ranks write at the same time.
"""

import errno
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import CheckpointError, HungRanksError
from megatron.base.outside_file import load_json

FOLDER_VARIABLE = "MEGATRON_ERROR_FOLDER"
"""Environment variable with the folder of the reports. The array task sets it for all ranks."""

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
"""Errors of a disk, or of this host's mount of a file system.

A wrong path or permission is not among them, because another host would have the same error.
"""
_LOCAL_DISK = frozenset({errno.ENOSPC, errno.EROFS})
"""Errors that are a fault of the host if the folder is on a local disk.

The checkpoints are on a shared file system. There, these errors need a person.
"""


@dataclass(frozen=True)
class ErrorReport:
    """The error that ended one rank."""

    rank: int
    host: str
    """Name of the node in Slurm, or the host name outside Slurm."""
    kind: str
    """Class of the error."""
    message: str
    io_error: int | None = None
    """The errno of the I/O error that caused it, if that can be a fault of the host."""
    hung_hosts: tuple[str, ...] = ()
    """After a hang, the hosts of the ranks that the others wait for, as the system names them."""

    def describe(self) -> str:
        """Return one line for people."""
        if self.rank > 0:
            prefix = f"rank {self.rank} on {self.host}: "
        else:
            prefix = ""
        return f"{prefix}{self.kind}: {self.message}"


def build_report(error: BaseException, environment: Mapping[str, str] = os.environ) -> ErrorReport:
    """Return the report of an error that ended this rank.

    Args:
        error: The error.
        environment: The environment variables of the process.
    """
    return ErrorReport(
        # torchrun sets RANK. A rank that srun starts without it has Slurm's number.
        rank=parse_rank(environment.get("RANK") or environment.get("SLURM_PROCID")),
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        kind=type(error).__name__,
        message=str(error),
        io_error=host_io_error(error),
        hung_hosts=error.hosts if isinstance(error, HungRanksError) else (),
    )


def parse_rank(text: str | None) -> int:
    """Return the rank in a variable of the environment. Anything but a number counts as 0.

    The error that is reported may be about that value.
    """
    if text is not None and text.isdecimal():
        return int(text)
    return 0


def host_io_error(error: BaseException) -> int | None:
    """Return the errno of the I/O error that caused `error`.

    None if there is no such error, or if it cannot be a fault of this host alone.
    """
    if isinstance(error, CheckpointError):
        faults = _DEVICE_OR_MOUNT
    else:
        faults = _DEVICE_OR_MOUNT | _LOCAL_DISK
    # The chain of causes is the one that a traceback prints. An error raised `from None` hides its
    # context on purpose.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in faults:
            return cause.errno
        if cause.__suppress_context__:
            context = None
        else:
            context = cause.__context__
        cause = cause.__cause__ or context
    return None


def write_report(folder: Path, report: ErrorReport) -> None:
    """Write the report of one rank. After a failure, no partial file has its name.

    Raises:
        OSError: If it cannot be written.
    """
    # Leading zeros, so that a listing of the folder is in the order of ranks.
    replace_file(folder / f"rank_{report.rank:06d}.json", json.dumps(asdict(report)))


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
            if path.suffix == ".json":
                report = _parse_report(load_json(path))
            else:
                report = None
        # One bad file must not hide the others. TypeError means other fields than ErrorReport has,
        # and AttributeError that the file holds no object.
        except (OSError, ValueError, TypeError, AttributeError):
            report = None
        if report is None:
            unreadable.append(path.name)
        else:
            reports.append(report)
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
