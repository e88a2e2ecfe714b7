"""What this host has: its memory, as Linux reports it, and the files that a process may open."""

import os
import resource
from pathlib import Path

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


_MEMINFO = Path("/proc/meminfo")


def read_total_memory() -> int | None:
    """Return the bytes of this host's memory and swap. None if the system does not report it.

    macOS makes more swap when it is needed, so there is no fixed limit to compare with.
    """
    return _add("MemTotal", "SwapTotal")


def read_available_memory() -> int | None:
    """Return the bytes that can still be allocated, swap included. None if it is not known."""
    return _add("MemAvailable", "SwapFree")


def _add(*names: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kib = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    # Old kernels and some containers lack lines.
    if not all(kib.get(name) for name in names):
        return None
    return 1024 * sum(int(kib[name][0]) for name in names)
