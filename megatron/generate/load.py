"""Loading of a checkpoint for generation, on one process or on several tensor-parallel ranks."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.model import load_model
from megatron.checkpoint.ranks import Ranks
from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.tree import Config
from megatron.errors import ConfigError, LayoutError
from megatron.model.gpt import GPT
from megatron.model.shape import ModelShape
from megatron.parallel.grid import Grid
from megatron.parallel.launcher import read_launcher_world
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.parallel.rendezvous import choose_device, start_process_group
from megatron.plan_rules import PlanReport, check_tensor_parallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TIMEOUT_MINUTES = 10.0


@contextlib.contextmanager
def join_tensor_parallel_ranks(size: int, device: str | None = None) -> Iterator[Mesh]:
    """Start the process group of `size` ranks within a `with` block.

    Args:
        size: Number of tensor-parallel ranks, which is the number of processes.
        device: cpu or cuda. None: the GPU if there is one.

    Raises:
        ConfigError: There is no GPU and one was asked for.
        LayoutError: Another number of processes was started.
    """
    world = read_launcher_world()
    if world.size != size:
        raise LayoutError(
            f"--tensor-model-parallel-size {size} needs as many processes, and {world.size} were "
            f"started; start with torchrun --nproc-per-node {size} tools/generate.py ..."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, and torch sees none; use --device cpu")
    if device == "cpu":
        chosen = torch.device("cpu")
    else:
        chosen = choose_device(world.local_rank)
    if size == 1:
        yield build_mesh(Grid(1, 1, 1), chosen)
        return
    start_process_group("nccl" if chosen.type == "cuda" else "gloo", _TIMEOUT_MINUTES)
    try:
        yield build_mesh(Grid(1, 1, size), chosen, timeout_minutes=_TIMEOUT_MINUTES)
    finally:
        dist.destroy_process_group()


def load_part(checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype) -> GPT:
    """Return this rank's part of the model of a checkpoint, in evaluation mode.

    Raises:
        CheckpointError: See `load_model`.
        ConfigError: The ranks cannot have equal parts of the model.
    """
    _check_parts(checkpoint.read_config(), mesh.grid.tensor)
    ranks = Ranks(mesh.rank, mesh.grid.world_size, mesh.control, mesh.names)
    return load_model(checkpoint, mesh.device, mesh.tensor_parallel, ranks).to(dtype)


def store_for_single_prompts(model: GPT) -> None:
    """Store wide matrices by columns, which is faster for one sequence on a CPU.

    The product of a matrix [out, in] and one token's vector took 0.55 to 0.7 of the time if `out`
    is the larger size. With eight sequences it took up to 1.25 of the time. No value changes.
    """
    for parameter in model.parameters():
        is_wide = parameter.dim() == 2 and parameter.shape[0] > parameter.shape[1]
        if is_wide and parameter.device.type == "cpu":
            parameter.data = parameter.data.t().contiguous().t()


def _check_parts(config: Config, tensor: int) -> None:
    """Check that a number of tensor-parallel ranks divides the model.

    Raises:
        ConfigError: It does not.
    """
    # Layout and recomputation of the training have no effect here.
    parallel = replace(config.parallel, tensor_model_parallel_size=tensor, sequence_parallel=False)
    report = PlanReport(ConfigWithOrigin(replace(config, parallel=parallel), {}))
    check_tensor_parallel(ModelShape(config.model, 0, 0), report)
    if report.errors:
        raise ConfigError("\n".join(report.errors))
