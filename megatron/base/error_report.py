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

from megatron.base.durable import replace_file
from megatron.base.errors import CheckpointError, FaultyHostError, HungRanksError

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
    """After a hang, the hosts of the ranks that the others wait for, as the system names them.
    After a difference in a replay, the hosts to exclude."""

    def describe(self) -> str:
        """Return one line for people."""
        prefix = ""
        if self.rank > 0:
            prefix = f"rank {self.rank} on {self.host}: "
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
        hung_hosts=error.hosts if isinstance(error, HungRanksError | FaultyHostError) else (),
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
    faults = _DEVICE_OR_MOUNT | _LOCAL_DISK
    if isinstance(error, CheckpointError):
        faults = _DEVICE_OR_MOUNT
    # The chain of causes is the one that a traceback prints. An error raised `from None` hides its
    # context on purpose.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in faults:
            return cause.errno
        context = cause.__context__
        if cause.__suppress_context__:
            context = None
        cause = cause.__cause__ or context
    return None


def write_report(folder: Path, report: ErrorReport) -> None:
    """Write the report of one rank. After a failure, no partial file has its name.

    Raises:
        OSError: If it cannot be written.
    """
    # Leading zeros, so that a listing of the folder is in the order of ranks.
    replace_file(folder / f"rank_{report.rank:06d}.json", json.dumps(asdict(report)))
