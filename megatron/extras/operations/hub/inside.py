"""Opening of files that may be published: only regular files in the folder that was named.

Invariant: a descriptor from this module reads a file below the folder's real path. This is true for
any links in the name, and if another process replaces a part of the path in the meantime. Each part
of the real path is opened separately, from its parent's descriptor, and must not be a link.

Hard links to files outside cannot be detected.
"""

import errno
import os
from pathlib import Path, PurePath
from typing import BinaryIO

from megatron.base.outside_file import open_regular

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class OutsideError(OSError):
    """A name leads out of its folder, or to something that is not a regular file."""


def real_name(folder: Path, name: str) -> PurePath:
    """Resolve all links of a name in `folder`, which may be a link itself.

    Returns:
        The real path, relative to the folder's real path.

    Raises:
        OutsideError: The name leads out of the folder.
    """
    top = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(top / name))
    if not real.is_relative_to(top):
        way_out = "move the file into that folder, or give the folder that holds it"
        raise OutsideError(0, f"leads to {real}, outside of {folder}; {way_out}")
    return real.relative_to(top)


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a regular file in `folder` for reading.

    Links are followed as long as they stay in the folder. The caller closes the file.

    Raises:
        OutsideError: The name leads out of the folder, or to something that is not a regular file.
        OSError: The file does not exist, or cannot be read.
    """
    # The real path has no links now. If another process puts one below the folder later, O_NOFOLLOW
    # makes the call fail.
    relative = real_name(folder, name)
    descriptor = os.open(os.path.realpath(folder), _FOLDER)
    try:
        for part in relative.parts[:-1]:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        return open_regular(relative.name, flags=os.O_NOFOLLOW, dir_fd=descriptor)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EISDIR):
            raise OutsideError(0, "is not a regular file") from error
        raise
    finally:
        os.close(descriptor)
