"""Builds the engine of a run, and fills it from the checkpoint."""

from collections.abc import Callable

from megatron.base.byte_size import format_bytes
from megatron.base.errors import CheckpointError, ConfigError, DamagedError
from megatron.checkpoint.finite import describe_not_finite, refuse_not_finite
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.start import agree_on_damage
from megatron.config.tree import Config
from megatron.engine.base import Engine
from megatron.engine.kind import BuildEngine, EngineKind
from megatron.observe.timers import Timers
from megatron.parallel.launcher import read_ranks_per_node
from megatron.parallel.mesh import Mesh
from megatron.parallel.ranks import Ranks
from megatron.plan.run_plan import Plan
from megatron.run.host_memory import require_host_memory

_BYTES_OF_PARAMETER = 4
"""Size of an fp32 number."""


def build_engine(
    plan: Plan,
    mesh: Mesh,
    timers: Timers,
    before_update: Callable[[], None],
    kind: EngineKind,
) -> Engine:
    """Build an engine.

    Args:
        plan: The plan of the run.
        mesh: The ranks of the run.
        timers: They time the phases of a step.
        before_update: Called before weights or moments change.
        kind: The kind of the engine.

    Raises:
        ConfigError: A package that the engine needs is not installed. Or the memory of a host
            without GPUs is too small.
    """
    if mesh.device.type == "cpu":
        # Some launchers do not tell how many ranks a host has. There is at least this one.
        require_host_memory(plan, read_ranks_per_node(plan.world_size, unknown=1))

    def load() -> BuildEngine:
        return kind.load(mesh.device.type)

    # The import takes seconds, and minutes if many ranks read from a slow file system. `work` keeps
    # the ranks that are done from running into the time limit of a collective.
    make = mesh.ranks.work(load, "importing the engine", mesh.ranks.log)
    try:
        return make(plan, mesh, timers, before_update)
    except RuntimeError as error:
        # torch has no class of its own for this error on a CPU.
        if "can't allocate memory" not in str(error):
            raise
        size = format_bytes(plan.parameters * _BYTES_OF_PARAMETER)
        raise ConfigError(
            f"the model does not fit into the memory of this host: its {plan.parameters:,} "
            f"parameters alone need {size}; make it smaller, or divide it over more processes "
            f"(tools/plan.py shows what each needs): {error}"
        ) from error


def load_engine(
    engine: Engine, checkpoint: Checkpoint, config: Config, ranks: Ranks, log: Callable[[str], None]
) -> str | None:
    """Load a checkpoint of any layout into the engine, on all ranks together.

    Returns:
        A description of the damage, the same on all ranks, or None if the checkpoint is valid.

    Raises:
        CheckpointError: The checkpoint does not fit, or has no optimizer state although it is
            needed.
    """
    with_optimizer = config.checkpoint.load_optim and not config.checkpoint.finetune
    if with_optimizer and checkpoint.optimizer is None:
        raise CheckpointError(
            f"{checkpoint.folder} was saved without the optimizer's state; give --no-load-optim to "
            "continue with moments of zero, or --finetune to start a new run with these weights"
        )
    shards = engine.shards(optimizer=with_optimizer)

    def read() -> DamagedError | None:
        try:
            checkpoint.load_into(shards, config.model, finetune=config.checkpoint.finetune)
        except DamagedError as damage:
            return damage
        return None

    # Ranks must agree on the damage before any of them goes on. A rank that read its part without
    # an error would otherwise train on weights that the others do not have.
    damage = ranks.work(read, f"loading {checkpoint.folder}", log)
    damaged = agree_on_damage(checkpoint, damage, ranks)
    if damaged is None:
        # Checked after the digests, because a damaged file may hold any number. Weights that are
        # not finite in a valid file cannot be trained further.
        refuse_not_finite(checkpoint, describe_not_finite(shards), ranks)
        engine.finish_load(checkpoint.optimizer if with_optimizer else None)
    return damaged
