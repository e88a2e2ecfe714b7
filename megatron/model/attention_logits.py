"""The largest logit of attention, which the attention kernels do not return.

Logits that grow without bound are a known cause of divergence
(https://arxiv.org/abs/2309.14322, section 3.1).

b: micro-batch, s: sequence, g: query groups, n: heads, d: head width, t: tensor-parallel size.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.model.attention_core import list_pieces, share_sequence
from megatron.model.inputs import Documents
from megatron.model.loss import split_rows
from megatron.parallel.context import Keys
from megatron.parallel.mesh import ContextParallel


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
        own_bias = piece.select_bias(bias)
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
