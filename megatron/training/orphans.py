"""No rank outlives its launcher: a killed torchrun must not leave processes behind that hold the devices. Linux only.

Imports nothing slow, so that it can be called first of all.
"""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Have the kernel end this process when torchrun ends, and end it now if torchrun has gone already.

    Only under torchrun: a run that was started from a shell outlives it, if the user wants that.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    try:
        libc = ctypes.CDLL(None, use_errno=True)
    except OSError:
        return
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1 and not _is_launcher(
            Path("/proc/1/cmdline")
        ):  # it died before the line above
            os.kill(os.getpid(), signal.SIGKILL)


def _is_launcher(command: Path) -> bool:
    """In a container torchrun itself may be process 1."""
    try:
        return b"torch" in command.read_bytes() or b"python" in command.read_bytes()
    except OSError:
        return True
