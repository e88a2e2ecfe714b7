"""Tables of rotary and ALiBi positions and of the sliding window.

All blocks and steps share them. They are computed again only if the sequence length, the device or
the dtype changes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, assert_never

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.model.inputs import Documents, Inputs
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.packed_attention import PackedDocuments, pack_documents
from megatron.model.shape import ModelShape
from megatron.parallel.context import take_own
from megatron.parallel.mesh import ContextParallel, TensorParallel
from megatron.parallel.spmd import declare


@dataclass(frozen=True)
class Positions:
    """The tables that attention needs for positions, sliding window and documents.

    Learned positions need no table, because the embedding has added them already.
    """

    cos: Tensor | None = None
    """[s, 1, 1, 1, rotary_dim / 2], or [s, b, ...] if samples differ in positions, in fp32."""
    sin: Tensor | None = None
    """Same shape as `cos`."""
    bias: Tensor | None = None
    """[1, heads/t, s, s], ALiBi including the causal mask, in the activations' dtype.

    If context-parallel ranks gather keys, it is for the last part of the sequence, [1, heads/t,
    s/2c, s]. It depends on distances only, so a part reads its lower right corner. If they exchange
    heads, it is for this rank's heads, [1, heads/tc, s, s].
    """
    window_bias: Tensor | None = None
    """[1, 1 or heads/t, s, s], the bias of the layers with a sliding window. If the sequence fits
    into the window, it is the same as `bias`."""
    documents: Documents | None = None
    """If given, attention stays within a document."""
    packed: PackedDocuments | None = None
    """If given, one call computes the attention of all `documents`."""
    cache: KeyValueCache | None = None
    """If given, keys and values are stored in it. It is for text generation only."""
    context: ContextParallel = field(default_factory=ContextParallel)
    """The ranks that share the sequence. `cos` and `sin` are for this rank's s/c positions."""


def make_rotary_table(
    seq_length: int,
    dim: int,
    base: float,
    device: torch.device,
    scale: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position x frequency, with frequency_i = base^(-2i/dim).

    Source: https://arxiv.org/abs/2104.09864, section 3.2.2.

    Args:
        seq_length: s.
        dim: Number of rotated channels of a head.
        base: Base of the frequencies.
        device: Device of the result.
        scale: A function that changes the frequencies [dim / 2], in radians per token.

    Returns:
        Two tables [s, 1, 1, 1, dim / 2] in fp32.
    """
    # fp32, because half precision cannot represent large positions exactly.
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if scale is not None:
        frequencies = scale(frequencies)
    angles = torch.outer(torch.arange(seq_length, device=device, dtype=torch.float32), frequencies)
    angles = angles.view(seq_length, 1, 1, 1, dim // 2)
    return angles.cos(), angles.sin()


def make_scaled_rotary_table(
    seq_length: int, shape: ModelShape, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tables of `make_rotary_table` for a model, with its scaling.

    Args:
        seq_length: s.
        shape: Sizes of the model.
        device: Device of the result.
    """
    config = shape.config
    scale = partial(scale_rotary_frequencies, config=config)
    cos, sin = make_rotary_table(seq_length, shape.rotary_dim, config.rotary_base, device, scale)
    factor = shape.rope_attention_factor
    if factor == 1:
        return cos, sin
    # The rotation is linear, so this multiplies queries and keys.
    return factor * cos, factor * sin


def scale_rotary_frequencies(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Return the rotary frequencies that `--rope-scaling` asks for.

    Args:
        frequencies: [dim / 2], in radians per token.
        config: The architecture.
    """
    divided = frequencies / config.rope_scaling_factor
    match config.rope_scaling:
        case None:
            return frequencies
        case "linear":
            return divided
        case "llama3":
            # Full turns of a channel pair over the original length.
            turns = config.rope_original_length * frequencies / (2 * math.pi)
            low = config.rope_low_freq_factor
            # 0 where a frequency is divided, 1 where it is left as it is.
            kept = ((turns - low) / (config.rope_high_freq_factor - low)).clamp(0.0, 1.0)
        case "yarn":
            first, last = _find_yarn_pairs(frequencies.numel(), config)
            pairs = torch.arange(frequencies.numel(), device=frequencies.device)
            kept = 1 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
        case _:
            assert_never(config.rope_scaling)
    return (1 - kept) * divided + kept * frequencies


def _find_yarn_pairs(count: int, config: ModelConfig) -> tuple[float, float]:
    """Return the last channel pair that YaRN leaves as it is, and the first that it divides.

    Source: https://arxiv.org/abs/2309.00071, section 3.2. The limits are those of `transformers`.

    Args:
        count: Number of rotated channel pairs.
        config: The architecture.
    """

    def find_pair(turns: float) -> float:
        """Return the pair, not rounded, with this many turns in the original length."""
        length = config.rope_original_length / (2 * math.pi * turns)
        return count * math.log(length) / math.log(config.rotary_base)

    first = find_pair(config.rope_beta_fast)
    last = find_pair(config.rope_beta_slow)
    if config.rope_truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * count - 1)
    if first == last:
        # A step instead of a ramp.
        last += 0.001
    return first, last


@declare()
class _Rotate(torch.autograd.Function):
    """Rotate channel pairs (i, i + dim/2) by the position's angle.

    The backward pass rotates by the opposite angle, so no activation is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of [s, b, g, n, d] into a new tensor."""
    if not x.is_cuda:
        # On a CPU, an operation on a part of the fused projection takes four times as long as on a
        # contiguous tensor. The copy takes less than one of them.
        x = x.contiguous()
    # Channels after the rotary ones pass unchanged (--rotary-percent below 1).
    half = cos.shape[-1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    # The memory format is set because `x` may be a view of the fused projection with other strides.
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # The arithmetic is in fp32 for any dtype of x, because cos and sin promote it.
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = rest
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [s, b, g, n, d], without complex numbers."""
    if torch.compiler.is_compiling():
        # A compiler fuses the plain formula with the operations around it.
        half = cos.shape[-1]
        first = x[..., :half]
        second = x[..., half : 2 * half]
        rest = x[..., 2 * half :]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
            x.dtype
        )
        return torch.cat((turned, rest), dim=-1)
    if not torch.is_grad_enabled():
        return _turn(x, cos, sin)
    return _Rotate.apply(x, cos, sin)


def compute_alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes, 2^(-8i/n) (https://arxiv.org/abs/2108.12409).

    If the number of heads n is not a power of two, the slopes of the power below it come first.
    Every other slope of the power above it follows.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power) + 1, 2)]


def make_alibi_bias(
    heads: range,
    total_heads: int,
    seq_length: int,
    device: torch.device,
    dtype: torch.dtype,
    queries: int | None = None,
) -> Tensor:
    """Return slope x (j - i) for key j <= query i and -inf for later keys, [1, heads, queries, s].

    Args:
        heads: Numbers of this rank's heads.
        total_heads: Number of heads of the model, from which the slopes follow.
        seq_length: s.
        device: Device of the result.
        dtype: Dtype of the result.
        queries: How many of the last positions have a row. Default: all s.
    """
    slopes = torch.tensor(
        [compute_alibi_slopes(total_heads)[i] for i in heads], device=device, dtype=torch.float32
    )
    # Computed in fp32 and rounded once at the end, because bf16 rounds distances above 256.
    positions = torch.arange(seq_length, device=device, dtype=torch.float32)
    distance = positions.view(1, -1) - positions[-(queries or seq_length) :].view(-1, 1)
    distance.masked_fill_(distance > 0, float("-inf"))
    return (slopes.view(-1, 1, 1) * distance).unsqueeze_(0).to(dtype)


def make_window_bias(
    window: int,
    seq_length: int,
    device: torch.device,
    dtype: torch.dtype,
    queries: int | None = None,
) -> Tensor:
    """Return 0 for the `window` keys up to a query's position and -inf elsewhere.

    The shape is [1, 1, queries, s], for the last `queries` of s positions. Default: all s.
    """
    positions = torch.arange(seq_length, device=device)
    distance = positions[-(queries or seq_length) :].view(-1, 1) - positions.view(1, -1)
    outside = (distance < 0) | (distance >= window)
    bias = torch.zeros(distance.shape, device=device, dtype=dtype)
    return bias.masked_fill_(outside, float("-inf"))[None, None]


class PositionTables:
    """Builder of `Positions`. It keeps the last tables, which all steps and blocks share."""

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        context: ContextParallel,
        *,
        pack_documents: bool = False,
    ) -> None:
        """Start without tables. They are built at the first use.

        Args:
            shape: Sizes of the model.
            tp: The tensor-parallel ranks.
            context: The context-parallel ranks.
            pack_documents: Whether one call computes the attention of all documents.
        """
        self._shape = shape
        self._tp = tp
        self._context = context
        self._pack_documents = pack_documents
        self._key: tuple[int, torch.device, torch.dtype] | None = None
        self._positions = Positions()

    def make_positions(self, inputs: Inputs, dtype: torch.dtype) -> Positions:
        """Return the positions of a microbatch.

        Args:
            inputs: The microbatch, [b, s/c] of it.
            dtype: Dtype of the activations.
        """
        key = (inputs.tokens.shape[1] * self._context.size, inputs.tokens.device, dtype)
        # During curriculum learning the length changes, and evaluation uses the full length. Only
        # one set of tables is kept, because ALiBi's bias grows with the square of the length.
        if key != self._key:
            self._key, self._positions = key, self._make(*key)
        positions = self._positions
        if (
            inputs.position_ids is not None
            and positions.cos is not None
            and positions.sin is not None
        ):
            # Positions restart at document boundaries. Each sample then picks its own rows.
            rows = inputs.position_ids.t()
            cos, sin = (
                table.flatten(1)[rows][:, :, None, None] for table in (positions.cos, positions.sin)
            )
            positions = replace(positions, cos=cos, sin=sin)
        elif positions.cos is not None and positions.sin is not None:
            cos, sin = (
                take_own(table, self._context, 0) for table in (positions.cos, positions.sin)
            )
            positions = replace(positions, cos=cos, sin=sin)
        if inputs.documents is None:
            return positions
        packed = None
        if self._pack_documents:
            packed = pack_documents(inputs.documents, inputs.tokens.device)
        return replace(positions, documents=inputs.documents, packed=packed)

    def _make(self, seq_length: int, device: torch.device, dtype: torch.dtype) -> Positions:
        """Build the tables of the configured kind of positions."""
        config = self._shape.config
        context = self._context
        # A table has a row for each query of the longest product.
        queries = seq_length
        if context.size > 1 and not context.exchange_heads:
            queries = seq_length // (2 * context.size)
        # The embedding has the table of learned positions.
        positions = Positions(context=context)
        if self._shape.rotary_dim:
            cos, sin = make_scaled_rotary_table(seq_length, self._shape, device)
            positions = replace(positions, cos=cos, sin=sin)
        if self._shape.has_alibi:
            n = config.num_attention_heads
            local = n // self._tp.size
            heads = range(self._tp.rank * local, (self._tp.rank + 1) * local)
            if context.exchange_heads:
                share = local // context.size
                heads = heads[context.rank * share : (context.rank + 1) * share]
            bias = make_alibi_bias(heads, n, seq_length, device, dtype, queries)
            positions = replace(positions, bias=bias)
        window = config.sliding_window
        if window is None or window >= seq_length:
            return replace(positions, window_bias=positions.bias)
        # No query of a part reads more keys.
        keys = min(seq_length, queries + window - 1)
        window_bias = make_window_bias(window, keys, device, dtype, queries)
        if positions.bias is not None:
            window_bias = window_bias + positions.bias[..., -keys:]
        return replace(positions, window_bias=window_bias)
