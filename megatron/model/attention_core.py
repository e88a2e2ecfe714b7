"""Causal attention of queries on keys: whole samples, documents, and parts of a sequence.

In every call, the last query is at the position of the last key. A query sees the keys up to its
own position. So there may be fewer queries than keys.

b: micro-batch, s: sequence, c: context-parallel size, g: query groups, n: heads, d: head width.
n and g are those of a tensor-parallel rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.model.dropout import WeightDropout
from megatron.model.fused_operators import AttentionKernels
from megatron.model.inputs import Documents
from megatron.model.loss import split_rows
from megatron.parallel.context import Keys, exchange_heads, read_keys, return_heads
from megatron.parallel.mesh import ContextParallel
from megatron.parallel.padding import trim_columns, widen


@dataclass(frozen=True)
class Weighting:
    """How the logits of some queries become weights."""

    bias: Tensor | None = None
    """[1, 1 or n, queries, keys], with the causal mask and the window, or None."""
    window: int | None = None
    """Number of keys that a query reads, up to its position. None: all of them."""
    drop: WeightDropout | None = None
    """Dropout of the weights, or None."""
    head_values: Tensor | None = None
    """A number of each head for the softmax, [n]. None: the softmax of the logits alone."""
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None
    """The softmax with these numbers. See `SoftmaxRow`."""
    kernels: AttentionKernels | None = None
    """Kernels of attention with this softmax. None: products and a softmax compute it."""
    only_window: bool = True
    """Whether the bias has nothing but the causal mask and the window."""
    pads_values: bool = False
    """See `attention_kernels.pads_values`."""

    def cut(self, sample: int, query: int, key: int, queries: int, keys: int) -> "Weighting":
        """Return the weighting of a part of the logits.

        A bias depends on distances only. So its lower right corner is that of the last queries and
        keys, which are at the same position.

        Args:
            sample: Number of the first sample in the microbatch.
            query: Position of the first query in its sample.
            key: Position of the first key in its sample.
            queries: Number of queries.
            keys: Number of keys.
        """
        bias = self.bias
        if bias is not None:
            bias = bias[:, :, bias.shape[2] - queries :, bias.shape[3] - keys :]
        drop = self.drop and replace(self.drop, sample=sample, query=query, key=key)
        return replace(self, bias=bias, drop=drop)

    def take_heads(self, rank: int, heads: int) -> "Weighting":
        """Return the weighting of this rank's heads, of equally many on each rank.

        The bias has been made for these heads.
        """
        first = rank * heads
        drop = self.drop and replace(self.drop, head=self.drop.head + first)
        values = None if self.head_values is None else self.head_values[first : first + heads]
        return replace(self, drop=drop, head_values=values)


def attend(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
    """Call PyTorch's attention, which chooses between flash and other kernels.

    With dropout, products and a softmax compute the same, because these kernels draw masks of their
    own. So they do with another softmax, if no kernel for it takes these inputs.

    Args:
        query: [b, n, queries, d].
        key: [b, g, keys, d], with at least as many keys as queries.
        value: [b, g, keys, width of a value].
        weighting: How the logits become weights.
    """
    bias, drop = weighting.bias, weighting.drop
    if drop is not None and not (weighting.weigh is None and drop.dropout.by_attention_kernel):
        return _attend_with_mask(query, key, value, weighting)
    if weighting.weigh is not None:
        found = None
        if weighting.kernels is not None:
            found = weighting.kernels.attend(query, key, value, weighting)
        return _attend_with_mask(query, key, value, weighting) if found is None else found
    queries, keys = query.shape[2], key.shape[2]
    # A bias includes the causal mask. The kernel does not accept a bias together with is_causal.
    mask = bias
    if bias is None and queries != keys:
        # This import loads torch's compiler. Only shared sequences need it.
        from torch.nn.attention import bias as attention_bias

        # With `is_causal`, the first query would see the first key only.
        mask = attention_bias.causal_lower_right(queries, keys)
    width = value.shape[3]
    if weighting.pads_values:
        value = widen(value, key)
    found = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0 if drop is None else drop.dropout.p,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    # Most models do not need the call.
    if weighting.pads_values:
        return trim_columns(found, width)
    return found


def attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, weighting: Weighting, documents: Documents
) -> Tensor:
    """Compute attention within each document separately.

    No [s, s] mask of document boundaries is made, and shorter documents cost less.
    """
    samples = []
    for sample, bounds in enumerate(documents):
        parts = []
        for start, stop in pairwise(bounds):
            q, k, v = (t[sample : sample + 1, :, start:stop] for t in (query, key, value))
            length = stop - start
            parts.append(attend(q, k, v, weighting.cut(sample, start, start, length, length)))
        samples.append(torch.cat(parts, dim=2))
    return torch.cat(samples)


@dataclass(frozen=True)
class QueryPiece:
    """What a rank computes of one document in one part of the sequence."""

    sample: int
    """Number of the sample in the microbatch. It is 0 for a piece of all samples."""
    first_query: int
    """Position of the first query in its sample."""
    first_key: int
    """Position of the first key in its sample."""
    query: Tensor
    """[b or 1, n, queries, d]."""
    key: Tensor
    """[b or 1, g, keys, d]."""
    value: Tensor
    """Same shape."""

    def cut(self, weighting: Weighting) -> Weighting:
        """Return the weighting of this piece."""
        sizes = self.query.shape[2], self.key.shape[2]
        return weighting.cut(self.sample, self.first_query, self.first_key, *sizes)


def list_pieces(
    query: Tensor, parts: Iterable[Keys], documents: Documents | None, window: int | None
) -> Iterator[QueryPiece]:
    """Yield the pieces of this rank, part by part.

    The pieces of a part come before the next part is asked for, because its keys may still be on
    their way. Without `documents`, each sample is one document, and a piece has all samples.

    Args:
        query: The queries of all parts, [b, n, queries, d].
        parts: The keys of each part.
        documents: Bounds of the documents of each sample.
        window: Number of keys that a query reads, up to its position. None: all of them.
    """
    before = 0
    for keys in parts:
        offset = keys.queries.start
        of_part = query[:, :, before : before + len(keys.queries)]
        before += len(keys.queries)
        # No other bound than the start of the sequence is needed.
        for sample, bounds in enumerate(documents or ((0, keys.queries.stop),)):
            own = slice(None) if documents is None else slice(sample, sample + 1)
            for begin, end in pairwise(bounds):
                # The queries of this part that are in this document.
                start = max(begin, offset)
                stop = min(end, keys.queries.stop)
                if start >= stop:
                    continue
                # No query sees a key of another document, or one before its window.
                first = max(begin, keys.first)
                if window is not None:
                    first = max(first, start - window + 1)
                read = slice(first - keys.first, stop - keys.first)
                yield QueryPiece(
                    sample,
                    start,
                    first,
                    of_part[own, :, start - offset : stop - offset],
                    keys.key[own, :, read],
                    keys.value[own, :, read],
                )


def share_sequence(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, context: ContextParallel
) -> tuple[Tensor, Iterable[Keys]]:
    """Return the queries that this rank computes, and the keys of each part of them.

    Args:
        query: This rank's positions, [b, n, s/c, d].
        key: [b, g, s/c, d].
        value: Same shape.
        window: Number of keys that a query reads, up to its position. None: all of them.
        context: The context-parallel ranks.
    """
    if not context.exchange_heads:
        return query, read_keys(key, value, context, window)
    query, key, value = exchange_heads(query, key, value, context)
    return query, (Keys(range(query.shape[2]), 0, key, value),)


def attend_in_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weighting: Weighting,
    documents: Documents | None,
    context: ContextParallel,
) -> Tensor:
    """Compute attention over a sequence that context-parallel ranks share.

    Args:
        query: This rank's positions, [b, n, s/c, d].
        key: [b, g, s/c, d].
        value: Same shape.
        weighting: How the logits become weights. The bias is that of the longest part.
        documents: Bounds of the documents of each sample. None: each sample is one document.
        context: The context-parallel ranks.

    Returns:
        [b, n, s/c, d].
    """
    query, parts = share_sequence(query, key, value, weighting.window, context)
    # After the exchange, this rank has a range of the heads for all positions.
    if context.exchange_heads:
        weighting = weighting.take_heads(context.rank, query.shape[1])
    # The results of each sample are in the order of their positions.
    found: list[list[Tensor]] = [[] for _ in documents or range(1)]
    for piece in list_pieces(query, parts, documents, weighting.window):
        result = attend(piece.query, piece.key, piece.value, piece.cut(weighting))
        found[piece.sample].append(result)
    out = torch.cat([torch.cat(of_sample, dim=2) for of_sample in found])
    if context.exchange_heads:
        return return_heads(out, context)
    return out


def _attend_with_mask(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
    """Compute attention by products and a softmax, as `attend` does, for some queries at a time.

    The backward pass computes each block again, so the weights of one block are in memory.
    """
    samples, heads, queries, _ = query.shape
    # The last query is at the position of the last key.
    before = key.shape[2] - queries
    # The product of all heads at once needs a key for each head.
    repeats = heads // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    parts = list(split_rows(queries, samples * heads * key.shape[2], on_gpu=query.is_cuda))
    out = []
    for part in parts:
        # Later keys are masked for all of these queries.
        seen = part.stop + before
        bias = weighting.bias
        own_bias = None if bias is None else bias[:, :, part, :seen]
        parts_of_block = query[:, :, part], key[:, :, :seen], value[:, :, :seen], own_bias
        arguments = *parts_of_block, weighting.head_values
        compute = partial(_attend_to_block, weighting, part.start)
        if len(parts) > 1 and torch.is_grad_enabled():
            # A mask is a function of its place, so there is no random state to preserve.
            out.append(
                checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            out.append(compute(*arguments))
    return torch.cat(out, dim=2) if len(out) > 1 else out[0]


def _attend_to_block(
    weighting: Weighting,
    first: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    head_values: Tensor | None,
) -> Tensor:
    """Compute the attention of the queries from `first` on. See `_attend_with_mask`."""
    dtype = query.dtype
    if dtype == torch.float16:
        # Scores may be too large for it.
        query, key = query.float(), key.float()
    # The queries have fewer elements than the scores.
    logits = (query / math.sqrt(query.shape[3]) @ key.transpose(2, 3)).float()
    if bias is None:
        later = torch.ones(logits.shape[2:], dtype=torch.bool, device=query.device)
        later = later.triu(1 + logits.shape[3] - logits.shape[2])
        logits = logits.masked_fill(later, -math.inf)
    else:
        logits = logits + bias
    if weighting.weigh is None or head_values is None:
        weights = logits.softmax(dim=3)
    else:
        weights = weighting.weigh(logits, head_values)
    weights = weights.to(dtype)
    return (weights if weighting.drop is None else weighting.drop(weights, first)) @ value
