"""What a rank was started with, and what it does alone before it meets the other ranks.

A `Launch` is the first of the three values of a start. It becomes a `Job` once the ranks have met,
and a `Run` once everything is built.

Importing torch takes seconds. Where possible, `check_before_torch` therefore refuses a wrong
command line before that. `import_training` then imports what the rank trains with.
"""

import atexit
import contextlib
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron.base.errors import ConfigError, MegatronError, combine_errors
from megatron.base.host_limits import read_total_memory
from megatron.base.plain_text import format_bytes, is_url
from megatron.config.fields import ConfigWithOrigin, LoadedConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.tree import Config
from megatron.engine.kind import NATIVE, refuse_unsupported
from megatron.model import flops
from megatron.parallel.launcher import LaunchedWorld, read_launcher_world, read_ranks_per_node
from megatron.plan.resolve import resolve
from megatron.plan.rules.data import check_tokenizer_files
from megatron.plan.rules.finding import apply_rules, list_errors, refuse_errors
from megatron.plan.rules.lists import CONFIG_RULES, NEEDED_BY_RUNS
from megatron.plan.run_plan import Plan
from megatron.run.parts import NO_PARTS, Parts
from megatron.tokenizer.vocabulary import fetch_missing_tokenizer


@dataclass(frozen=True)
class Launch:
    """The configuration as this rank loaded it, the world around it, and the parts of the run."""

    loaded: LoadedConfig
    world: LaunchedWorld
    parts: Parts = NO_PARTS
    early: Plan | None = None
    """The plan of a run from scratch, if `check_before_torch` has resolved it on this rank."""

    @property
    def config(self) -> Config:
        """The configuration of this rank. That of rank 0 is the run's."""
        return self.loaded.config


def read_launch(loaded: LoadedConfig, parts: Parts = NO_PARTS) -> Launch:
    """Return the launch of this rank, with the world that its launcher has started.

    Args:
        loaded: The configuration as this rank loaded it.
        parts: The parts of the run besides the core.

    Raises:
        LayoutError: See `read_launcher_world`.
    """
    return Launch(loaded, read_launcher_world(loaded.config.parallel.local_rank), parts)


_UNKNOWN_VOCABULARY = 1
"""A vocabulary size that breaks no rule, for a plan that is only checked."""


def check_before_torch(launch: Launch) -> Launch:
    """Refuse a configuration with errors that no checkpoint could correct.

    Each rank calls this without communication. In `resolve_job`, rank 0 checks what depends on the
    checkpoint.

    Returns:
        The launch, on rank 0 with the plan of a run from scratch. The plan is left out if it may
        depend on a checkpoint, or on a download.

    Raises:
        ConfigError: See `Parts.find_missing` and `check_plan`, or the tokenizer cannot be
            downloaded.
    """
    config = launch.config
    refuse_errors(launch.parts.find_missing(config))
    # The checkpoint's curriculum may replace the one that is wrong here.
    if config.optimizer.use_checkpoint_lr_scheduler:
        return launch
    load = config.checkpoint.load
    # `os.path.exists` raises no error for a folder that cannot be read. Rank 0 reports that later.
    if load is not None and (is_url(load) or os.path.exists(load)):
        # The position in the data is unknown, so only rules that do not depend on it apply.
        refuse_errors(apply_rules(CONFIG_RULES, ConfigWithOrigin(config, launch.loaded.origin)))
        return launch
    if launch.world.size == 1:
        fetch_missing_tokenizer(config.tokenizer, needs_text=config.data.needs_documents)
        return replace(launch, early=_resolve_from_scratch(launch, read_files=True))
    # Many ranks must not read the tokenizer's files at the same time. Rank 0 reads them alone.
    if launch.world.rank == 0:
        # The other ranks do not find what is wrong with a file, and would wait for this one. So
        # `resolve_job` finds it again, after the ranks have met.
        with contextlib.suppress(MegatronError, OSError):
            return replace(launch, early=_resolve_from_scratch(launch, read_files=True))
    _resolve_from_scratch(launch, read_files=False)
    return launch


def _resolve_from_scratch(launch: Launch, *, read_files: bool) -> Plan:
    """Return the plan of a run from scratch.

    Args:
        launch: What this rank was started with.
        read_files: Read the tokenizer and the data phases. Otherwise the plan has a placeholder for
            the size of the vocabulary, and nothing can use it.

    Raises:
        ConfigError: See `check_plan`.
    """
    plan = resolve(
        launch.config,
        launch.world.size,
        launch.loaded.origin,
        vocab_size=None if read_files else _UNKNOWN_VOCABULARY,
        ranks_per_node=read_ranks_per_node(launch.world.size),
    )
    check_plan(plan, launch.parts, read_files=read_files)
    return plan


def check_plan(plan: Plan, parts: Parts = NO_PARTS, *, read_files: bool = True) -> None:
    """Refuse a plan that cannot be trained.

    Args:
        plan: The plan of the run.
        parts: The parts of the run besides the core.
        read_files: Also look for the files of the tokenizer.

    Raises:
        ConfigError: The configuration is wrong, a file of the tokenizer does not exist, the engine
            cannot run the plan, the package of a tracker is missing, or a setting is missing that
            only training needs. The message lists all such errors of one kind.
    """
    settings = ConfigWithOrigin(plan.config, {})
    errors = list(plan.errors)
    if read_files:
        errors += list_errors(check_tokenizer_files(plan.config.tokenizer))
    if errors:
        # A type without its path also leaves the size of the vocabulary unknown.
        raise combine_errors(tuple(dict.fromkeys(errors)))
    refuse_unsupported(plan, parts.engine or NATIVE)
    refuse_errors(apply_rules((parts.check_flags, *NEEDED_BY_RUNS), settings))


_MASTER_BYTES = 4
"""Bytes of a parameter in fp32."""


def require_host_memory(plan: Plan, ranks_on_host: int) -> None:
    """Check that the fp32 weights and the optimizer's states can fit into this host's memory.

    Linux lets processes allocate more memory than the host has, and kills them without a message
    when they use it. Gradients and activations need memory too, so a run that passes this check may
    still be too large.

    Args:
        plan: The plan of the run.
        ranks_on_host: Number of ranks on this host.

    Raises:
        ConfigError: They cannot fit, even if each of them exists once.
    """
    if plan.config.parallel.deepspeed or plan.config.batch.eval_only:
        # DeepSpeed may keep states on a disk, or in 8 bits. An evaluation needs none.
        return
    share = ranks_on_host / plan.world_size
    needed = share * _count_state_bytes(plan)
    memory = read_total_memory()
    if memory is None or needed <= memory:
        return
    raise ConfigError(
        f"the model does not fit into the memory of this host: the fp32 weights and the states of "
        f"{plan.config.optimizer.optimizer} of {share:.0%} of its {plan.parameters:,} parameters "
        f"need {format_bytes(needed)}, and the host has {format_bytes(memory)}, swap included; "
        f"make it smaller, or divide it over more hosts (tools/plan.py shows what each rank needs)."
    )


def count_checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of the tensors of a checkpoint, over all of its files.

    A checkpoint has the fp32 weights and no half-precision copy of them. It has the optimizer's
    states, unless --no-save-optim is given. Rows that pad the vocabulary are not saved. They count
    here, because they are few.
    """
    if plan.config.checkpoint.save_optim:
        return _count_state_bytes(plan)
    return _MASTER_BYTES * plan.parameters


def _count_state_bytes(plan: Plan) -> int:
    """Return the bytes of the fp32 weights and of the optimizer's states, each of them once."""
    matrices = flops.count_matrix_parameters(plan.shape)
    states = flops.count_state_bytes(plan.config.optimizer, plan.parameters, matrices)
    return _MASTER_BYTES * plan.parameters + states


def import_training(parallel: ParallelConfig, world_size: int) -> None:
    """Import what a rank of a layout trains with, except the parts that are not the core.

    Args:
        parallel: The configuration of the layout.
        world_size: Number of processes.
    """
    model_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    with hide_from_collector():
        import megatron.run.pretrain

        # DeepSpeed has a pipeline and shards of its own.
        if parallel.deepspeed:
            return
        import megatron.engine.native

        if parallel.pipeline_model_parallel_size > 1:
            import megatron.engine.pipeline_runner
        if world_size > model_size:
            # FSDP2 imports the compiler when it shards the first module.
            import torch._dynamo  # noqa: F401

            import megatron.engine.sharding  # noqa: F401


@contextmanager
def hide_from_collector() -> Iterator[None]:
    """Exclude the objects that a `with` block creates from all garbage collections.

    The modules of torch have half a million objects that live until the end of the process. While
    they are created, Python would search them for reference cycles again and again. This takes a
    fifth of the CPU time of a start. Each full collection during training would search them too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # At its exit, Triton counts objects that were not collected, and prints them as leaks.
        atexit.register(gc.unfreeze)
