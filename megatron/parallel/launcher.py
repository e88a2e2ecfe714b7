"""The rank and the world of this process, read from the launcher's environment variables.

torchrun, `torch.distributed.launch` and DeepSpeed's launcher set the same variables. Slurm sets its
own, if `srun` starts one task for each device. They are translated to torchrun's, because PyTorch
reads those.

Also the protection against processes that outlive the one that has started them, on Linux only.
Ranks of a killed torchrun must end, because they would keep the devices allocated. Workers of a
pool would wait forever for their next task. The module imports nothing slow, so that it can be
called before all other imports.
"""

import ctypes
import os
import re
import signal
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megatron.base.errors import LayoutError

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Linux gives clients ports from 32,768 on. A rendezvous port among them could be taken already.
_FIRST_PORT = 20_000
_PORTS = 12_000


@dataclass(frozen=True)
class LaunchedWorld:
    """The size of the world, and this process's number on its host and in the world.

    A process without a launcher is a world of one rank.
    """

    size: int
    local_rank: int
    rank: int = 0


def read_launcher_world(
    local_rank_flag: int | None = None, environment: MutableMapping[str, str] = os.environ
) -> LaunchedWorld:
    """Return the world that the launcher has started.

    Args:
        local_rank_flag: The value that older launchers append to the command line, used if
            LOCAL_RANK is not set.
        environment: The environment variables. Those of Slurm are translated in it.

    Raises:
        LayoutError: Slurm's world and WORLD_SIZE differ. Or an MPI launcher has started several
            processes, each of which would train alone. Or a variable is not a valid number.
    """
    # A launcher that sets RANK takes precedence, because torchrun may itself run under srun.
    if "RANK" not in environment:
        if _read_number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
            _translate_slurm_variables(environment)
        elif _read_number(environment, "WORLD_SIZE", 1) > 1:
            raise LayoutError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']} and RANK is not set: "
                "start with torchrun, or with srun and one task per device, which set both"
            )
        elif sizes := [name for name in _MPI_SIZES if _read_number(environment, name, 1) > 1]:
            raise LayoutError(
                f"{sizes[0]} is {environment[sizes[0]]}, but an MPI launcher does not set the "
                "address at which the processes meet: "
                "start with torchrun, or with srun and one task per device"
            )
    size = _read_number(environment, "WORLD_SIZE", 1)
    rank = _read_number(environment, "RANK", 0)
    if not 0 <= rank < size:
        raise LayoutError(
            f"RANK is {rank} and WORLD_SIZE is {size}: ranks have the numbers from 0 to WORLD_SIZE "
            "- 1. Correct the launcher's options, or unset both to start one process"
        )
    local_rank = _read_number(environment, "LOCAL_RANK", local_rank_flag or 0)
    return LaunchedWorld(size, local_rank, rank)


def read_ranks_per_node(
    world_size: int, environment: Mapping[str, str] = os.environ, *, unknown: int | None = None
) -> int:
    """Return the number of ranks on this rank's node.

    It is LOCAL_WORLD_SIZE, which torchrun sets. Without it, it is the number of tasks on the first
    node of the Slurm step, such as the 4 of "4(x2),3". The number is at most the number of ranks.

    Args:
        world_size: Number of ranks.
        environment: The environment variables.
        unknown: The result without both variables. Default: all ranks are on one node.

    Raises:
        LayoutError: LOCAL_WORLD_SIZE is not a whole number.
    """
    size = _read_number(environment, "LOCAL_WORLD_SIZE", 0)
    if size < 1:
        tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if tasks is not None:
            size = int(tasks.group())
        elif unknown is not None:
            size = unknown
        else:
            size = world_size
    return max(1, min(size, world_size))


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable.

    Raises:
        LayoutError: It is not a whole number.
    """
    try:
        return int(environment.get(name, default))
    except ValueError:
        raise LayoutError(
            f"{name} is {environment[name]!r} and must be a whole number: start with torchrun or "
            "srun, which set it, or correct it"
        ) from None


def read_meeting_point(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and the port at which the processes meet.

    Raises:
        LayoutError: The launcher has not set them, or the port is invalid.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise LayoutError(
            f"{' and '.join(missing)} must be set, because several processes meet there: start "
            "with torchrun or srun, which set both"
        )
    port = _read_number(environment, "MASTER_PORT", 0)
    if not 0 < port < 1 << 16:
        raise LayoutError(f"MASTER_PORT is {port} and must be from 1 to 65535")
    return environment["MASTER_ADDR"], port


def _translate_slurm_variables(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from Slurm's.

    Raises:
        LayoutError: WORLD_SIZE is set to another number than Slurm's tasks.
    """
    tasks = environment["SLURM_STEP_NUM_TASKS"]
    job = int(environment.get("SLURM_JOB_ID", "0"))
    if environment.setdefault("WORLD_SIZE", tasks) != tasks:
        raise LayoutError(
            f"srun started {tasks} tasks and WORLD_SIZE is {environment['WORLD_SIZE']}; "
            "unset WORLD_SIZE when srun starts the tasks"
        )
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment.setdefault("MASTER_ADDR", parse_first_host(environment["SLURM_STEP_NODELIST"]))
    # All ranks must choose the same port without communication, so it follows from job and step.
    # Steps of one job that run at the same time get different ports.
    step = int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_PORT", str(_FIRST_PORT + (job + 1000 * step) % _PORTS))


def parse_first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation: "iam[07-09,12],log1" -> "iam07"."""
    # Brackets contain commas too, so they must be replaced before the list is split at a comma.
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


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
