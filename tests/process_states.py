"""Whether a process that a test does not own has ended."""

import psutil


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. A zombie is left if no parent has collected it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
