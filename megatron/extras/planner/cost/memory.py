"""The memory of each pipeline rank, by kind.

The parts of a model and of its activations are those of `megatron.model.flops`, with its sources.
This module adds what the layout, the schedule and the software decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from megatron.base.errors import ConfigError
from megatron.config.parallel import ParallelConfig
from megatron.extras.planner.cost import memory_estimates
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.layout import RankLayout, Software
from megatron.extras.planner.cost.peak import find_peak
from megatron.model import flops
from megatron.model.partition import (
    Stage,
    count_layers_per_rank,
    partition,
    select_stages_of_rank,
)
from megatron.model.shape import ModelShape
from megatron.schedule.pipeline_schedule import PipelineSchedule, choose_schedule

_PREFETCHED = 2
"""Layers whose gathered weights exist at the same time with ZeRO stage 3: one computes, and one is
gathered ahead."""


BALANCED_ENDS = "type:transformer|embedding"
"""Value of --pp-partition-method that counts embedding and output layer as layers."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank at the peak of a step."""

    weights: float
    master_weights: float
    optimizer_states: float
    gradients: float
    activations: float
    """What the microbatches in flight keep for their backward passes."""
    working: float
    """Activations of one layer while it is computed again. For this trainer, what the loss or the
    backward pass of a layer needs: activations and gradients."""
    logits: float
    """Logits of other trainers. Those of this one are part of `working`."""
    buffers: float
    """Gathered weights and gradients, and messages between stages."""
    fixed: float
    """Context of the device, communicators, and what the allocator reserves but does not use."""

    @property
    def tensors(self) -> float:
        """Sum of all kinds apart from `fixed`."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "fixed")

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return self.tensors + self.fixed


class Verdict(StrEnum):
    """Whether a layout fits in the memory of a device."""

    FITS = "fits"
    """The layout needs at most the usable share of the memory."""
    MAY_FIT = "may fit"
    """The layout needs more than that, and at most the memory. It is outside of the margin."""
    DOES_NOT_FIT = "does not fit"


def judge_peak(peak_bytes: float, hardware: Hardware) -> Verdict:
    """Return whether a peak of this many bytes fits in the memory of a device."""
    if peak_bytes <= hardware.usable_bytes:
        return Verdict.FITS
    if peak_bytes <= hardware.memory_bytes:
        return Verdict.MAY_FIT
    return Verdict.DOES_NOT_FIT


def build_stages(shape: ModelShape, layout: RankLayout) -> tuple[Stage, ...]:
    """Return the stages of a layout, in the order of the layers.

    Raises:
        ConfigError: The layers cannot be divided so.
    """
    # Without virtual stages the trainer decides by the method alone.
    per_virtual = None
    layers = shape.config.num_layers
    if layout.virtual > 1 and layout.partition == BALANCED_ENDS:
        return _build_balanced_stages(layers, layout.pipeline * layout.virtual)
    if layout.virtual > 1:
        per_virtual = shape.config.num_layers // (layout.pipeline * layout.virtual)
    return partition(
        shape,
        ParallelConfig(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            num_layers_per_virtual_pipeline_stage=per_virtual,
            pp_partition_method=layout.partition,
        ),
    )


def _build_balanced_stages(layers: int, count: int) -> tuple[Stage, ...]:
    """Return virtual stages of equal size, where embedding and output layer count as layers."""
    if (layers + 2) % count:
        raise ConfigError(
            f"{layers} layers, the embedding and the output layer cannot be divided into {count} "
            "equal virtual stages; choose a number that divides their sum."
        )
    size = (layers + 2) // count
    ends = [0, *(number * size - 1 for number in range(1, count)), layers]
    return tuple(
        Stage(number, range(*ends[number : number + 2]), number == 0, number == count - 1)
        for number in range(count)
    )


def build_schedule(layout: RankLayout, batch_size: int) -> PipelineSchedule:
    """Return the pipeline schedule of a global batch of `batch_size` samples."""
    microbatches = max(1, batch_size // (layout.data * layout.micro_batch))
    return choose_schedule(microbatches, layout.pipeline, layout.virtual)


def estimate_layer_bytes(
    shape: ModelShape, layout: RankLayout, software: Software, *, working: bool = False
) -> int:
    """Return the bytes that a layer keeps for one microbatch.

    A `working` layer is one that is being recomputed completely, so it has the scores of its
    attention as well if there is no flash kernel.
    """
    kept = layout.recompute == "none" or working
    whole = memory_estimates.estimate_layer_activation_bytes(
        shape,
        layout.micro_batch,
        layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        half=software.half,
        scores_kept=kept and not software.flash,
    )
    if layout.recompute == "operators" and not working:
        whole = _count_operator_bytes(shape, layout)
    return whole // layout.context


def _count_operator_bytes(shape: ModelShape, layout: RankLayout) -> int:
    """Return the bytes of a layer that keeps its input, attention and every second product."""
    q = shape.config.num_attention_heads * shape.head_dim
    k = shape.query_groups * shape.head_dim
    # The kept products are those for query, value, gate and the MLP's output.
    sharded = 2 * (2 * q + k + shape.ffn_hidden_size) // layout.tensor
    # The inputs of both norms.
    whole = 2 * 2 * shape.config.hidden_size
    if layout.sequence_parallel:
        whole //= layout.tensor
    return shape.config.seq_length * layout.micro_batch * (sharded + whole)


def estimate_memory(
    shape: ModelShape,
    layout: RankLayout,
    software: Software,
    batch_size: int,
    *,
    stages: Sequence[Stage] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[RankMemory, ...]:
    """Return the memory of each pipeline rank.

    Args:
        shape: Sizes of the model.
        layout: The layout.
        software: The trainer.
        batch_size: Samples of the global batch.
        stages: `build_stages` of the layout, if the caller has them.
        ranks: The pipeline ranks. Default: all of them.
    """
    stages = stages or build_stages(shape, layout)
    schedule = build_schedule(layout, batch_size)
    layers = count_layers_per_rank(stages, layout.pipeline)
    parameters = flops.count_stage_parameters(shape, layout.tensor, layers)
    return tuple(
        _estimate_rank(
            shape,
            layout,
            software,
            parameters[rank],
            select_stages_of_rank(stages, rank, layout.pipeline),
            schedule,
            rank,
        )
        for rank in (range(layout.pipeline) if ranks is None else ranks)
    )


def _estimate_rank(
    shape: ModelShape,
    layout: RankLayout,
    software: Software,
    parameters: int,
    stages: Sequence[Stage],
    schedule: PipelineSchedule,
    rank: int,
) -> RankMemory:
    """Return the memory of pipeline rank `rank` with these parameters and stages."""
    held = memory_estimates.estimate_parameter_memory_per_rank(
        parameters,
        half=software.half,
        data_parallel_size=layout.data * layout.context,
        shard_size=layout.shard_size,
        zero_stage=layout.zero_stage,
        state_bytes=flops.count_state_bytes(
            software.optimizer,
            parameters,
            sum(len(stage.layers) for stage in stages)
            * flops.count_layer_matrix_parameters(shape, layout.tensor),
        ),
    )
    if software.counts_tensors:
        peak = find_peak(shape, layout, software, stages, schedule, rank)
        parts = (peak.weights, peak.gradients, peak.activations, peak.working, 0.0, peak.buffers)
    else:
        parts = _estimate_parts(shape, layout, software, held, parameters, stages, schedule, rank)
    weights, gradients, activations, working, logits, buffers = parts
    tensors = held.master_weights + held.optimizer_states + sum(parts)
    return RankMemory(
        weights,
        held.master_weights,
        held.optimizer_states,
        gradients,
        activations,
        working,
        logits,
        buffers,
        software.overhead.estimate_bytes(tensors),
    )


def _estimate_parts(
    shape: ModelShape,
    layout: RankLayout,
    software: Software,
    held: memory_estimates.ParameterMemory,
    parameters: int,
    stages: Sequence[Stage],
    schedule: PipelineSchedule,
    rank: int,
) -> tuple[float, float, float, float, float, float]:
    """Return weights, gradients, activations, a working layer, logits and buffers of a rank."""
    visits = schedule.count_in_flight(rank)
    activations, working = _estimate_activations(shape, layout, software, stages, visits)
    tokens = shape.config.seq_length * layout.micro_batch // layout.context
    if layout.sequence_parallel:
        working += software.held_gathers * 2 * tokens * shape.config.hidden_size
    # Only the last stage computes the loss.
    logits = 0.0
    if any(stage.last for stage in stages):
        logits = software.held_logit_bytes * tokens * shape.padded_vocab_size / layout.tensor
    buffers = _estimate_buffers(shape, layout, software, parameters, stages, visits)
    gradients = held.gradients * software.held_gradient_bytes / 4
    return held.working_weights, gradients, activations, working, logits, buffers


def _estimate_activations(
    shape: ModelShape,
    layout: RankLayout,
    software: Software,
    stages: Sequence[Stage],
    visits: int,
) -> tuple[float, float]:
    """Return the bytes of the microbatches in flight, and those of a layer being recomputed."""
    whole = estimate_layer_bytes(shape, layout, software)
    kept_input = memory_estimates.estimate_layer_input_bytes(
        shape,
        layout.micro_batch,
        layout.tensor,
        sequence_parallel=layout.sequence_parallel or layout.partition_inputs,
        half=software.half,
    )
    kept_input //= layout.context
    # Recomputed layers keep less, and which ones they are depends on the stage.
    of_visits = 0
    recomputes = False
    for stage in stages:
        again = flops.count_recomputed_layers(stage.layers, layout.layers_recomputed)
        of_visits += (len(stage.layers) - again) * whole + again * kept_input
        recomputes = recomputes or again > 0
    # The stages of a rank may differ, so the mean of its visits counts.
    activations = visits * of_visits / len(stages)
    if not recomputes:
        return activations, 0.0
    return activations, estimate_layer_bytes(shape, layout, software, working=True)


def _estimate_buffers(
    shape: ModelShape,
    layout: RankLayout,
    software: Software,
    parameters: int,
    stages: Sequence[Stage],
    visits: int,
) -> float:
    """Return the bytes of buffers for communication."""
    size = 0.0
    if layout.zero_stage == 3 and layout.shard_size > 1:
        of_layer = flops.count_layer_parameters(shape, layout.tensor)
        layers = sum(len(stage.layers) for stage in stages)
        outside = parameters - layers * of_layer
        # Their weights are gathered together, and gradients are reduced layer by layer.
        gathered = min(_PREFETCHED, layers) * of_layer + outside
        size += 2 * gathered + software.gradient_bytes * of_layer
    if layout.pipeline > 1:
        # A message is received in each direction while another is computed with.
        tokens = shape.config.seq_length * layout.micro_batch // layout.context
        # Hidden states in half precision.
        message = 2 * tokens * shape.config.hidden_size
        size += 4 * message
        if software.held_outputs:
            size += visits * message
    return size
