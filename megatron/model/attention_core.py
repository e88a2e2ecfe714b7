"""Causal attention of queries on keys: whole samples, documents, and parts of a sequence.

In every call, the last query is at the position of the last key. A query sees the keys up to its
own position. So there may be fewer queries than keys.

b: micro-batch, s: sequence, c: context-parallel size, g: query groups, n: heads, d: head width.
n and g are those of a tensor-parallel rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.inputs import Documents
from megatron.parallel.context import Keys, exchange_heads, read_keys, return_heads
from megatron.parallel.mesh import ContextParallel


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """Call PyTorch's attention. It chooses between flash and other kernels.

    Args:
        query: [b, n, queries, d].
        key: [b, g, keys, d], with at least as many keys as queries.
        value: Same shape.
        bias: [1, 1 or n, queries, keys], with the causal mask, or None.
        dropout_p: Probability that a weight is zeroed.
    """
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
        dropout_p=dropout_p,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    documents: Documents,
    dropout_p: float,
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
            parts.append(
                attend(q, k, v, None if bias is None else bias[:, :, :length, :length], dropout_p)
            )
        samples.append(torch.cat(parts, dim=2))
    return torch.cat(samples)


@dataclass(frozen=True)
class QueryPiece:
    """What a rank computes of one document in one part of the sequence."""

    part: int
    """Number of the rank's part that has the queries."""
    queries: slice
    """Positions of the queries within the document."""
    keys: slice
    """Positions of the keys within the document."""
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
    query: Tensor, parts: tuple[Keys, ...], documents: Documents | None, window: int | None
) -> Iterator[tuple[int, int, list[QueryPiece]]]:
    """Yield (sample, length, pieces) of each document, in the order of one process.

    Without `documents`, each sample is one document, and one item has the pieces of all samples. A
    rank may have no piece of a document.

    Args:
        query: The queries of all parts, [b, n, queries, d].
        parts: The keys of each part.
        documents: Bounds of the documents of each sample.
        window: Number of keys that a query reads, up to its position. None: all of them.
    """
    of_parts = query.split([len(keys.queries) for keys in parts], dim=2)
    if documents is None:
        # The last part of some rank ends with the sequence. No other bound is needed.
        end = max(keys.queries.stop for keys in parts)
        documents = ((0, end),)
        samples = [slice(None)]
    else:
        samples = [slice(number, number + 1) for number in range(len(documents))]
    for sample, bounds in enumerate(documents):
        for begin, end in pairwise(bounds):
            pieces = []
            for number, (keys, of_part) in enumerate(zip(parts, of_parts, strict=True)):
                offset = keys.queries.start
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
                pieces.append(
                    QueryPiece(
                        number,
                        slice(start - begin, stop - begin),
                        slice(first - begin, stop - begin),
                        of_part[samples[sample], :, start - offset : stop - offset],
                        keys.key[samples[sample], :, read],
                        keys.value[samples[sample], :, read],
                    )
                )
            yield sample, end - begin, pieces


def share_sequence(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, context: ContextParallel
) -> tuple[Tensor, tuple[Keys, ...]]:
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
    dropout_p: float,
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
        dropout_p: Probability that a weight is zeroed. The caller has seeded the generator.
        context: The context-parallel ranks.

    Returns:
        [b, n, s/c, d].
    """
    samples, heads, own, _ = query.shape
    query, parts = share_sequence(query, key, value, window, context)
    if documents is None:
        samples_of_piece = samples
        rows = 1
    else:
        samples_of_piece = 1
        rows = samples
    share = slice(0, heads)
    if context.exchange_heads:
        share = slice(context.rank * query.shape[1], (context.rank + 1) * query.shape[1])
    # Results by sample and part. Those of one part are in the order of their positions.
    found: list[list[list[Tensor]]] = [[[] for _ in parts] for _ in range(rows)]
    for sample, length, pieces in list_pieces(query, parts, documents, window):
        kept = None
        if dropout_p:
            # One process draws the mask of all heads and positions. A part of it is needed here,
            # but the generator cannot skip the rest.
            size = own * context.size if documents is None else length
            ones = query.new_ones((samples_of_piece, heads, size, size))
            kept = F.dropout(ones, dropout_p)[:, share]
        for piece in pieces:
            own_bias = piece.select_bias(bias)
            if kept is None:
                result = attend(piece.query, piece.key, piece.value, own_bias, 0.0)
            else:
                result = _attend_with_mask(piece, own_bias, kept[:, :, piece.queries, piece.keys])
            found[sample][piece.part].append(result)
    context_of_samples = [
        torch.cat([result for of_part in of_sample for result in of_part], dim=2)
        for of_sample in found
    ]
    out = torch.cat(context_of_samples)
    if context.exchange_heads:
        return return_heads(out, context)
    return out


def _attend_with_mask(piece: QueryPiece, bias: Tensor | None, kept: Tensor) -> Tensor:
    """Compute the attention of a piece with a given dropout mask.

    PyTorch's kernels draw the mask themselves, so they cannot be used.

    Args:
        piece: Queries, keys and values.
        bias: [1, 1 or n, queries, keys], with the causal mask, or None.
        kept: The dropout mask, a factor on each weight, [b or 1, n, queries, keys].
    """
    query = piece.query
    heads, queries, width = query.shape[1:]
    # The product of all heads at once needs a key for each head.
    repeats = heads // piece.key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (piece.key, piece.value))
    logits = (query @ key.transpose(2, 3)).float() / math.sqrt(width)
    if bias is None:
        seen = torch.ones(logits.shape[2:], dtype=torch.bool, device=query.device)
        seen = seen.tril(logits.shape[3] - queries)
        logits = logits.masked_fill(~seen, -math.inf)
    else:
        logits = logits + bias
    return (logits.softmax(dim=3).to(query.dtype) * kept) @ value
