"""Matrix products of transformer layers in float8: what is rounded, and what ranks exchange.

A linear layer has three products. Before a product, both operands are rounded, with a scale from
the largest value of the complete tensor (docs/float8.md). The formulas count what
`megatron.extras.step.float8` does. `tests/cuda/test_float8_dry_run.py` compares the messages
and the bytes with steps on fake GPUs.

Notation: T tokens of a microbatch on this rank, k columns of an input, n columns of an output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.extras.planner.cost.layout import Float8, RankLayout
from megatron.extras.planner.cost.parameters import get_widths
from megatron.extras.step.float8.recipe import fits_float8
from megatron.model.layer_parts import get_activation
from megatron.model.shape import ModelShape

_LARGEST = 2
"""Bytes that are read for each element to find the largest value."""
_ROUNDED = 3
"""Bytes that one kernel moves to round an element of bf16."""
_MASTER = 4
"""Bytes of a weight's master."""
_COPY = 2
"""Bytes of a gathered weight in 16 bits."""
_SCALE_BYTES = 4
"""Bytes of a largest value."""
_WEIGHT_KERNELS = 4
"""Kernels that find the largest value of a weight at the start of a step."""

Axis = Literal["tensor", "context"]


@dataclass(frozen=True)
class Linear:
    """Linear layers of a transformer layer that have the same input, on one rank."""

    inner: int
    """Columns of the input."""
    columns: tuple[int, ...]
    """Columns of each layer's output."""
    row_parallel: bool
    """Whether tensor-parallel ranks share the input's columns. Otherwise they share those of the
    output."""
    complete: tuple[int, int]
    """Sizes of a weight in the complete model."""
    replicated: bool = False
    """Whether each tensor-parallel rank has all of the weights."""

    @property
    def weights(self) -> int:
        """Elements of the weights."""
        return self.inner * sum(self.columns)


@dataclass(frozen=True)
class Rounding:
    """What a pass through a layer moves and starts, besides its products."""

    bytes: float = 0.0
    small_kernels: int = 0
    """Kernels on single numbers."""

    def __add__(self, other: "Rounding") -> "Rounding":
        """Return the sum of both."""
        return Rounding(self.bytes + other.bytes, self.small_kernels + other.small_kernels)


@dataclass(frozen=True, order=True)
class ScaleMessage:
    """An all-reduce of largest values, or of gradients of shared keys and values."""

    axis: Axis
    bytes: int


def list_attention_linears(shape: ModelShape, tensor: int) -> list[Linear]:
    """Return the linear layers of attention on a tensor-parallel rank, the output last."""
    config = shape.config
    h = config.hidden_size
    if shape.attention == "latent":
        return _list_latent_linears(shape, tensor)
    whole, own = get_widths(shape), get_widths(shape, tensor)
    queries: tuple[int, ...] = (own.q + 2 * own.k,)
    if shape.gate_dim:
        # The gate is a matrix of its own, which reads the same input.
        queries += (own.q,)
    return [
        Linear(h, queries, row_parallel=False, complete=(whole.q + 2 * whole.k, h)),
        Linear(own.q, (h,), row_parallel=True, complete=(h, whole.q)),
    ]


def _list_latent_linears(shape: ModelShape, tensor: int) -> list[Linear]:
    config = shape.config
    h = config.hidden_size
    queries, latent = config.q_lora_rank, config.kv_lora_rank
    q, context, pairs = (
        config.num_attention_heads * width
        for width in (shape.head_dim, shape.value_dim, config.qk_head_dim + shape.value_dim)
    )
    shared = latent + config.qk_pos_emb_head_dim
    # Ranks with a shard of the sequence compute these for their own tokens only.
    found = [Linear(h, (shared,), row_parallel=False, complete=(shared, h), replicated=True)]
    if queries is not None:
        found.append(
            Linear(h, (queries,), row_parallel=False, complete=(queries, h), replicated=True)
        )
    source = queries or h
    return [
        *found,
        Linear(source, (q // tensor,), row_parallel=False, complete=(q, source)),
        Linear(latent, (pairs // tensor,), row_parallel=False, complete=(pairs, latent)),
        Linear(context // tensor, (h,), row_parallel=True, complete=(h, context)),
    ]


def list_linears(shape: ModelShape, tensor: int) -> list[Linear]:
    """Return the linear layers of a transformer layer on a tensor-parallel rank."""
    config = shape.config
    h = config.hidden_size
    f = shape.ffn_hidden_size
    entries = 1 + get_activation(config).gated
    return [
        *list_attention_linears(shape, tensor),
        Linear(h, (f // tensor,) * entries, row_parallel=False, complete=(f, h)),
        Linear(f // tensor, (h,), row_parallel=True, complete=(h, f)),
    ]


def list_float8_linears(shape: ModelShape, tensor: int) -> list[Linear]:
    """Return those of `list_linears` whose complete sizes allow float8."""
    return [each for each in list_linears(shape, tensor) if fits_float8(each.complete)]


def count_rounding(
    linears: Sequence[Linear],
    tokens: int,
    float8: Float8,
    microbatches: int,
    layout: RankLayout,
) -> tuple[Rounding, Rounding]:
    """Return what the forward and the backward pass of a layer round.

    Args:
        linears: The linear layers of a transformer layer.
        tokens: Tokens of a microbatch on this rank, after a gather.
        float8: How float8 is used.
        microbatches: Microbatches of a step.
        layout: The layout.
    """
    if float8.rounding is not None:
        other: tuple[Rounding, Rounding] = float8.rounding(
            linears, tokens, float8, microbatches, layout
        )
        return other
    forward = Rounding()
    backward = Rounding()
    for each in linears:
        once = _count_layer(each, tokens, float8, microbatches, layout)
        forward += once[0]
        backward += once[1]
    return forward, backward


def _count_layer(
    linear: Linear, tokens: int, float8: Float8, microbatches: int, layout: RankLayout
) -> tuple[Rounding, Rounding]:
    """Return what the kernels of this trainer move in both passes."""
    entries = len(linear.columns)
    inputs = tokens * linear.inner
    gradients = tokens * sum(linear.columns)
    # Rows that are complete on a rank are read once, also for their largest value.
    shared = layout.tensor > 1
    forward = float(_ROUNDED * inputs)
    backward = float(_ROUNDED * gradients)
    if not float8.rowwise or (shared and linear.row_parallel):
        forward += _LARGEST * inputs
    if not float8.rowwise or (shared and not linear.row_parallel):
        backward += _LARGEST * gradients
    if not float8.rowwise:
        backward += gradients
        # A slice of an input that is gathered again is rounded again, in the other order.
        if linear.row_parallel or not layout.sequence_parallel:
            forward += inputs
        else:
            backward += _ROUNDED * inputs
    sharded = layout.data * layout.context > 1
    if sharded and layout.zero_stage == 3:
        # Each pass writes the order that it needs.
        forward += _ROUNDED * linear.weights
        backward += _ROUNDED * linear.weights
    else:
        # Once a step in both orders, from copies in 16 bits or from masters in fp32. It is counted
        # here, because a recomputation does not repeat it.
        read = {True: _COPY, False: _MASTER}[sharded]
        backward += (read + 2) * linear.weights / microbatches
    # A kernel computes each scale and its inverse.
    small = int(not float8.rowwise)
    return Rounding(forward, small), Rounding(backward, small * entries)


def count_step_rounding(linears: Sequence[Linear], layers: int, shards: int) -> Rounding:
    """Return what a step reads to find the largest values of a stage's weights.

    Args:
        linears: The linear layers of a transformer layer.
        layers: Transformer layers in float8.
        shards: Ranks that share the weights. Each reads its fp32 shards.
    """
    elements = layers * sum(each.weights for each in linears)
    weights = layers * sum(len(each.columns) for each in linears)
    return Rounding(_MASTER * elements / shards, _WEIGHT_KERNELS * weights)


def count_weight_scales(linears: Sequence[Linear], layers: int, float8: Float8) -> int:
    """Return the numbers in the message of a step, with the largest values of weights."""
    each = sum(
        len(linear.columns) * (linear.complete[0] if float8.rowwise else 1) for linear in linears
    )
    return layers * each


def list_scale_messages(
    shape: ModelShape, layout: RankLayout, float8: Float8, tokens: int
) -> tuple[list[ScaleMessage], list[ScaleMessage]]:
    """Return the messages of the forward and of the backward pass of a layer.

    Args:
        shape: Sizes of the model.
        layout: The layout.
        float8: How float8 is used.
        tokens: Tokens of a microbatch on this rank.
    """
    forward: list[ScaleMessage] = []
    backward: list[ScaleMessage] = []
    if not float8.shares_scales:
        return forward, backward
    numbers = tokens if float8.rowwise else 1
    for linear in list_float8_linears(shape, layout.tensor):
        # A token is on one context-parallel rank.
        everywhere: list[Axis] = []
        if layout.context > 1 and not float8.rowwise:
            everywhere = ["context"]
        sharded = list(everywhere)
        if layout.tensor > 1:
            sharded = ["tensor", *everywhere]
        inputs, gradients = everywhere, sharded
        if linear.row_parallel:
            inputs, gradients = sharded, everywhere
        size = _SCALE_BYTES * numbers
        forward += [ScaleMessage(axis, size) for axis in inputs]
        backward += [ScaleMessage(axis, size * len(linear.columns)) for axis in gradients]
    if shape.query_groups < layout.tensor:
        pairs = 2 * shape.query_groups * shape.head_dim
        backward.append(ScaleMessage("tensor", 2 * tokens * pairs))
    return forward, backward
