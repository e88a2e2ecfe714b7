"""Protection against processes that outlive the one that has started them. Linux only.

Ranks of a killed torchrun must end, because they would keep the devices allocated. Workers of a
pool would wait forever for their next task. The module imports nothing slow, so that it can be
called before all other imports.
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
    # If torchrun ended before the call, its death sends no signal any more. The process was then
    # adopted by process 1.
    if _ask_for_signal() and os.getppid() == 1 and not _is_launcher(Path("/proc/1/cmdline")):
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process, a worker of a pool, when its parent ends.

    Args:
        parent: The id of the process that has started this one. It may have ended already.
    """
    if _ask_for_signal() and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _ask_for_signal() -> bool:
    """Ask the kernel for a SIGKILL when the parent ends. Return whether it can be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
    except OSError:
        # Without a C library to call there is no protection, but training is still possible.
        return False
    if not hasattr(libc, "prctl"):
        return False
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return True


def _is_launcher(command: Path) -> bool:
    """Return whether a command line is torchrun's. In a container, torchrun may be process 1."""
    try:
        return b"torch" in command.read_bytes() or b"python" in command.read_bytes()
    except OSError:
        # If the command line cannot be read, killing a healthy rank would be the worse error.
        return True
