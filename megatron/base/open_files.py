"""The number of files and sockets that this process may have open."""

import os
import resource

_SPARE = 4096
"""Files that a process opens besides those that are counted: libraries, logs and checkpoints."""


def allow_open_files(count: int) -> None:
    """Raise the limit of this process so that `count` more files fit, if the system permits it.

    The usual limit is 1024. A system that does not permit more gives an error when a file is
    opened, so there is none here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit holds for all files. Each caller knows only its own.
    needed = len(os.listdir("/dev/fd")) + count + _SPARE
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
