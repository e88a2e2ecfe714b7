"""The memory of this host, as Linux reports it in /proc/meminfo."""

from pathlib import Path

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
