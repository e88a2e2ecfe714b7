"""The memory of this host, as Linux reports it in /proc/meminfo."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def read_total_memory() -> int | None:
    """Return the bytes of this host's memory and swap. None on systems other than Linux.

    macOS makes more swap when it is needed, so no number is certainly too large there.
    """
    return _add("MemTotal", "SwapTotal")


def read_available_memory() -> int | None:
    """Return the bytes that can still be allocated, swap included. None on other systems."""
    return _add("MemAvailable", "SwapFree")


def _add(*names: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1024 * sum(kib[name] for name in names)
