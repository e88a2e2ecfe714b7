"""The memory of each pipeline rank, by kind.

Sources of the bytes of parameters: the notes of BigScience's 104B run, and for the stages of ZeRO
https://arxiv.org/abs/1910.02054. `cost.peak` counts the other tensors.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from megatron.base.errors import ConfigError
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.extras.planner.cost.hardware import Hardware
from megatron.extras.planner.cost.layout import RankLayout, StepJob
from megatron.extras.planner.cost.parameters import (
    count_dense_matrices,
    count_linear_layers,
    count_mixtures,
    sum_stages,
)
from megatron.extras.planner.cost.peak import find_peak
from megatron.model import flops
from megatron.model.partition import (
    Stage,
    count_layers_per_rank,
    partition,
    select_stages_of_rank,
)
from megatron.model.shape import ModelShape

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


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes of everything that scales with the parameters. Activations and buffers are extra."""

    master_weights: int
    working_weights: int
    """The weights that the model computes with, if they are not the master weights themselves."""
    optimizer_states: int
    gradients: int

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return self.master_weights + self.working_weights + self.optimizer_states + self.gradients

    def __add__(self, other: "ParameterMemory") -> "ParameterMemory":
        """Return the sum by parts."""
        return ParameterMemory(*map(operator.add, vars(self).values(), vars(other).values()))


def estimate_parameter_memory(
    parameters: int,
    *,
    half: bool,
    data_parallel_size: int = 1,
    zero_stage: int = 0,
    shard_size: int | None = None,
    state_bytes: int | None = None,
) -> ParameterMemory:
    """Estimate the memory of parameters on one rank. With Adam it is the rule of 18 bytes for each.

    These are 4 for fp32 weights, 2 for half-precision weights, 8 for Adam's moments and 4 for fp32
    gradients.

    ZeRO shards them, rounded up. Stage 1 shards optimizer states and master weights over the
    data-parallel ranks. Stage 2 also shards gradients. Stage 3 also shards the weights that the
    model computes with.

    Args:
        parameters: Number of parameters.
        half: The model computes in bf16 or fp16. In fp32 it computes with the master weights, so
            that the rule has 16 bytes, unless stage 1 or 2 shards them. Then the rank also has a
            complete copy.
        data_parallel_size: Ranks with the same parameters.
        zero_stage: The ZeRO stage.
        shard_size: Ranks that share one copy of the model. Default: all of them.
        state_bytes: Bytes of the optimizer's states before ZeRO shards them. Default: Adam's.
    """
    ranks = shard_size or data_parallel_size
    working = 2 * parameters * half
    complete = 0
    if not half and data_parallel_size > 1 and zero_stage in (1, 2):
        complete = 4 * parameters

    def shard_from(stage: int, size: int) -> int:
        # Rounded up, because the last shard is padded.
        return -(-size // ranks) if zero_stage >= stage else size

    return ParameterMemory(
        master_weights=shard_from(1, 4 * parameters),
        working_weights=shard_from(3, working) + complete,
        optimizer_states=shard_from(1, 8 * parameters if state_bytes is None else state_bytes),
        gradients=shard_from(2, 4 * parameters),
    )


def estimate_stage_memory(
    shape: ModelShape,
    layout: RankLayout,
    optimizer: OptimizerConfig,
    stages: Sequence[Stage],
    parameters: int,
    *,
    half: bool,
) -> ParameterMemory:
    """Return the bytes of the parameters of a pipeline rank.

    Args:
        shape: Sizes of the model.
        layout: The layout.
        optimizer: The optimizer and the precision of its moments.
        stages: The stages of the rank.
        parameters: All parameters of the rank, before ranks with the same ones share them.
        half: The model computes in bf16 or fp16.
    """
    experts = sum_stages(shape, layout, stages).experts
    matrices = sum(count_dense_matrices(shape, layout, stage.layers) for stage in stages)

    def estimate(number: int, in_matrices: int, ranks: int, shard_size: int) -> ParameterMemory:
        return estimate_parameter_memory(
            number,
            half=half,
            data_parallel_size=ranks,
            shard_size=shard_size,
            zero_stage=layout.zero_stage,
            state_bytes=flops.count_state_bytes(optimizer, number, in_matrices),
        )

    dense = estimate(
        parameters - experts, matrices, layout.data * layout.context, layout.shard_size
    )
    if not experts:
        return dense
    # All experts are matrices, but for their biases.
    shards = layout.expert_shards
    return dense + estimate(experts, experts, shards * layout.expert_copies, shards)


def build_stages(shape: ModelShape, layout: RankLayout) -> tuple[Stage, ...]:
    """Return the stages of a layout, in the order of the layers.

    Raises:
        ConfigError: The layers cannot be divided so.
    """
    per_virtual = count_virtual_layers(shape.config.num_layers, layout)
    if per_virtual == 1 and layout.partition == BALANCED_ENDS:
        return _build_stages_of_one_layer(shape.config.num_layers)
    return partition(
        shape,
        ParallelConfig(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            num_layers_per_virtual_pipeline_stage=per_virtual,
            pp_partition_method=layout.partition,
        ),
    )


def _build_stages_of_one_layer(layers: int) -> tuple[Stage, ...]:
    """Return stages of a layer each, and one each for the embedding and the output layer.

    Llama 3 405B was trained so (https://arxiv.org/abs/2407.21783, section 3.3.2). This trainer
    needs a layer on each stage, so its plan refuses them.
    """
    ends = [0, *range(layers + 1), layers]
    return tuple(
        Stage(number, range(*ends[number : number + 2]), number == 0, number == layers + 1)
        for number in range(layers + 2)
    )


def count_virtual_layers(layers: int, layout: RankLayout) -> int | None:
    """Return --num-layers-per-virtual-pipeline-stage of a layout, or None without virtual stages.

    Raises:
        ConfigError: The layers cannot be divided so.
    """
    if layout.virtual == 1:
        return None
    if layout.partition == BALANCED_ENDS:
        layers += 2
    stages = layout.pipeline * layout.virtual
    if layers % stages:
        raise ConfigError(
            f"{layers} layers cannot be divided into {stages} equal virtual stages; choose a "
            "number that divides them."
        )
    return layers // stages


def estimate_memory(
    job: StepJob, stages: Sequence[Stage] | None = None, ranks: Sequence[int] | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of each pipeline rank.

    Args:
        job: The step.
        stages: `build_stages` of the layout, if the caller has them.
        ranks: The pipeline ranks. Default: all of them.
    """
    stages = stages or build_stages(job.shape, job.layout)
    pipeline = job.layout.pipeline
    parameters = count_rank_parameters(job.shape, job.layout, stages)
    return tuple(
        _estimate_rank(job, parameters[rank], select_stages_of_rank(stages, rank, pipeline), rank)
        for rank in (range(pipeline) if ranks is None else ranks)
    )


def count_rank_parameters(
    shape: ModelShape, layout: RankLayout, stages: Sequence[Stage]
) -> tuple[int, ...]:
    """Return the parameters of each pipeline rank, before ranks with the same ones share them."""
    layers = count_layers_per_rank(stages, layout.pipeline)
    experts, linear = (
        tuple(
            sum(count(shape, stage.layers) for stage in own)
            for own in (stages[rank :: layout.pipeline] for rank in range(layout.pipeline))
        )
        for count in (count_mixtures, count_linear_layers)
    )
    return flops.count_stage_parameters(
        shape, layout.tensor, layers, experts, layout.expert or 1, linear
    )


def count_own_parameters(
    shape: ModelShape, layout: RankLayout, parameters: int, stages: Sequence[Stage]
) -> int:
    """Return the parameters that a rank updates, of those that it computes with.

    Args:
        shape: Sizes of the model.
        layout: The layout.
        parameters: All parameters of the rank.
        stages: The stages of the rank.
    """
    # Stage 0 has complete masters on each rank.
    if layout.zero_stage < 1:
        return parameters
    experts = sum_stages(shape, layout, stages).experts
    return -(-(parameters - experts) // layout.shard_size) - (-experts // layout.expert_shards)


def _estimate_rank(job: StepJob, parameters: int, stages: Sequence[Stage], rank: int) -> RankMemory:
    """Return the memory of pipeline rank `rank` with these parameters and stages."""
    shape, layout, software = job.shape, job.layout, job.software
    held = estimate_stage_memory(
        shape, layout, software.optimizer, stages, parameters, half=software.half
    )
    # It is not known how other trainers allocate, so their formulas come with them.
    if software.memory is None:
        point = find_peak(job, stages, rank)
    else:
        point = software.memory(job, held, parameters, stages, rank)
    tensors = held.master_weights + held.optimizer_states + point.total
    return RankMemory(
        **vars(point),
        master_weights=held.master_weights,
        optimizer_states=held.optimizer_states,
        fixed=software.overhead.estimate_bytes(tensors),
    )
