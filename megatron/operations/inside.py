"""Opening files that may be published: only regular files that lie in the folder that was named.

Invariant: what a descriptor from here reads lies below the folder's real path, whatever links lead there and whoever exchanges a
name meanwhile. Each part of the real path is opened by itself, from its parent's descriptor, and may not be a link. Hard links
cannot be seen.
"""

import os
import stat
from pathlib import Path, PurePath
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""O_NONBLOCK: a FIFO that took the file's place must not hold us."""


class OutsideError(OSError):
    """A name leads out of its folder, or to something that is no regular file."""


def real_name(folder: Path, name: str) -> PurePath:
    """Resolve all links of a name in `folder`, which may be a link itself. Returns it relative to the real folder.

    Raises:
        OutsideError: it leads out of the folder.
    """
    top = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(top / name))
    if not real.is_relative_to(top):
        way_out = "move what is to be sent into that folder, or name the folder that holds it"
        raise OutsideError(0, f"leads to {real}, outside of {folder}; {way_out}")
    return real.relative_to(top)


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a regular file in `folder` for reading. Links are followed as long as they stay in the folder.

    Raises:
        OutsideError: the name leads out of the folder, or is no regular file. OSError: it is not there, or cannot be read.
    """
    relative = real_name(folder, name)
    descriptor = os.open(os.path.realpath(folder), _FOLDER)
    try:
        for part in relative.parts[:-1]:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        _refuse_special(os.stat(relative.name, dir_fd=descriptor, follow_symlinks=False))
        opened = os.open(relative.name, _FILE, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    file = open(opened, "rb")  # noqa: SIM115 (the caller closes it)
    try:
        _refuse_special(os.fstat(opened))
    except OutsideError:
        file.close()
        raise
    return file


def _refuse_special(status: os.stat_result) -> None:
    """A device may act when it is opened, a FIFO may wait: look first. Then the opened one is looked at again."""
    if not stat.S_ISREG(status.st_mode):
        raise OutsideError(0, "is no regular file")
