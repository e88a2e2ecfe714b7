"""Rules about the layout of the ranks, and about what each of them recomputes."""

import re
from collections.abc import Iterator
from fractions import Fraction

from megatron.base.plain_text import format_alternatives
from megatron.config.fields import ConfigWithOrigin
from megatron.config.optimizer import OPTIMIZERS
from megatron.config.parallel import STRATEGY_STAGES
from megatron.config.recompute import OPERATORS
from megatron.model.partition import GIVEN_SIZES
from megatron.model.shape import ModelShape
from megatron.plan.rules.finding import Finding, PlanContext, error, warning
from megatron.schedule.pipeline_schedule import PipelineSchedule, choose_schedule

_IDLE_WORTH_WARNING = 1 / 3
"""A pipeline idles for about this share with twice as many microbatches as stages."""

WORLD_SIZE = "world_size"
"""Key of the flag in `origin` that gives the number of processes. A run has a launcher instead."""


def check_sharding_strategy(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --sharding-strategy, --zero-stage and --hsdp-shard-size do not contradict."""
    parallel = settings.config.parallel
    strategy = parallel.sharding_strategy
    size = parallel.hsdp_shard_size
    if strategy is not None and parallel.zero_stage != STRATEGY_STAGES[strategy]:
        yield error(
            f"{settings.describe('parallel.sharding_strategy', 'parallel.zero_stage')} contradict: "
            f"{strategy} means --zero-stage {STRATEGY_STAGES[strategy]}. Give one of them; "
            "--zero-stage with --hsdp-shard-size shards less inside groups."
        )
    elif size is not None and strategy not in (None, "hsdp"):
        yield error(
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.sharding_strategy')} "
            "contradict: only hsdp has groups. Use --sharding-strategy hsdp, or leave out "
            "--hsdp-shard-size."
        )
    elif size is not None and parallel.zero_stage == 0:
        yield error(
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.zero_stage')} contradict: "
            "stage 0 shards nothing. Leave out --hsdp-shard-size, or use stage 1, 2 or 3."
        )


def check_one_partition_method(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that virtual stages are given without a method that divides the layers otherwise."""
    method = "parallel.pp_partition_method"
    virtual = "parallel.num_layers_per_virtual_pipeline_stage"
    # Virtual stages have equal numbers of layers. The other methods only say what is a layer.
    divides = (settings[method] or "").lower().startswith(("parameters", GIVEN_SIZES))
    if settings[virtual] is not None and divides:
        yield error(
            f"{settings.describe(method, virtual)} both divide the layers into stages; give one "
            "of them."
        )


def check_recompute_fraction(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --checkpoint-fraction is a fraction above 0 and at most 1."""
    try:
        fraction = Fraction(settings.config.recompute.checkpoint_fraction)
    except (ValueError, ZeroDivisionError):
        # A text that is not a fraction counts as 0. 0 is out of range, so the message is the same.
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        yield error(
            f"{settings.describe('recompute.checkpoint_fraction')} must be a fraction above 0 and "
            "at most 1: 1 for all layers, 1/3 for every third one, 0.5 for every other one."
        )


def check_kept_operators(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --checkpoint-keep-operators names operators, and that they can be kept."""
    kept = settings.config.recompute.checkpoint_keep_operators
    if not kept:
        return
    asked = settings.describe("recompute.checkpoint_keep_operators")
    if not set(kept) <= set(OPERATORS):
        yield error(f"{asked}: an operator must be one of {', '.join(OPERATORS)}.")
    if not settings.config.recompute.checkpoint_activations:
        yield error(
            f"{asked} needs --checkpoint-activations, which recomputes the other operators."
        )
    for dotted in ("recompute.recompute_attention_core", "kernels.use_torch_compile"):
        if settings[dotted]:
            yield error(
                f"{asked} is not possible with {settings.describe(dotted)}, which hides the "
                "operators; give one of them."
            )


def check_grid(context: PlanContext) -> Iterator[Finding]:
    """Check that tensor x pipeline x context size divides the number of processes."""
    parallel = context.config.parallel
    world_size = context.plan.world_size
    if parallel.divides(world_size):
        return
    asked = (
        f"{context.describe('parallel.tensor_model_parallel_size')} "
        f"x {context.describe('parallel.pipeline_model_parallel_size')}"
    )
    if parallel.context_parallel_size > 1:
        asked += f" x {context.describe('parallel.context_parallel_size')}"
    replica = parallel.replica_size
    # The next smaller and the next larger number of processes that fit.
    fits = [n * replica for n in (world_size // replica, world_size // replica + 1) if n > 0]
    fix = f"start {format_alternatives(fits)} processes"
    if (flag := context.origin.get(WORLD_SIZE)) is not None:
        fix = f"use {flag} {format_alternatives(fits)}, or other sizes"
    elif world_size == 1:
        # It was probably started without a launcher.
        fix += f" with torchrun --nproc-per-node {replica}"
    yield error(f"{asked} = {replica} must divide the number of processes, {world_size}; {fix}.")


def check_tensor_parallel(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that tensor-parallel ranks get equal parts.

    Each rank must get complete heads, complete query groups or a part of the heads of one group,
    and equal parts of the MLP and of a sharded sequence.
    """
    model = settings.config.model
    tensor = settings.config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads
    # The numbers below do not depend on the vocabulary.
    shape = ModelShape(model, 0, 0)
    groups = shape.query_groups
    ffn = shape.ffn_hidden_size
    possible = [
        n
        for n in range(1, heads + 1)
        if heads % n == ffn % n == 0 and (groups % n == 0 or n % groups == 0)
    ]
    width = settings.describe("model.ffn_hidden_size")
    if model.ffn_hidden_size is None:
        width = f"--ffn-hidden-size {ffn} (by default)"
    for asked, number in ((settings.describe("model.num_attention_heads"), heads), (width, ffn)):
        if number % tensor:
            yield error(
                f"{settings.describe('parallel.tensor_model_parallel_size')} must divide {asked}; "
                f"use {format_alternatives(possible)}."
            )
    # Without grouped queries the groups are the heads. One message about them is enough.
    if groups % tensor and tensor % groups and model.num_query_groups is not None:
        yield error(
            f"{settings.describe('parallel.tensor_model_parallel_size')} must divide "
            f"{settings.describe('model.num_query_groups')} or be a multiple of it; "
            f"use {format_alternatives(possible)}."
        )
    if groups < tensor and model.qk_norm == "full":
        yield error(
            f"{settings.describe('model.qk_norm')} needs a query group for each tensor-parallel "
            f"rank, but there are {groups} groups and {tensor} ranks; use a smaller "
            "--tensor-model-parallel-size."
        )
    if settings.config.recompute.partition_activations and tensor == 1:
        yield warning("--partition-activations has no effect at --tensor-model-parallel-size 1.")
    if not settings.config.parallel.sequence_parallel:
        return
    if tensor == 1:
        yield warning("--sequence-parallel has no effect at --tensor-model-parallel-size 1.")
    elif model.seq_length % tensor:
        yield error(
            f"{settings.describe('parallel.tensor_model_parallel_size')} must divide "
            f"{settings.describe('model.seq_length')}, which --sequence-parallel shards over "
            f"the tensor-parallel ranks; use a multiple of {tensor}, or no --sequence-parallel."
        )


def check_context_parallel(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that context-parallel ranks get equal parts, which the kernels can compute."""
    parallel = settings.config.parallel
    model = settings.config.model
    ranks = parallel.context_parallel_size
    asked = settings.describe("parallel.context_parallel_size")
    if ranks == 1:
        return
    # Padding would change how many tokens count, so other lengths are refused.
    unit = parallel.length_unit
    if model.seq_length % unit:
        yield error(
            f"{asked} cuts the sequence into {2 * ranks} equal parts"
            f"{' of whole tensor-parallel parts' if parallel.sequence_parallel else ''}, but "
            f"{settings.describe('model.seq_length')} is no multiple of {unit}; use "
            f"{max(1, model.seq_length // unit) * unit}, or another size."
        )
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    # Each rank computes complete heads.
    if parallel.exchanges_heads and heads % ranks:
        yield error(
            f"{settings.describe('parallel.cp_comm_type')} gives each rank an equal share of the "
            f"{heads} heads of a tensor-parallel rank, but {asked} does not divide them; use "
            "--cp-comm-type allgather, which needs no number of heads."
        )
    # The kernel takes as many queries as keys.
    if settings.config.kernels.use_varlen_attention:
        yield error(
            f"{asked} computes each document by a call of its own; leave out "
            "--use-varlen-attention."
        )


def check_muon(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that tensor-parallel ranks do not share a query group with Muon.

    The owner of a matrix puts it together from the rows of all ranks.
    """
    groups = ModelShape(settings.config.model, 0, 0).query_groups
    tensor = settings.config.parallel.tensor_model_parallel_size
    row = OPTIMIZERS.require(settings.config.optimizer.optimizer)
    if row.layer_matrices_only and groups < tensor:
        yield error(
            f"{settings.describe('optimizer.optimizer')} needs a query group for each "
            f"tensor-parallel rank, but there are {groups} groups and {tensor} ranks; "
            "use a smaller --tensor-model-parallel-size, or --optimizer adam."
        )


def warn_about_pipeline(context: PlanContext) -> Iterator[Finding]:
    """Warn about pipelines that are slow.

    Stages may be uneven, and microbatches too few to fill the pipeline. Their number may not suit
    interleaving. ZeRO stages 2 and 3 communicate for every microbatch.
    """
    parallel = context.config.parallel
    stages = context.plan.stages
    data_parallel_size = context.plan.data_parallel_size
    ranks = parallel.pipeline_model_parallel_size
    if ranks == 1 or len(stages) == 1:
        return
    layers = [len(stage.layers) for stage in stages]
    # With these methods, stages are uneven on purpose.
    on_purpose = re.search(f"(?i)embedding|{GIVEN_SIZES}", parallel.pp_partition_method or "")
    if len(set(layers)) > 1 and not on_purpose:
        yield warning(
            f"{context.describe('model.num_layers')} "
            f"over {context.describe('parallel.pipeline_model_parallel_size')} stages is uneven "
            f"({' '.join(map(str, layers))}): the largest stage determines the speed."
        )
    if parallel.num_layers_per_virtual_pipeline_stage is not None and len(stages) == ranks:
        yield warning(
            f"{context.describe('parallel.num_layers_per_virtual_pipeline_stage')} has no effect: "
            "a rank has no more layers."
        )
    share = context.config.batch.micro_batch_size * data_parallel_size
    sizes = [
        size
        for size in context.plan.batch_size.iterate_upcoming(0, 0, context.config.model.seq_length)
        if size % share == 0
    ]
    yield from _warn_about_schedules(
        context,
        [(size, choose_schedule(size // share, ranks, len(stages) // ranks)) for size in sizes],
    )
    # ZeRO stage 1 communicates once a step. Higher stages do so for every microbatch, and there are
    # many in a pipeline.
    if data_parallel_size > 1 and sizes and parallel.zero_stage >= 2:
        what = "reduces the gradients"
        if parallel.zero_stage == 3:
            what = "gathers the parameters again"
        yield warning(
            f"{context.describe('parallel.zero_stage')} "
            f"with {context.describe('parallel.pipeline_model_parallel_size')} {what} for every "
            f"microbatch, {sizes[-1] // share} times a step at batch size {sizes[-1]}; "
            "--zero-stage 1 communicates once."
        )


def _warn_about_schedules(
    context: PlanContext, by_size: list[tuple[int, PipelineSchedule]]
) -> Iterator[Finding]:
    """Warn about schedules that idle for long or need much memory.

    Args:
        context: The context of the rule.
        by_size: The batch sizes in samples of the run, in order, each with its schedule.
    """
    # Batch sizes usually grow, so the first size that idles is usually the worst one.
    idle = [(size, schedule) for size, schedule in by_size if schedule.bubble > _IDLE_WORTH_WARNING]
    if idle:
        (first, schedule), (final, last) = idle[0], by_size[-1]
        later = ""
        if final != first:
            later = f", and for {100 * last.bubble:.0f} % at batch size {final}"
        advice = ""
        if last.bubble > _IDLE_WORTH_WARNING:
            advice = "; larger batches, smaller micro-batches or fewer stages shorten that"
        yield warning(f"{schedule.describe(first)}{later}{advice}.")
    # Looped BFS is chosen where interleaved 1F1B is impossible. Its memory may exceed the device's.
    broken = [(size, schedule) for size, schedule in by_size if schedule.name == "looped BFS"]
    if broken:
        size, schedule = broken[0]
        ranks = schedule.ranks
        rounds = schedule.microbatches // schedule.ranks
        yield warning(
            f"{context.describe('parallel.num_layers_per_virtual_pipeline_stage')}: "
            f"the {schedule.microbatches} microbatches of batch size {size} do not divide "
            f"into {rounds} equal rounds over {ranks} ranks, as interleaved 1F1B requires: looped "
            "BFS is used, and keeps the activations of all; choose batch sizes with a multiple "
            f"of {ranks} microbatches to avoid that."
        )
