"""Causal attention of queries on keys: whole samples, documents, and parts of a sequence.

In every call, the last query is at the position of the last key. A query sees the keys up to its
own position. So there may be fewer queries than keys.

b: micro-batch, s: sequence, c: context-parallel size, g: query groups, n: heads, d: head width.
n and g are those of a tensor-parallel rank.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.model.dropout import WeightDropout
from megatron.model.inputs import Documents
from megatron.model.loss import split_rows
from megatron.parallel.context import Keys, exchange_heads, read_keys, return_heads
from megatron.parallel.mesh import ContextParallel


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    drop: WeightDropout | None = None,
) -> Tensor:
    """Call PyTorch's attention, which chooses between flash and other kernels.

    With dropout, products and a softmax compute the same, because these kernels draw masks of their
    own.

    Args:
        query: [b, n, queries, d].
        key: [b, g, keys, d], with at least as many keys as queries.
        value: Same shape.
        bias: [1, 1 or n, queries, keys], with the causal mask, or None.
        drop: Dropout of the weights, or None.
    """
    if drop is not None and not drop.dropout.by_attention_kernel:
        return _attend_with_mask(query, key, value, bias, drop)
    queries, keys = query.shape[2], key.shape[2]
    # A bias includes the causal mask. The kernel does not accept a bias together with is_causal.
    mask = bias
    if bias is None and queries != keys:
        # This import loads torch's compiler. Only shared sequences need it.
        from torch.nn.attention import bias as attention_bias

        # With `is_causal`, the first query would see the first key only.
        mask = attention_bias.causal_lower_right(queries, keys)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0 if drop is None else drop.dropout.p,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    documents: Documents,
    drop: WeightDropout | None = None,
) -> Tensor:
    """Compute attention within each document separately.

    No [s, s] mask of document boundaries is made, and shorter documents cost less. A bias depends
    on distances only, so its upper left corner is the bias of a shorter document.
    """
    samples = []
    for sample, bounds in enumerate(documents):
        parts = []
        for start, stop in pairwise(bounds):
            q, k, v = (t[sample : sample + 1, :, start:stop] for t in (query, key, value))
            length = stop - start
            own_bias = None if bias is None else bias[:, :, :length, :length]
            own = drop and replace(drop, sample=sample, query=start, key=start)
            parts.append(attend(q, k, v, own_bias, own))
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

    def select_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias of this piece, which depends on the distances only."""
        if bias is None:
            return None
        return bias[:, :, -self.query.shape[2] :, -self.key.shape[2] :]


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
    bias: Tensor | None,
    documents: Documents | None,
    window: int | None,
    drop: WeightDropout | None,
    context: ContextParallel,
) -> Tensor:
    """Compute attention over a sequence that context-parallel ranks share.

    Args:
        query: This rank's positions, [b, n, s/c, d].
        key: [b, g, s/c, d].
        value: Same shape.
        bias: [1, 1 or heads, queries, keys], for the longest part and its keys, or None.
        documents: Bounds of the documents of each sample. None: each sample is one document.
        window: Number of keys that a query reads, up to its position. None: all of them.
        drop: Dropout of the weights, or None.
        context: The context-parallel ranks.

    Returns:
        [b, n, s/c, d].
    """
    query, parts = share_sequence(query, key, value, window, context)
    # After the exchange, this rank has a range of the heads for all positions.
    if drop is not None and context.exchange_heads:
        drop = replace(drop, head=drop.head + context.rank * query.shape[1])
    # The results of each sample are in the order of their positions.
    found: list[list[Tensor]] = [[] for _ in documents or range(1)]
    for piece in list_pieces(query, parts, documents, window):
        own = drop and replace(
            drop, sample=piece.sample, query=piece.first_query, key=piece.first_key
        )
        result = attend(piece.query, piece.key, piece.value, piece.select_bias(bias), own)
        found[piece.sample].append(result)
    out = torch.cat([torch.cat(of_sample, dim=2) for of_sample in found])
    if context.exchange_heads:
        return return_heads(out, context)
    return out


def _attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, drop: WeightDropout
) -> Tensor:
    """Compute attention with dropout, as `attend` does, for some queries at a time.

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
        own_bias = None if bias is None else bias[:, :, part, :seen]
        arguments = query[:, :, part], key[:, :, :seen], value[:, :, :seen], own_bias
        compute = partial(_attend_to_block, drop, part.start)
        if len(parts) > 1 and torch.is_grad_enabled():
            # A mask is a function of its place, so there is no random state to preserve.
            out.append(
                checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            out.append(compute(*arguments))
    return torch.cat(out, dim=2) if len(out) > 1 else out[0]


def _attend_to_block(
    drop: WeightDropout,
    first: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
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
    return drop(logits.softmax(dim=3).to(dtype), first) @ value
