"""Protection against processes that outlive their launcher. Linux only.

Ranks of a killed torchrun must end, because they would keep the devices allocated. The
module imports nothing slow, so that it can be called before all other imports.
"""

import ctypes
import os
import signal
from pathlib import Path

# From <linux/prctl.h>. The ctypes module has no name for it.
_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Have the kernel end this process when torchrun ends.

    If torchrun has ended already, the process is killed immediately. This applies only under
    torchrun. A run started from a shell may outlive that shell if the user wants it to.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    try:
        libc = ctypes.CDLL(None, use_errno=True)
    except OSError:
        # Without a C library to call there is no protection, but training is still possible.
        return
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If torchrun ended before the call of prctl, its death sends no signal any more. The
        # process was then adopted by process 1.
        if os.getppid() == 1 and not _is_launcher(Path("/proc/1/cmdline")):
            os.kill(os.getpid(), signal.SIGKILL)


def _is_launcher(command: Path) -> bool:
    """Return whether a command line is torchrun's. In a container, torchrun may be process 1."""
    try:
        return b"torch" in command.read_bytes() or b"python" in command.read_bytes()
    except OSError:
        # If the command line cannot be read, killing a healthy rank would be the worse error.
        return True
