"""Tests of the largest logits of attention and of the output against complete matrices in fp64."""

import math
from itertools import pairwise

import pytest
import torch
from model.builders import build, tiny_config
from torch import Tensor

from megatron.model import loss
from megatron.model.attention import find_largest_attention_logit
from megatron.model.loss import VocabSlice, find_largest_output_logit
from megatron.model.positions import Positions, make_alibi_bias, make_window_bias

LENGTH = 13
WIDTH = 8
CPU = torch.device("cpu")
FP32 = torch.float32


def draw(heads: int, seed: int) -> Tensor:
    return torch.randn(2, heads, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def find_in_complete_matrix(query: Tensor, key: Tensor, seen: Tensor) -> float:
    """Return the largest logit of the pairs in `seen`, [b, s, s]."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query.double() @ key.double().transpose(2, 3) / math.sqrt(WIDTH)
    return float(logits.abs().where(seen[:, None], 0.0).max())


@pytest.mark.parametrize("bytes_of_a_chunk", [1, 1000, 1 << 20])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["causal", "window", "alibi", "alibi in a window", "documents"])
def test_it_is_that_of_the_complete_matrix(
    kind: str, groups: int, bytes_of_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_CHUNK_BYTES_CPU", bytes_of_a_chunk)
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    seen = (distance >= 0).expand(2, -1, -1).clone()
    bias = None
    documents = None
    if "alibi" in kind:
        bias = make_alibi_bias(range(4), 4, LENGTH, CPU, FP32)
    if "window" in kind:
        window = make_window_bias(3, LENGTH, CPU, FP32)
        bias = window if bias is None else bias + window
        seen &= distance < 3
    if kind == "documents":
        documents = ((0, 4, 5, LENGTH), (0, LENGTH))
        for sample, bounds in enumerate(documents):
            same = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
            for start, stop in pairwise(bounds):
                same[start:stop, start:stop] = True
            seen[sample] &= same
    query = draw(4, seed=1)
    key = draw(groups, seed=2)
    # The largest of all pairs is masked in each case, so a wrong mask gives another result.
    query[:, :, 1] *= 50
    found = float(find_largest_attention_logit(query, key, bias, documents))
    assert found == pytest.approx(find_in_complete_matrix(query, key, seen), rel=1e-6)
    everything = torch.ones_like(seen)
    assert found < find_in_complete_matrix(query, key, everything)


def test_logits_beyond_the_range_of_fp16_are_finite() -> None:
    query = torch.full((1, 1, 2, WIDTH), 200.0, dtype=torch.float16)
    found = float(find_largest_attention_logit(query, query, None, None))
    assert found == pytest.approx(200**2 * math.sqrt(WIDTH), rel=1e-6)
    assert found > torch.finfo(torch.float16).max


def test_nan_is_not_hidden() -> None:
    query = draw(4, seed=1)
    query[1, 3, 7, 0] = math.nan
    assert math.isnan(float(find_largest_attention_logit(query, draw(2, seed=2), None, None)))


def test_a_block_stays_within_documents() -> None:
    """A document of one token has the logit of that token with itself."""
    block = build(tiny_config()).get_blocks()[0]
    x = torch.randn(6, 1, 32, generator=torch.Generator().manual_seed(0))
    documents = (tuple(range(7)),)
    with torch.no_grad():
        found = block.find_largest_attention_logit(x, Positions(documents=documents))
        each = [block.find_largest_attention_logit(x[i : i + 1], Positions()) for i in range(6)]
        together = block.find_largest_attention_logit(x, Positions())
    assert float(found) == pytest.approx(float(max(each)), rel=1e-6)
    assert found < together


@pytest.mark.parametrize("bytes_of_a_chunk", [1, 1 << 20])
def test_output_logits_count_by_their_absolute_value_and_without_padding(
    bytes_of_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_CHUNK_BYTES_CPU", bytes_of_a_chunk)
    hidden = draw(4, seed=1).flatten(0, 1)
    weight = draw(1, seed=2).flatten(0, 2)
    # This logit is the largest one by its absolute value, and it is negative.
    hidden[3, 5] = -9 * weight[7]
    logits = hidden.double() @ weight[:20].double().t()
    assert -logits.min() > logits.max()
    # Padding has logits of zero in training. These would be the largest ones.
    weight[20:] = 100.0
    found = find_largest_output_logit(hidden, weight, VocabSlice(0, 20))
    assert float(found) == pytest.approx(float(-logits.min()), rel=1e-6)
    assert float(find_largest_output_logit(hidden, weight, VocabSlice(40, 0))) == 0.0
