"""The largest logit of attention, which the attention kernels do not return.

Logits that grow without bound are a known cause of divergence
(https://arxiv.org/abs/2309.14322, section 3.1).

b: micro-batch, s: sequence, g: query groups, n: heads, d: head width, t: tensor-parallel size.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from megatron.model.inputs import Documents
from megatron.model.loss import split_rows


def find_largest_attention_logit(
    query: Tensor, key: Tensor, bias: Tensor | None, documents: Documents | None
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

    Returns:
        A scalar in fp32. It is nan if a logit is.
    """
    samples, _, length, _ = query.shape
    largest = torch.zeros((), dtype=torch.float32, device=query.device)
    for sample, bounds in enumerate(documents or ((0, length),) * samples):
        for start, stop in pairwise(bounds):
            # A bias depends only on the distance of two tokens. Its upper left corner therefore
            # applies to a document at any position.
            found = _search_document(query[sample, :, start:stop], key[sample, :, start:stop], bias)
            largest = torch.maximum(largest, found)
    return largest


def _search_document(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Return the largest logit of one document.

    The logits are computed for some queries at a time, so memory does not grow with the square of
    the length. They are computed in fp32, because large ones exceed the range of fp16.

    Args:
        query: [n/t, l, d] of a document with l tokens.
        key: [g/t, l, d].
        bias: See `find_largest_attention_logit`.
    """
    heads, length, width = query.shape
    groups = key.shape[0]
    query = query.float() / math.sqrt(width)
    key = key.float().transpose(1, 2)
    largest = torch.zeros((), dtype=torch.float32, device=query.device)
    for part in split_rows(length, heads * length, on_gpu=query.is_cuda):
        # The heads of a group are neighbours, so they form one matrix that is multiplied with the
        # key of the group.
        rows = query[:, part].reshape(groups, -1, width)
        # Keys after the last of these queries are masked for all of them.
        logits = torch.bmm(rows, key[:, :, : part.stop]).view(heads, -1, part.stop)
        if bias is None:
            masked = torch.ones(logits.shape[1:], dtype=torch.bool, device=query.device)
            masked = masked.triu(1 + part.start)
        else:
            masked = bias[0, :, part, : part.stop] == -math.inf
        largest = torch.maximum(largest, logits.abs_().masked_fill_(masked, 0.0).amax())
    return largest
