"""What the launcher says of this process, in the environment: torchrun's words, which `torch.distributed.launch` and DeepSpeed's
launcher speak, too, or Slurm's, where `srun` starts one task for each device. Slurm's are put into torchrun's words for PyTorch.
"""

import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass

from megatron.errors import LayoutError

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_FIRST_PORT, _PORTS = 20_000, 12_000  # below those that Linux gives to clients


@dataclass(frozen=True)
class LaunchedWorld:
    """A process without a launcher is a world of one."""

    size: int
    local_rank: int


def read_launcher_world(
    local_rank_flag: int | None = None, environment: MutableMapping[str, str] = os.environ
) -> LaunchedWorld:
    """`local_rank_flag`: what older launchers append to the command line, for where LOCAL_RANK is missing.

    Raises:
        LayoutError: Slurm's world and WORLD_SIZE differ, or an MPI launcher's processes would each train alone.
    """
    if "RANK" not in environment:
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            _translate_slurm_variables(environment)
        elif int(environment.get("WORLD_SIZE", "1")) > 1:
            raise LayoutError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']} and RANK is not set: start with torchrun, or with srun and one task a "
                "device, which say both"
            )
        elif sizes := [name for name in _MPI_SIZES if int(environment.get(name, "1")) > 1]:
            raise LayoutError(
                f"{sizes[0]} says {environment[sizes[0]]} processes, but an MPI launcher does not say how they find each other: "
                "start with torchrun, or with srun and one task a device"
            )
    local_rank = environment.get("LOCAL_RANK", local_rank_flag)
    return LaunchedWorld(
        int(environment.get("WORLD_SIZE", "1")), int(local_rank) if local_rank is not None else 0
    )


def _translate_slurm_variables(environment: MutableMapping[str, str]) -> None:
    tasks, job = environment["SLURM_STEP_NUM_TASKS"], int(environment.get("SLURM_JOB_ID", "0"))
    if environment.setdefault("WORLD_SIZE", tasks) != tasks:
        raise LayoutError(
            f"srun started {tasks} tasks and WORLD_SIZE is {environment['WORLD_SIZE']}; do not set it beside srun"
        )
    environment["RANK"], environment["LOCAL_RANK"] = (
        environment["SLURM_PROCID"],
        environment["SLURM_LOCALID"],
    )
    environment.setdefault("MASTER_ADDR", parse_first_host(environment["SLURM_STEP_NODELIST"]))
    step = int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_PORT", str(_FIRST_PORT + (job + 1000 * step) % _PORTS))


def parse_first_host(nodes: str) -> str:
    """Of a list as Slurm writes it: "iam[07-09,12],log1" -> "iam07"."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]
