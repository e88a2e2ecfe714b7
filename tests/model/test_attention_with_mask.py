"""Attention with a given dropout mask, which ranks of context parallelism use, against fp64."""

import math

import pytest
import torch
from torch import Tensor

from megatron.model.attention_core import QueryPiece, _attend_with_mask, attend


def make_piece(heads: int, groups: int, queries: int, keys: int) -> QueryPiece:
    """Return the last `queries` positions of a document of `keys` positions, for two samples."""
    generator = torch.Generator().manual_seed(heads * keys)
    query = torch.randn((2, heads, queries, 8), generator=generator)
    key, value = (torch.randn((2, groups, keys, 8), generator=generator) for _ in range(2))
    return QueryPiece(0, 0, slice(keys - queries, keys), slice(0, keys), query, key, value)


def compute_reference(piece: QueryPiece, bias: Tensor | None, kept: Tensor) -> Tensor:
    """Compute each query by itself in fp64, with a loop over samples, heads and queries."""
    samples, heads, queries, width = piece.query.shape
    groups, keys = piece.key.shape[1:3]
    out = torch.zeros(piece.query.shape, dtype=torch.float64)
    for sample in range(samples):
        for head in range(heads):
            group = head * groups // heads
            for row in range(queries):
                seen = keys - queries + row + 1
                key = piece.key[sample, group, :seen].double()
                logits = key @ piece.query[sample, head, row].double() / math.sqrt(width)
                if bias is not None:
                    logits = logits + bias[0, head, row, :seen].double()
                weights = logits.softmax(0) * kept[sample, head, row, :seen].double()
                out[sample, head, row] = weights @ piece.value[sample, group, :seen].double()
    return out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys"), [(4, 4, 7, 7), (6, 2, 3, 11), (4, 1, 1, 5)]
)
def test_masked_attention_equals_the_formula(
    heads: int, groups: int, queries: int, keys: int, has_bias: bool
) -> None:
    piece = make_piece(heads, groups, queries, keys)
    bias = None
    if has_bias:
        after = torch.ones((queries, keys), dtype=torch.bool).triu(keys - queries + 1)
        slopes = torch.linspace(0.1, 0.9, heads)[None, :, None, None]
        distances = torch.arange(keys, dtype=torch.float32) - keys
        bias = (slopes * distances).expand(1, heads, queries, keys).masked_fill(after, -math.inf)
    kept = torch.nn.functional.dropout(torch.ones((2, heads, queries, keys)), 0.4)
    assert {0.0} < set(kept.flatten().tolist())
    found = _attend_with_mask(piece, bias, kept)
    expected = compute_reference(piece, bias, kept)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    # With a mask that keeps everything, it is the attention without dropout.
    torch.testing.assert_close(
        _attend_with_mask(piece, bias, torch.ones_like(kept)),
        attend(piece.query, piece.key, piece.value, bias, 0.0),
        rtol=1e-5,
        atol=1e-5,
    )
