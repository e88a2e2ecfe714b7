"""A lock on an open file, which the kernel releases when its process ends."""

import errno
import fcntl
import os
from enum import Enum
from pathlib import Path

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
"""Errors after which another process is taken to hold the lock. Others mean that there are none."""


class LockResult(Enum):
    """The result of an attempt to lock a file."""

    HELD = "held"
    """This process holds the lock."""
    TAKEN = "taken"
    """Another process holds it."""
    REMOVED = "removed"
    """The last holder has removed the file since it was opened. Open it again."""


def read_process_space() -> str:
    """Return an id that processes have in common if they see each other's process ids.

    These are the processes of one boot of a kernel in one namespace of process ids. Containers on
    one host share the boot, but each has its own ids. The result is empty if it cannot be read.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def try_lock(descriptor: int, path: Path) -> LockResult:
    """Lock an open file without waiting.

    Args:
        descriptor: The open file.
        path: Its path. The last holder may have removed the file between open and lock. A lock on
            it protects nothing, because the next process creates and locks a new file.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return LockResult.TAKEN
        raise
    if is_at(descriptor, path):
        return LockResult.HELD
    return LockResult.REMOVED


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path leads to an open file."""
    opened = os.fstat(descriptor)
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (found.st_dev, found.st_ino)
