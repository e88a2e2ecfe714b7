"""The first meeting of the ranks, before any of them knows the layout.

Rank 0's configuration is the run's. A rank whose own command line, YAML file, settings of the
engine, code version or source files differ is named before anything is read for the run.
"""

import contextlib
import json
import os
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.utils.deterministic

from megatron.base.code_version import compute_file_digests, get_code_version
from megatron.base.errors import ConfigError, LayoutError
from megatron.checkpoint.digest import digest_of_text
from megatron.config.compare import compute_config_digest, list_config_differences, load_yaml
from megatron.config.fields import ConfigWithOrigin
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml
from megatron.engine.kind import NATIVE, EngineKind
from megatron.parallel.messages import gather_json
from megatron.parallel.rank_progress import FLIGHT_RECORDER_ENTRIES
from megatron.parallel.ranks import Ranks, build_roll_call
from megatron.parallel.rendezvous import build_control_group, choose_device, start_process_group
from megatron.parallel.roll_call import RollCall
from megatron.plan.rules.finding import refuse_errors
from megatron.plan.rules.numbers import check_ranges
from megatron.run.start.job import select_checkpoint_config
from megatron.run.start.launch import Launch


def choose_deterministic_kernels() -> None:
    """Let torch, cuBLAS and NCCL compute the same bits each time, in this process.

    Some CUDA kernels add up numbers with atomic operations, in an order that changes from call to
    call. The backward passes of flash and memory-efficient attention are the most important ones.
    torch has slower kernels for most of them.

    Call it before the first GPU kernel and before the process group starts.
    """
    # cuBLAS reads it when it starts. Without a workspace of its own, each stream may get another
    # size, and with it another kernel.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # NCCL chooses an algorithm by measured times, and reductions within the switches (NVLS) add up
    # in any order. The ring has a fixed one.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    # An operator without a deterministic kernel raises an error.
    torch.use_deterministic_algorithms(True)
    # torch would fill each new tensor, also those that are overwritten next.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


_NAMED_FILES = 5


def name_lost_ranks(
    launch: Launch, ranks: Ranks
) -> contextlib.AbstractContextManager[RollCall | None]:
    """Return a context in which a rank that is lost is named, or that hangs with --hang-timeout.

    Without it, the others would only report that a collective has failed. See `build_roll_call`.
    """
    parallel = launch.config.parallel
    # A single process has nobody to compare itself with, so it needs a number.
    if ranks.group is None and parallel.hang_seconds is None:
        return contextlib.nullcontext()
    saving = select_checkpoint_config(launch.config).save_folder
    return build_roll_call(
        ranks,
        parallel.distributed_timeout_minutes,
        hang_timeout=parallel.hang_seconds,
        load_watchdog=lambda: launch.parts.load_watchdog(saving) if parallel.is_watched else None,
    )


def check_agreement(launch: Launch, ranks: Ranks) -> None:
    """Compare configuration, code and settings of the engine between ranks.

    All ranks call it together.

    Args:
        launch: What this rank was started with.
        ranks: All ranks of the run.

    Raises:
        LayoutError: A rank differs from rank 0. The error is raised on every rank. It names the
            first such rank, its host, and what differs.
    """
    if ranks.size == 1:
        return
    config = launch.config
    kind = launch.parts.engine or NATIVE
    # A digest is enough to find a difference. Gathering every rank's YAML file here would send
    # megabytes over the control group in a large job.
    # The version is the commit. A file of a checkout may have been edited since.
    code = compute_file_digests()
    own_settings = kind.describe_settings(config)
    summary = [
        compute_config_digest(config),
        get_code_version(),
        digest_of_text(json.dumps(code)),
        None if own_settings is None else own_settings.content,
    ]
    everyone = ranks.gather(summary)
    if any(other != everyone[0] for other in everyone):
        _refuse_difference(config, ranks, kind, code, everyone)


def _refuse_difference(
    config: Config,
    ranks: Ranks,
    kind: EngineKind,
    code: dict[str, str],
    everyone: list[list[str | None]],
) -> NoReturn:
    """Raise the error of `check_agreement`. All ranks call it together.

    Args:
        config: The configuration as this rank loaded it.
        ranks: All ranks of the run.
        kind: The kind of the engine.
        code: The digest of each file of this rank's package.
        everyone: The summary of each rank.
    """
    # Every rank holds the same list of digests, so every rank reaches this second gather or none.
    rank = next(r for r, other in enumerate(everyone) if other != everyone[0])
    own: tuple[str, dict[str, str]] | None = None
    if ranks.rank in (0, rank):
        own = (dump_yaml(config), code)
    gathered = ranks.gather(own)
    first_text, first_code = gathered[0]
    other_text, other_code = gathered[rank]
    differing = _differences(first_text, other_text)
    # The digest is explained by the differences in the YAML files. The others are not part of the
    # configuration, so each needs its own line.
    _, version, _, settings = everyone[rank]
    _, first_version, _, first_settings = everyone[0]
    if version != first_version:
        differing.append(f"its version is {version}, and rank 0's is {first_version}")
    names = sorted(
        name
        for name in {**first_code, **other_code}
        if first_code.get(name) != other_code.get(name)
    )
    if names:
        more = f" and {len(names) - _NAMED_FILES} more" if len(names) > _NAMED_FILES else ""
        differing.append(
            f"these files of its package differ: {', '.join(names[:_NAMED_FILES])}{more}"
        )
    # If a rank has no file, its configuration differs, which explains the difference already.
    own_settings = kind.describe_settings(config)
    if own_settings is not None and settings != first_settings:
        differing.append(
            f"its {own_settings.path} passes {settings} to {kind.name}, and "
            f"rank 0's passes {first_settings}"
        )
    raise LayoutError(
        f"{ranks.names[rank]} differs from rank 0:\n  "
        + "\n  ".join(differing)
        + "\nstart every rank with the same command line and files"
    )


def _differences(rank_0: str, other: str) -> list[str]:
    """Return the fields in which two YAML files written by `dump_yaml` differ.

    The other rank may run another version of the code. Its file may then have fields that this
    rank cannot read.
    """
    try:
        return list_config_differences(load_yaml(rank_0), load_yaml(other))
    except ConfigError as error:
        return [f"this rank cannot read a configuration of another version: {error}"]


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
    hang_timeout = parallel.hang_seconds
    if parallel.is_watched:
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
