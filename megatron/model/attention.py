"""Causal self-attention, sharded by heads over the tensor-parallel ranks.

s: sequence, b: micro-batch, h: hidden, g: query groups, n: heads, d: head width, t: tensor-parallel
size.

One weight matrix projects to queries, keys and values. Its rows are ordered by group. Each group
has the rows of its n/g query heads, its key and its value. A rank's part consists of complete
groups, so it is a contiguous slice of the matrix. With fewer groups than ranks, a rank has some of
the query heads of one group, and keys and values are replicated (`SharedGroupsLinear`). Multi-head
attention is the case n/g = 1 of grouped-query attention (https://arxiv.org/abs/2305.13245).

Attention kernels do not return the largest logit, so it is computed separately. Logits that grow
without bound are a known cause of divergence (https://arxiv.org/abs/2309.14322, section 3.1).
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.model.attention_core import (
    Weighting,
    attend,
    attend_by_document,
    attend_in_context,
    list_pieces,
    share_sequence,
)
from megatron.model.attention_kernels import pads_values, use_attention_kernels
from megatron.model.dropout import Dropout, WeightDropout
from megatron.model.fused_operators import FusedOperators
from megatron.model.inputs import Documents
from megatron.model.key_value_cache import attend_with_new_token
from megatron.model.layer_parts import ATTENTIONS, SOFTMAXES
from megatron.model.loss import split_rows
from megatron.model.norm import build_query_key_norm
from megatron.model.packed_attention import attend_packed
from megatron.model.positions import Positions, rotate
from megatron.model.shape import LayerDescription, ModelShape
from megatron.parallel.context import Keys
from megatron.parallel.entered_linear import apply_entered_linears
from megatron.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedGroupsLinear,
    list_numbers,
    make_sharded,
    split_evenly,
)
from megatron.parallel.mesh import ContextParallel, TensorParallel
from megatron.parallel.padding import trim_columns
from megatron.parallel.parameter_spec import Specs


def find_largest_attention_logit(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    documents: Documents | None,
    window: int | None = None,
    context: ContextParallel | None = None,
) -> Tensor:
    """Return the largest |q k| / sqrt(d) over all pairs that attention does not mask.

    ALiBi's bias is not added. It grows with the distance, so it would hide the logits.

    Args:
        query: [b, n/t, s, d].
        key: [b, g/t, s, d].
        bias: [1, 1 or n/t, s, s]. Pairs with a bias of -inf are masked. Without a bias, a query
            sees no later key.
        documents: Bounds of the documents of each sample. Pairs of different documents are masked.
            None means that each sample is one document.
        window: Number of keys that a query reads, up to its position. None: all of them.
        context: The ranks that share the sequence. With several, read s/c for s above. Default:
            this rank has all of it.

    Returns:
        A scalar in fp32. It is nan if a logit is.
    """
    # No value is read.
    parts: Iterable[Keys] = (Keys(range(query.shape[2]), 0, key, key),)
    if context is not None and context.size > 1:
        query, parts = share_sequence(query, key, key, window, context)
    largest = torch.zeros((), dtype=torch.float32, device=query.device)
    for piece in list_pieces(query, parts, documents, window):
        own_bias = piece.cut(Weighting(bias)).bias
        for queries, keys in zip(piece.query, piece.key, strict=True):
            largest = torch.maximum(largest, _search_piece(queries, keys, own_bias))
    return largest


def _search_piece(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Return the largest logit of the last queries of one document.

    The logits are computed for some queries at a time, so memory does not grow with the square of
    the length. They are computed in fp32, because large ones exceed the range of fp16.

    Args:
        query: [n/t, queries, d].
        key: [g/t, keys, d]. The last query sees the last of them.
        bias: [1, 1 or n/t, queries, keys]. See `find_largest_attention_logit`.
    """
    heads, length, width = query.shape
    groups, keys, _ = key.shape
    query = query.float() / math.sqrt(width)
    key = key.float().transpose(1, 2)
    largest = torch.zeros((), dtype=torch.float32, device=query.device)
    for part in split_rows(length, heads * keys, on_gpu=query.is_cuda):
        # The heads of a group are neighbours, so they form one matrix that is multiplied with the
        # key of the group.
        rows = query[:, part].reshape(groups, -1, width)
        # Keys after the last of these queries are masked for all of them.
        seen = part.stop + keys - length
        logits = torch.bmm(rows, key[:, :, :seen]).view(heads, -1, seen)
        if bias is None:
            masked = torch.ones(logits.shape[1:], dtype=torch.bool, device=query.device)
            masked = masked.triu(1 + part.start + keys - length)
        else:
            masked = bias[0, :, part, :seen] == -math.inf
        largest = torch.maximum(largest, logits.abs_().masked_fill_(masked, 0.0).amax())
    return largest


class Attention(nn.Module):
    """Attention of this rank's heads, and the output projection."""

    out: RowParallelLinear

    def __init__(self, shape: ModelShape, layer: LayerDescription, dropout: Dropout) -> None:
        """Take the settings. A subclass creates its projections, and then calls `_add_output`.

        Args:
            shape: Sizes of the model.
            layer: The settings that differ between layers.
            dropout: Dropout on the attention probabilities.
        """
        super().__init__()
        self.number = layer.number
        self.rotary = layer.rotary
        self.window = layer.window
        self.softmax = SOFTMAXES.require(shape.config.softmax_type)
        self.dropout = dropout
        self.recompute_core = False
        """Whether the backward pass computes the attention core again (selective recomputation)."""
        self.kernels: tuple[str, ...] = ()
        """The kernels that SDPA may use, the preferred one first. Empty: PyTorch chooses."""
        self.operators = FusedOperators()
        """The kernels that take the place of PyTorch's operators."""

    def _add_output(self, specs: Specs, tp: TensorParallel) -> None:
        """Create the output projection and the parameter of the softmax."""
        self.out = RowParallelLinear(specs, "out", tp)
        if self.softmax.parameter is not None:
            own = make_sharded(specs[self.softmax.parameter], tp)
            self.register_parameter(self.softmax.parameter, own)

    def forward(self, x: Tensor, positions: Positions, dropout_key: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h]."""
        projected, gate = self._enter(x)
        query, key, value = self._project(projected, positions)
        # A mask is a function of its place. Only a kernel that draws its own masks needs the random
        # state of the forward pass again.
        if self.recompute_core and torch.is_grad_enabled():
            context = checkpoint(
                self._compute_core,
                query,
                key,
                value,
                positions,
                dropout_key,
                use_reentrant=False,
                preserve_rng_state=self.dropout.by_attention_kernel,
            )
        else:
            context = self._compute_core(query, key, value, positions, dropout_key)
        # The output projection reads [s, b, n d/t].
        attended = context.permute(2, 0, 1, 3).flatten(2)
        if gate is not None:
            # A rank has the gates of its own heads.
            attended = attended * gate.sigmoid()
        return self.out(attended)

    def find_largest_logit(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the largest logit of this rank's heads on [s, b, h], a scalar in fp32.

        See `find_largest_attention_logit`. With sequence parallelism the input is [s/t, b, h].
        """
        projected, _ = self._enter(x)
        query, key, _ = self._project(projected, positions)
        return find_largest_attention_logit(
            query,
            key,
            self._select_bias(positions),
            positions.documents,
            self.window,
            positions.context,
        )

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what `_project` takes, and the logits of the gate, or None."""
        return x, None

    def _project(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the attention core.

        Returns:
            Queries [b, n/t, s, d], keys [b, g/t, s, d] and values [b, g/t, s, width of a value].
        """
        raise NotImplementedError

    def _select_bias(self, positions: Positions) -> Tensor | None:
        """Return the bias of this layer's logits, [1, 1 or n/t, s, s], or None.

        With context parallelism it is [1, 1 or heads, queries, keys]. See `Positions.bias`.
        """
        if self.window is not None:
            return positions.window_bias
        return positions.bias

    def _compute_core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Positions,
        dropout_key: Tensor,
    ) -> Tensor:
        """Compute causal attention of queries [b, n/t, s, d] on keys and values [b, g/t, s, d].

        With context parallelism, read s/c for s.

        Returns:
            The context, [b, n/t, s, d].
        """
        drop = None
        if self.dropout.is_on:
            # Ranks share the heads, and a mask belongs to a head of the complete model.
            head = self.dropout.tp.rank * query.shape[1]
            drop = WeightDropout(self.dropout, dropout_key, head)
        bias = self._select_bias(positions)
        # A cache hides empty slots by a bias of its own.
        only_window = positions.bias is None and positions.cache is None
        kernels = self.operators.attention
        weighting = Weighting(
            *(bias, self.window, drop, self._get_head_values(query), self.softmax.weigh, kernels),
            only_window=only_window,
            pads_values=value.shape[3] < key.shape[3] and pads_values(self.kernels, query.device),
        )
        # This function runs again in a recomputation, which must use the same kernel.
        allowed = use_attention_kernels(self.kernels)
        # Generation and packed documents have complete sequences.
        if positions.context.size > 1:
            with allowed:
                return attend_in_context(
                    query, key, value, weighting, positions.documents, positions.context
                )
        if positions.packed is not None and self.softmax.weigh is None:
            assert drop is None, "the kernel has no dropout"
            return attend_packed(query, key, value, positions.packed, self.window)
        # The kernel that gets all documents at once needs a GPU.
        if positions.packed is not None and kernels is not None and query.is_cuda:
            return kernels.attend_packed(query, key, value, positions.packed, weighting)
        if positions.cache is not None:
            key, value = positions.cache.append(self.number, key, value)
            if query.shape[2] < key.shape[2] and self.softmax.weigh is None:
                return attend_with_new_token(query, key, value, bias)
        with allowed:
            if positions.documents is not None:
                return attend_by_document(query, key, value, weighting, positions.documents)
            return attend(query, key, value, weighting)

    def _get_head_values(self, query: Tensor) -> Tensor | None:
        """Return the numbers of this rank's heads for the softmax, [n/t], or None."""
        if self.softmax.parameter is not None:
            return self.get_parameter(self.softmax.parameter)
        # They are no parameter, and each is 0.
        return None if self.softmax.weigh is None else query.new_zeros(query.shape[1])


class SelfAttention(Attention):
    """Projection to queries, keys and values, attention, and output projection."""

    def __init__(
        self,
        shape: ModelShape,
        layer: LayerDescription,
        dropout: Dropout,
        tp: TensorParallel,
    ) -> None:
        """Create the projections of this rank's heads.

        Args:
            shape: Sizes of the model.
            layer: The settings that differ between layers.
            dropout: Dropout on the attention probabilities.
            tp: The tensor-parallel ranks.
        """
        super().__init__(shape, layer, dropout)
        config = shape.config
        self.head_dim = shape.head_dim
        self.query_factor = shape.query_factor
        specs = ATTENTIONS.require("dot_product").list_parameters(shape, tp.size, tp.rank)
        self.qkv: ColumnParallelLinear | SharedGroupsLinear
        if shape.query_groups >= tp.size:
            self.groups = split_evenly(shape.query_groups, tp)
            self.heads_per_group = config.num_attention_heads // shape.query_groups
            self.qkv = ColumnParallelLinear(specs, "qkv", tp)
        else:
            # Several ranks share a group, and each has some of its query heads.
            self.groups = 1
            self.heads_per_group = split_evenly(config.num_attention_heads, tp)
            self.qkv = SharedGroupsLinear(specs, "qkv", tp)
        self.q_norm = build_query_key_norm(config, specs.get("q_norm.weight"), tp)
        self.k_norm = build_query_key_norm(config, specs.get("k_norm.weight"), tp)
        self.gate: ColumnParallelLinear | None = None
        if shape.gate_dim:
            self.gate = ColumnParallelLinear(specs, "gate", tp)
        self._add_output(specs, tp)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the projection to queries, keys and values, and the logits of the gate.

        Both are [s, b, ...]. Without a gate, the second is None.
        """
        if self.gate is None:
            return self.qkv(x), None
        numbers: list[Tensor] = []
        if isinstance(self.qkv, SharedGroupsLinear):
            matrix = self.qkv.join()
        else:
            matrix = (self.qkv.weight, self.qkv.bias)
            numbers = list_numbers(self.qkv, self.gate)
        # The tensor-parallel region is entered once for both matrices.
        projected, gate = apply_entered_linears(
            x,
            [matrix, (self.gate.weight, self.gate.bias)],
            self.gate.tp,
            numbers=numbers,
            products=self.qkv.products,
        )
        return projected, trim_columns(gate, self.gate.weight.shape[0])

    def _project(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`. The projection [s, b, (n/t + 2 g/t) d] may have padding."""
        # If several ranks share a group, read 1 for g/t and n/t for n/g in the shapes below.
        s, b, _ = x.shape
        queries = self.heads_per_group
        qkv = trim_columns(x, self.groups * (queries + 2) * self.head_dim)
        qkv = qkv.view(s, b, self.groups, queries + 2, self.head_dim)  # [s, b, g/t, n/g + 2, d]
        query, key, value = self._divide(qkv, positions)
        if self.query_factor != 1.0:
            query = query * self.query_factor
        # From [s, b, g/t, 1 or n/g, d].
        query = query.flatten(2, 3).permute(1, 2, 0, 3)
        key = key.flatten(2, 3).permute(1, 2, 0, 3)
        return query, key, value.flatten(2, 3).permute(1, 2, 0, 3)

    def _divide(self, qkv: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the projection into normalised and rotated queries and keys, and values.

        Args:
            qkv: [s, b, g/t, n/g + 2, d].
            positions: The tables of positions.

        Returns:
            Queries [s, b, g/t, n/g, d], keys and values [s, b, g/t, 1, d].
        """
        queries = self.heads_per_group
        turn = None
        if self.rotary:
            assert positions.cos is not None, "a rotary layer needs tables"
            assert positions.sin is not None, "a rotary layer needs tables"
            if self.operators.rotate_projection is not None:
                return self.operators.rotate_projection(
                    qkv, positions.cos, positions.sin, self.q_norm, self.k_norm
                )
            turn = partial(rotate, cos=positions.cos, sin=positions.sin)
        if turn is not None and self.q_norm is None:
            # Queries and keys are adjacent, so one call rotates both.
            query_key, value = qkv.split((queries + 1, 1), dim=3)
            query, key = turn(query_key).split((queries, 1), dim=3)
            return query, key, value
        # The backward pass of `split` writes its gradient once. That of a slice would fill a tensor
        # with zeros for each part, and add them up.
        query, key, value = qkv.split((queries, 1, 1), dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query)
            key = self.k_norm(key)
        if turn is not None:
            query = turn(query)
            key = turn(key)
        return query, key, value
