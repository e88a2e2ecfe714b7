"""The first meeting of the ranks, before any of them knows the layout."""

import os

import torch.distributed as dist

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.engine.deterministic import choose_deterministic_kernels
from megatron.parallel.messages import gather_json
from megatron.parallel.rank_state import FLIGHT_RECORDER_ENTRIES
from megatron.parallel.ranks import Ranks
from megatron.parallel.rendezvous import build_control_group, choose_device, start_process_group
from megatron.rules.finding import refuse_errors
from megatron.rules.ranges import check_ranges
from megatron.run.start.launch import Launch


def join_ranks(launch: Launch) -> Ranks:
    """Start the process group if there are several ranks. Return the ranks, named by their hosts.

    Raises:
        ConfigError: A number of the configuration is out of its range.
        LayoutError: See `start_process_group`.
    """
    if launch.config.kernels.deterministic_mode:
        choose_deterministic_kernels()
    # The device is set before the process group starts. NCCL would otherwise use device 0 on every
    # rank of the host.
    device = choose_device(launch.world.local_rank)
    host = os.uname().nodename
    if launch.world.size == 1:
        return Ranks(names=(f"rank 0 on {host}",))
    # The time limit is used below. Rank 0 checks everything else together, once the ranks have met.
    refuse_errors(check_ranges(ConfigWithOrigin(launch.config, launch.loaded.origin)))
    parallel = launch.config.parallel
    minutes = parallel.distributed_timeout_minutes
    hang_timeout = parallel.hang_timeout
    if hang_timeout is not None:
        # torch reads it when the first group starts.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_RECORDER_ENTRIES))
    start_process_group(parallel.distributed_backend, minutes, device, hang_timeout=hang_timeout)
    rank = dist.get_rank()
    control = build_control_group(minutes, hang_timeout)
    names = gather_json(f"rank {rank} on {host}", control)
    ranks = Ranks(rank, launch.world.size, control, tuple(names))
    chosen = parallel.distributed_backend
    if chosen is None and device.type == "cuda" and dist.get_backend() == "gloo":
        ranks.log(
            "warning: some host has more ranks than GPUs. NCCL cannot connect ranks that share a "
            "GPU, so the slower gloo is used. For speed, start one rank for each GPU"
        )
    return ranks
