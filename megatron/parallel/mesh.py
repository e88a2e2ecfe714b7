"""Torch process groups built from the grid. One object, passed to what needs it, never fetched.

A world of one rank has no process groups at all: every group here is None and each collective is skipped.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.errors import LayoutError
from megatron.parallel.grid import Grid, Place

Clock = Callable[[], AbstractContextManager[None]]


@dataclass
class TensorParallel:
    """What a tensor-parallel layer must know: its group, its place in it, and whether the sequence is cut over it.

    `clock` is entered around each collective; the trainer puts its communication timer there.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    clock: Clock = field(default=nullcontext)


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the grid, its device, and its groups."""

    grid: Grid
    rank: int
    place: Place
    device: torch.device
    backend: str | None
    """nccl or gloo; None in a world of one."""
    devices: DeviceMesh | None
    """Axes ("pp", "dp", "tp"); None in a world of one."""
    tensor_parallel: TensorParallel
    ends: dist.ProcessGroup | None
    """The first and the last pipeline rank at this rank's data and tensor coordinates, where the embedding may be tied; None on
    the ranks between, and without a pipeline."""
    control: dist.ProcessGroup | None
    """A gloo group of all ranks for small objects and decisions, so that they never queue behind GPU work."""

    def data_parallel_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of this rank's data-parallel group."""
        assert self.devices is not None, "a world of one has no mesh"
        return self.devices["dp"]

    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks that a microbatch passes through, in order."""
        assert self.devices is not None, "a world of one has no mesh"
        return self.devices.get_group("pp")

    def describe(self) -> str:
        """`rank 3 on host (pipeline 0, data 1, tensor 1)`, for messages that must name a rank."""
        return f"rank {self.rank} on {os.uname().nodename} ({self.place})"


def choose_device(local_rank: int) -> torch.device:
    """The GPU of this local rank (ranks share GPUs round-robin where there are fewer), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def start_process_group(backend: str, timeout_minutes: float) -> None:
    """Join the world that the launcher's environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises:
        LayoutError: nccl is asked for on a machine without GPUs.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise LayoutError("--distributed-backend nccl needs GPUs and torch sees none on this host; use --distributed-backend gloo")
    timeout = timedelta(minutes=timeout_minutes)
    # torchrun's agent keeps one store over all its restarts; a prefix for each keeps stale keys of the last one out.
    if restart := os.environ.get("TORCHELASTIC_RESTART_COUNT", ""):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        master = dist.rendezvous("env://", rank, world_size, timeout=timeout)
        store = dist.PrefixStore(f"restart{restart}", next(iter(master))[0])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def build_mesh(grid: Grid, device: torch.device, *, sequence_parallel: bool = False, timeout_minutes: float = 10.0) -> Mesh:
    """Cut the running world into the grid's groups.

    Raises:
        LayoutError: the world has another size than the grid.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != grid.world_size:
        raise LayoutError(
            f"{world_size} ranks were started but the layout needs {grid.pipeline} (pipeline) x {grid.data} (data) x "
            f"{grid.tensor} (tensor) = {grid.world_size}; start that many"
        )
    place = grid.place(rank)
    if world_size == 1:
        tensor_parallel = TensorParallel(sequence_parallel=False)
        return Mesh(grid, rank, place, device, None, None, tensor_parallel, None, None)
    devices = init_device_mesh(device.type, (grid.pipeline, grid.data, grid.tensor), mesh_dim_names=("pp", "dp", "tp"))
    backend = dist.get_backend()
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
    tensor_parallel = TensorParallel(
        size=grid.tensor,
        rank=place.tensor,
        group=devices.get_group("tp") if grid.tensor > 1 else None,
        sequence_parallel=sequence_parallel and grid.tensor > 1,
    )
    return Mesh(grid, rank, place, device, backend, devices, tensor_parallel, _group_of_ends(grid, rank), control)


def _group_of_ends(grid: Grid, rank: int) -> dist.ProcessGroup | None:
    """Every rank must help to make every group, its own or not."""
    if grid.pipeline == 1:
        return None
    mine = None
    for data in range(grid.data):
        for tensor in range(grid.tensor):
            ranks = [grid.rank(Place(pipeline, data, tensor)) for pipeline in (0, grid.pipeline - 1)]
            group = dist.new_group(ranks)
            mine = group if rank in ranks else mine
    return mine
