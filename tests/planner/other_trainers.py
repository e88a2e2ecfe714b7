"""Other trainers whose steps were published: what they overlap, keep in memory and round.

The times are those of `cost.step_prediction`. Their memory follows the papers' formulas, since it
is not known how they allocate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron.extras.planner.commands.plan_estimates import (
    PaperActivations,
)
from megatron.extras.planner.cost.experts import MixtureTimes
from megatron.extras.planner.cost.float8 import Linear, Rounding
from megatron.extras.planner.cost.kernels import Gemm, estimate_memory_seconds
from megatron.extras.planner.cost.layers import LayerTimes, Passes, Seconds, _put_into_float8
from megatron.extras.planner.cost.layout import (
    TRAINER,
    Float8,
    Overhead,
    RankLayout,
    Software,
    StepJob,
)
from megatron.extras.planner.cost.memory import ParameterMemory
from megatron.extras.planner.cost.parameters import count_rows
from megatron.extras.planner.cost.peak import StepPoint
from megatron.extras.planner.cost.tensors import Kernel
from megatron.model import flops
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape

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
        job: StepJob,
        held: ParameterMemory,
        parameters: int,
        stages: Sequence[Stage],
        rank: int,
    ) -> StepPoint:
        return _estimate_parts(self, job, held, parameters, stages, rank)


def estimate_layer_bytes(
    shape: ModelShape, layout: RankLayout, software: Software, *, working: bool = False
) -> int:
    """Return the bytes that a layer keeps for one microbatch.

    A `working` layer is one that is being recomputed completely, so it has the scores of its
    attention as well if there is no flash kernel.
    """
    kept = layout.recompute == "none" or working
    whole = PaperActivations(
        shape,
        layout.micro_batch,
        layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        half=software.half,
        scores_kept=kept and not software.flash,
    ).layer
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
    job: StepJob,
    held: ParameterMemory,
    parameters: int,
    stages: Sequence[Stage],
    rank: int,
) -> StepPoint:
    """Return weights, gradients, activations, a working layer, logits and buffers of a rank."""
    shape, layout, software = job.shape, job.layout, job.software
    visits = job.schedule.count_in_flight(rank)
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
    return StepPoint(held.working_weights, gradients, activations, working, logits, buffers)


def _estimate_activations(
    shape: ModelShape,
    layout: RankLayout,
    software: Software,
    stages: Sequence[Stage],
    visits: int,
) -> tuple[float, float]:
    """Return the bytes of the microbatches in flight, and those of a layer being recomputed."""
    whole = estimate_layer_bytes(shape, layout, software)
    kept_input = PaperActivations(
        shape,
        layout.micro_batch,
        layout.tensor,
        sequence_parallel=layout.sequence_parallel or layout.partition_inputs,
        half=software.half,
    ).layer_input
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
    gathers_rounded: bool = False
    """Whether ranks with sequence parallelism round their slices before they gather them, and keep
    what they gathered for the backward pass."""

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
        if self.gathers_rounded and layout.sequence_parallel:
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


_KERNELS = 40
"""Kernels of a layer apart from those of its attention core. They only matter where there is a time
between kernels."""
_CORE_KERNELS = 8
"""Kernels of attention without a fused one."""


@dataclass(frozen=True)
class OtherSoftware(Software):
    """A trainer that is known by its documentation."""

    kernel_gap: float = 0.0
    """Seconds that pass between two kernels of a stream. They are fitted."""
    hidden_tensor: float = 0.0
    """Share of the tensor-parallel communication that overlaps with matrix products. What overlaps
    costs nothing here. Its contention is part of the fitted shares."""
    sends_token_once: bool = False
    """Whether a token is sent once to each rank that has experts for it, and not once for each of
    them."""
    expert_operators: int | None = None
    """Bytes of memory traffic for an inner element of a gated expert with biases, in operators that
    other trainers fuse. Each expert has a product of its own then. None: products are grouped."""
    accumulation_bytes: int = 0
    """Bytes of memory traffic that add a parameter's gradient to the sum over microbatches, without
    those of the matrix product."""


class OtherTimes(LayerTimes):
    """The times of layers of other trainers."""

    _software: OtherSoftware

    @property
    def _waiting(self) -> float:
        """The share of tensor-parallel communication that computation waits for."""
        return 1 - self._software.hidden_tensor

    def estimate_recomputed_layer(self, window: int | None = None) -> Passes:
        layer = self.estimate_layer(window)
        # A flash kernel computes scores again in any case, which its backward pass contains.
        if self._layout.recompute == "selective" and self._software.flash:
            return layer
        if self._layout.recompute == "operators":
            return Passes(layer.forward, layer.backward + self._estimate_operators())
        return super().estimate_recomputed_layer(window)

    def _estimate_operators(self) -> Seconds:
        """Estimate the recomputation of a layer that keeps every second matrix product.

        A layer has products for query, key, value, output, gate, up and down, in this order. The
        first, third, fifth and seventh are kept, and so is the attention.
        """
        h = self._shape.config.hidden_size
        again = [self._make_gemm(self._k, h), self._make_gemm(h, self._q)]
        if self._gated:
            again.append(self._make_gemm(self._f, h))
        if self._in_float8:
            again = [_put_into_float8(each, exact=False) for each in again]
        # What was rounded is not kept.
        rounded = Seconds(rounding=self._estimate_float8().forward.rounding)
        products = Seconds(gemm=self._time_gemms(again))
        return products + rounded + self._estimate_pointwise().forward

    def estimate_output(self) -> Passes:
        forward, backward = vars(super().estimate_output()).values()
        return Passes(forward, replace(backward, tensor=backward.tensor * self._waiting))

    def _add_gaps(self, passes: Passes, forward: int, backward: int) -> Passes:
        """Add the time between kernels, by their numbers."""
        gap = self._software.kernel_gap
        return Passes(
            replace(passes.forward, gaps=forward * gap),
            replace(passes.backward, gaps=backward * gap),
        )

    def _estimate_projections(self) -> Passes:
        passes = super()._estimate_projections()
        elements = sum(product.n * product.k for product in self._list_projections())
        if self._software.accumulation_bytes:
            size = self._software.accumulation_bytes * elements
            seconds = estimate_memory_seconds(size, self._hardware, 4)
            passes = Passes(passes.forward, replace(passes.backward, pointwise=seconds))
        return self._add_gaps(passes, _KERNELS, 2 * _KERNELS)

    def _has_bias(self, window: int | None) -> bool:
        return False

    def _choose_kernel(self, window: int | None) -> Kernel:
        return "flash" if self._software.flash else "none"

    def _estimate_core(self, window: int | None) -> Passes:
        kernels = 1 if self._software.flash else _CORE_KERNELS
        return self._add_gaps(super()._estimate_core(window), kernels, 2 * kernels)

    def _estimate_pointwise(self) -> Passes:
        config = self._shape.config
        h = config.hidden_size
        sharing = self._layout.tensor if self._layout.sequence_parallel else 1
        mask = h / self._value if self._software.dropout else 0
        # Forward: two norms (read, write) and two sums with the residual stream (2 reads, write).
        # Backward: norms read three tensors and write one, and read two for their weights.
        replicated = (10 * h + 2 * mask) / sharing
        replicated_backward = (18 * h + 2 * mask) / sharing
        activation = self._mlp_in + self._f
        activation_backward = 2 * self._mlp_in + self._f
        # Queries, keys and values are copied to the order that the kernel needs.
        copies = 2 * (self._q + self._k)
        if config.position_embedding_type == "rotary":
            # The rotation reads and writes queries and keys once more.
            copies *= 2
        # The gradient of a bias is a sum over all tokens.
        if self._shape.has_mlp_bias:
            activation_backward += self._mlp_in + h
        if self._shape.has_attention_bias:
            activation_backward += self._q + h
        scale = self._software.pointwise * self._value * self._tokens
        forward = scale * (replicated + activation + copies)
        backward = scale * (replicated_backward + activation_backward + copies)
        return Passes(
            Seconds(pointwise=estimate_memory_seconds(forward, self._hardware, 7)),
            Seconds(pointwise=estimate_memory_seconds(backward, self._hardware, 12)),
        )

    def _estimate_tensor_parallel(self) -> Passes:
        if self._layout.tensor == 1:
            return Passes(Seconds(), Seconds())
        h = self._shape.config.hidden_size
        reduced = self._time_collective(self._value * self._tokens * h, passes=2)
        forward = backward = 2 * reduced
        if self._layout.sequence_parallel:
            once = self._time_collective(self._value * self._tokens * h, passes=1)
            backward += 2 * once
            float8 = self._software.float8
            if float8 is not None and getattr(float8.rounding, "gathers_rounded", False):
                # Two of the four messages of a pass have one byte for each element.
                gathered = self._time_collective(self._tokens * h, passes=1)
                forward = backward = 2 * once + 2 * gathered
        return Passes(
            Seconds(tensor=forward * self._waiting), Seconds(tensor=backward * self._waiting)
        )

    def _estimate_context_parallel(self, core: Passes) -> Passes:
        once = self._time_context_message(self.count_context_bytes()) * self._waiting
        # Keys and values are gathered again in the backward pass.
        return Passes(Seconds(tensor=once), Seconds(tensor=once + once))


class OtherMixtureTimes(OtherTimes, MixtureTimes):
    """The times of layers with experts of other trainers."""

    def _estimate_tensor_parallel(self) -> Passes:
        both = MixtureTimes._estimate_tensor_parallel(self)
        forward, backward = (
            Seconds(tensor=each.tensor * self._waiting) for each in (both.forward, both.backward)
        )
        return Passes(forward, backward)

    def _count_message_bytes(self) -> float:
        size = super()._count_message_bytes()
        if self._software.sends_token_once:
            ranks = self._layout.expert or 1
            # Of a token's k experts, some are on the same rank.
            k = self._shape.config.moe_router_topk
            size *= ranks / k * (1 - (1 - 1 / ranks) ** k)
        return size

    def _time_products(self, products: list[Gemm]) -> float:
        if self._software.expert_operators is None:
            return super()._time_products(products)
        of_one = [replace(each, batch=1) for each in products]
        experts = products[0].batch
        return experts * self._time_gemms(of_one)

    def _estimate_experts(self) -> Passes:
        both = super()._estimate_experts()
        if self._software.expert_operators is None:
            return both
        received = count_rows(self._shape, self._layout, self._length)[2]
        traffic = self._software.expert_operators * received * self._shape.expert_width
        # The forward pass's part is a third, as in `MixtureTimes`.
        return both + Passes(
            *(
                Seconds(pointwise=estimate_memory_seconds(share * traffic, self._hardware))
                for share in (1 / 3, 2 / 3)
            )
        )


_MEASURED = Overhead(1.15, 4.5)
"""What BLOOM's runs needed. A rank of a pipeline has up to 7 communicators, each with buffers."""


EAGER_POINTWISE = 3.2
"""Memory traffic of pointwise operations without torch.compile, relative to fused kernels."""
_TIMES = (("dense", OtherTimes), ("experts", OtherMixtureTimes))
OTHERS = {
    each.name: each
    for each in (
        # Fused kernels of softmax, GELU and dropout; gradients are reduced after the last backward
        # pass. Of the backward pass's collectives, the first overlaps (2205.05198, section 6).
        OtherSoftware(
            "megatron-lm-2021",
            times=_TIMES,
            sequence_parallel=False,
            flash=False,
            accumulation_bytes=6,
            gradient_bytes=2,
            memory=PaperMemory(gradient_bytes=2),
        ),
        # The same with selective recomputation, sequence parallelism, and gradients that the matrix
        # product adds to the fp32 sum by itself.
        OtherSoftware(
            "megatron-lm-2022",
            times=_TIMES,
            flash=False,
            hidden_tensor=0.25,
            gradient_bytes=4,
            memory=PaperMemory(),
        ),
        # DeepSpeed's pipeline engine with CUDA_LAUNCH_BLOCKING=1, as BLOOM's tests ran.
        OtherSoftware(
            "megatron-deepspeed",
            times=_TIMES,
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
        OtherSoftware(
            "megatron-deepspeed-bf16",
            times=_TIMES,
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
        OtherSoftware(
            "megatron-core",
            times=_TIMES,
            hidden_tensor=0.7,
            hidden_data=0.8,
            contention=0.15,
            hidden_pipeline=True,
            gradient_bytes=2,
            dropout=False,
            memory=PaperMemory(),
        ),
        # Megatron-Bridge on Hopper without virtual stages, which alone overlap messages of a
        # pipeline. `GroupedLinear` of Transformer Engine calls a product for each expert unless
        # NVTE_USE_CUTLASS_GROUPED_GEMM is set. Operators of experts, in bytes for an element of
        # 2 bytes: `TEGroupedMLP._apply_bias` multiplies, adds and concatenates (12, and 12 in the
        # backward pass); the clamp of the gate copies both halves twice (16, and 12). The recipe
        # recomputes the activation ("moe_act"), which repeats 16 and the gate's 6.
        OtherSoftware(
            "megatron-bridge",
            times=_TIMES,
            hidden_tensor=0.7,
            hidden_data=0.8,
            contention=0.15,
            gradient_bytes=2,
            dropout=False,
            expert_operators=12 + 12 + 16 + 12 + 16 + 6,
            memory=PaperMemory(),
        ),
        # FSDP gathers the next layer while one computes. torch.compile fuses pointwise kernels.
        OtherSoftware(
            "fsdp-compiled",
            times=_TIMES,
            hidden_data=1.0,
            contention=0.15,
            dropout=False,
            gradient_bytes=2,
            memory=PaperMemory(logit_bytes=12),
        ),
        # The same with DeepEP, whose documentation says that it sends a token once to a rank.
        OtherSoftware(
            "fsdp-deepep",
            times=_TIMES,
            hidden_data=1.0,
            contention=0.15,
            dropout=False,
            gradient_bytes=2,
            sends_token_once=True,
            memory=PaperMemory(logit_bytes=12),
        ),
        # The loss has bf16 logits, an fp32 copy of them, their log-softmax and two gradients.
        OtherSoftware(
            "fsdp-eager",
            times=_TIMES,
            pointwise=EAGER_POINTWISE,
            hidden_data=1.0,
            contention=0.15,
            dropout=False,
            gradient_bytes=4,
            logit_bytes=70,
            memory=PaperMemory(logit_bytes=16),
        ),
    )
}
SOFTWARE: dict[str, Software] = {**OTHERS, TRAINER.name: TRAINER}
"""All trainers, with this one."""
