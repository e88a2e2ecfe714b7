"""The first meeting of the ranks, before any of them knows the layout."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.base.plain_text import print_line
from megatron.config.config_with_origin import ConfigWithOrigin, LoadedConfig
from megatron.engine.deterministic import choose_deterministic_kernels
from megatron.parallel.launcher import LaunchedWorld
from megatron.parallel.messages import gather_json
from megatron.parallel.rank_state import FLIGHT_RECORDER_ENTRIES
from megatron.parallel.ranks import Ranks
from megatron.parallel.rendezvous import build_control_group, choose_device, start_process_group
from megatron.rules.finding import refuse_errors
from megatron.rules.ranges import check_ranges


def join_ranks(loaded: LoadedConfig, world: LaunchedWorld) -> Ranks:
    """Start the process group if there are several ranks. Return the ranks, named by their hosts.

    Raises:
        ConfigError: A number of the configuration is out of its range.
        LayoutError: See `start_process_group`.
    """
    if loaded.config.kernels.deterministic_mode:
        choose_deterministic_kernels()
    # The device is set before the process group starts. NCCL would otherwise use device 0 on every
    # rank of the host.
    device = choose_device(world.local_rank)
    host = os.uname().nodename
    if world.size == 1:
        return Ranks(names=(f"rank 0 on {host}",))
    return _meet(loaded, world, device, host)


def _meet(loaded: LoadedConfig, world: LaunchedWorld, device: torch.device, host: str) -> Ranks:
    # The time limit is used below. Rank 0 checks everything else together, once the ranks have met.
    refuse_errors(check_ranges(ConfigWithOrigin(loaded.config, loaded.origin)))
    parallel = loaded.config.parallel
    minutes = parallel.distributed_timeout_minutes
    if parallel.hang_timeout is not None:
        # torch reads it when the first group starts.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_RECORDER_ENTRIES))
    hang_timeout = parallel.hang_timeout
    start_process_group(parallel.distributed_backend, minutes, device, hang_timeout=hang_timeout)
    rank = dist.get_rank()
    if (
        parallel.distributed_backend is None
        and device.type == "cuda"
        and dist.get_backend() == "gloo"
    ):
        make_printer(rank)(
            "warning: some host has more ranks than GPUs. NCCL cannot connect ranks that share a "
            "GPU, so the slower gloo is used. For speed, start one rank for each GPU"
        )
    control = build_control_group(minutes, hang_timeout)
    names = gather_json(f"rank {rank} on {host}", control)
    return Ranks(rank, world.size, control, tuple(names))


def make_printer(rank: int) -> Callable[[str], None]:
    """Return a function that prints on rank 0. It is used before the reporter exists."""
    if rank == 0:
        return print_line
    return lambda line: None
