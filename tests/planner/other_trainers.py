"""Other trainers whose steps were published: what they overlap, keep in memory and round.

The times are those of `cost.step_prediction`. Their memory follows the papers' formulas, since it
is not known how they allocate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.extras.planner.commands.plan_estimates import (
    estimate_layer_activation_bytes,
    estimate_layer_input_bytes,
)
from megatron.extras.planner.cost.float8 import Linear, Rounding
from megatron.extras.planner.cost.layout import TRAINER, Float8, Overhead, RankLayout, Software
from megatron.extras.planner.cost.memory import ParameterMemory
from megatron.model import flops
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape
from megatron.schedule.pipeline_schedule import PipelineSchedule

Parts = tuple[float, float, float, float, float, float]

_PREFETCHED = 2
"""Layers whose gathered weights exist at the same time with ZeRO stage 3: one computes, and one is
gathered ahead."""


@dataclass(frozen=True)
class PaperMemory:
    """The papers' formulas, with what a trainer holds in addition."""

    gradient_bytes: int = 4
    """Bytes of a parameter's gradient in memory."""
    outputs: bool = False
    """Whether a stage keeps its outputs until their backward pass, beside its inputs."""
    gathers: float = 0.0
    """Complete hidden states [s, b, h] in half precision that the backward pass of a layer holds
    with sequence parallelism. The papers' formulas have the slices of the ranks only."""
    logit_bytes: int = 8
    """Memory of the loss for each logit."""

    def __call__(
        self,
        shape: ModelShape,
        layout: RankLayout,
        software: Software,
        held: ParameterMemory,
        parameters: int,
        stages: Sequence[Stage],
        schedule: PipelineSchedule,
        rank: int,
    ) -> Parts:
        return _estimate_parts(
            self, shape, layout, software, held, parameters, stages, schedule, rank
        )


def estimate_layer_bytes(
    shape: ModelShape, layout: RankLayout, software: Software, *, working: bool = False
) -> int:
    """Return the bytes that a layer keeps for one microbatch.

    A `working` layer is one that is being recomputed completely, so it has the scores of its
    attention as well if there is no flash kernel.
    """
    kept = layout.recompute == "none" or working
    whole = estimate_layer_activation_bytes(
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


def _estimate_parts(
    formula: "PaperMemory",
    shape: ModelShape,
    layout: RankLayout,
    software: Software,
    held: ParameterMemory,
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
        working += formula.gathers * 2 * tokens * shape.config.hidden_size
    # Only the last stage computes the loss.
    logits = 0.0
    if any(stage.last for stage in stages):
        logits = formula.logit_bytes * tokens * shape.padded_vocab_size / layout.tensor
    buffers = _estimate_buffers(formula, shape, layout, software, parameters, stages, visits)
    gradients = held.gradients * formula.gradient_bytes / 4
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
    kept_input = estimate_layer_input_bytes(
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
    formula: "PaperMemory",
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
        if formula.outputs:
            size += visits * message
    return size


_LARGEST = 2
"""Bytes that are read for each element to find the largest value."""
_ROUNDED = 7
"""Bytes that are moved to round an element of bf16 without a compiler. Two kernels multiply it by
the scale and convert it to float8."""
_ROUNDED_AT_ONCE = 3
"""The same in one kernel."""
_COPIED = 2
"""Bytes that copy an element in float8. A product needs both operands in the order of their inner
dimension, so some are transposed."""


@dataclass(frozen=True)
class OtherRounding:
    """What is rounded without the kernels of this trainer."""

    fused: bool = False
    """Whether one kernel rounds a tensor. A compiler makes such kernels."""
    scale_kernels: int = 13
    """Kernels on single numbers that compute a scale and its inverse."""
    weights: Literal["pass", "step", "shard"] = "pass"
    """When weights are rounded: for each pass of each microbatch, once a step, or before they are
    gathered, so that a rank rounds its shard only."""
    keeps_rounded: bool = False
    """Whether the backward pass uses the rounded inputs of the forward pass."""

    def __call__(
        self,
        linears: Sequence[Linear],
        tokens: int,
        float8: Float8,
        microbatches: int,
        layout: RankLayout,
    ) -> tuple[Rounding, Rounding]:
        forward = Rounding()
        backward = Rounding()
        # Ranks with sequence parallelism have slices of the tokens.
        slices = 1
        if float8.gathers_rounded and layout.sequence_parallel:
            slices = layout.tensor
        for each in linears:
            # What is gathered is rounded in slices: inputs of column-parallel layers, and gradients
            # of the outputs of row-parallel ones.
            inputs, gradients = tokens // slices, tokens
            if each.row_parallel:
                inputs, gradients = tokens, tokens // slices
            forward += self._count_forward(each, inputs, microbatches)
            backward += self._count_backward(each, inputs, gradients, float8)
        return forward, backward

    @property
    def _once(self) -> int:
        return _ROUNDED_AT_ONCE if self.fused else _ROUNDED

    def _count_forward(self, linear: Linear, tokens: int, microbatches: int) -> Rounding:
        entries = len(linear.columns)
        elements = tokens * linear.inner
        size = (_LARGEST + self._once) * elements
        if self.keeps_rounded:
            # The transposed copy for the backward pass is written at the same time.
            size += elements
        weights = 0.0
        if self.weights == "pass":
            weights = self._once
        elif self.weights == "step":
            # Both orders of a weight are written once, and used for all microbatches.
            weights = (_LARGEST + self._once + 1) / microbatches
        return Rounding(size + weights * linear.weights, self.scale_kernels * (1 + entries))

    def _count_backward(
        self, linear: Linear, of_inputs: int, of_gradients: int, float8: Float8
    ) -> Rounding:
        """Return what a backward pass rounds, from the tokens of inputs and of gradients."""
        entries = len(linear.columns)
        gradients = of_gradients * sum(linear.columns)
        inputs = of_inputs * linear.inner
        if self.keeps_rounded:
            # A kernel writes both orders of a gradient.
            size = (_LARGEST + self._once + 1) * gradients
            return Rounding(size, self.scale_kernels * entries)
        size = (_LARGEST + self._once) * gradients
        scales = entries
        if self.weights == "pass":
            size += (self._once + _COPIED) * linear.weights
            scales += entries
        else:
            size += _COPIED * linear.weights
        if not float8.rowwise:
            # The product for the weight has both of its operands transposed.
            size += _COPIED * gradients + (self._once + _COPIED * entries) * inputs
            scales += 1
        return Rounding(size, self.scale_kernels * scales)


_MEASURED = Overhead(1.15, 4.5)
"""What BLOOM's runs needed. A rank of a pipeline has up to 7 communicators, each with buffers."""


EAGER_POINTWISE = 3.2
"""Memory traffic of pointwise operations without torch.compile, relative to fused kernels."""
SOFTWARE = {
    each.name: each
    for each in (
        # Fused kernels of softmax, GELU and dropout; gradients are reduced after the last backward
        # pass. Of the backward pass's collectives, the first overlaps (2205.05198, section 6).
        Software(
            "megatron-lm-2021",
            sequence_parallel=False,
            flash=False,
            accumulation_bytes=6,
            gradient_bytes=2,
            memory=PaperMemory(gradient_bytes=2),
        ),
        # The same with selective recomputation, sequence parallelism, and gradients that the matrix
        # product adds to the fp32 sum by itself.
        Software(
            "megatron-lm-2022",
            flash=False,
            hidden_tensor=0.25,
            gradient_bytes=4,
            memory=PaperMemory(),
        ),
        # DeepSpeed's pipeline engine with CUDA_LAUNCH_BLOCKING=1, as BLOOM's tests ran.
        Software(
            "megatron-deepspeed",
            sequence_parallel=False,
            flash=False,
            kernel_gap=6e-5,
            accumulation_bytes=8,
            gradient_bytes=2,
            dropout=False,
            overhead=_MEASURED,
            memory=PaperMemory(gradient_bytes=2, outputs=True),
        ),
        # Its bf16 optimizer keeps the sum of the gradients in fp32, beside bf16 gradients. The sum
        # is a second pass over them for each microbatch.
        Software(
            "megatron-deepspeed-bf16",
            sequence_parallel=False,
            flash=False,
            kernel_gap=6e-5,
            accumulation_bytes=14,
            gradient_bytes=4,
            dropout=False,
            overhead=_MEASURED,
            memory=PaperMemory(gradient_bytes=6, outputs=True),
        ),
        # Collectives of all kinds overlap with computation, as its documentation advises. Kernels
        # are fused, so there is next to no time between them.
        Software(
            "megatron-core",
            hidden_tensor=0.7,
            hidden_data=0.8,
            contention=0.15,
            hidden_pipeline=True,
            gradient_bytes=2,
            dropout=False,
            memory=PaperMemory(),
        ),
        # FSDP gathers the next layer while one computes. torch.compile fuses pointwise kernels.
        Software(
            "fsdp-compiled",
            hidden_data=1.0,
            contention=0.15,
            dropout=False,
            gradient_bytes=2,
            memory=PaperMemory(logit_bytes=12),
        ),
        # The same with DeepEP, whose documentation says that it sends a token once to a rank.
        Software(
            "fsdp-deepep",
            hidden_data=1.0,
            contention=0.15,
            dropout=False,
            gradient_bytes=2,
            sends_token_once=True,
            memory=PaperMemory(logit_bytes=12),
        ),
        # The loss has bf16 logits, an fp32 copy of them, their log-softmax and two gradients.
        Software(
            "fsdp-eager",
            pointwise=EAGER_POINTWISE,
            hidden_data=1.0,
            contention=0.15,
            dropout=False,
            gradient_bytes=4,
            logit_bytes=70,
            memory=PaperMemory(logit_bytes=16),
        ),
        TRAINER,
    )
}
