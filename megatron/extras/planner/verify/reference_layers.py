"""The reference's dropout and gated delta net, by formulas of their own for complete activations.

Nothing of `parallel/rng.py` is used for masks, so a wrong number of a site, of a row or of a sample
gives other masks than in the run. Nothing of the chunks, the convolution and the state of
`model/gated_delta_net.py` is used for a delta net, which is computed token by token. So their
errors are found and not computed twice.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatron.model.attention import Attention
from megatron.model.gated_delta_net import GatedDeltaNet
from megatron.model.gpt import GPT
from megatron.model.positions import Positions
from megatron.plan.run_plan import Plan

_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def list_microbatches(plan: Plan, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the number, the data-parallel rank and the samples of each microbatch of a batch.

    Args:
        plan: The plan of the copy.
        size: Samples of the batch.
    """
    micro = plan.config.batch.micro_batch_size
    for number, start in enumerate(range(0, size, micro)):
        microbatch, data = divmod(number, plan.data_parallel_size)
        yield microbatch, data, slice(start, start + micro)


def compute_philox(counter: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return the blocks of Philox 4x64-10 of counters [..., 4], with the key (seed, 0).

    Source: https://doi.org/10.1145/2063384.2063405, section 4.3.
    """
    a, b, c, d = np.moveaxis(counter, -1, 0)
    for turn in range(10):
        keys = [(k + turn * step) % 2**64 for k, step in zip((seed, 0), _WEYL, strict=True)]
        high_a, low_a = _multiply(a, _FACTORS[0])
        high_c, low_c = _multiply(c, _FACTORS[1])
        a, b, c, d = high_c ^ b ^ np.uint64(keys[0]), low_c, high_a ^ d ^ np.uint64(keys[1]), low_a
    return np.stack((a, b, c, d), axis=-1)


def _multiply(x: NDArray[np.uint64], factor: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the high and the low 64 bits of x * factor."""
    high, low = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    # Each of these has less than 64 bits.
    bottom = (x & _LOW) * low
    middle = (x >> _HALF) * low + (bottom >> _HALF)
    cross = (x & _LOW) * high + (middle & _LOW)
    return (x >> _HALF) * high + (middle >> _HALF) + (cross >> _HALF), x * np.uint64(factor)


class ReferenceMasks:
    """Draws masks for complete activations. Set `iteration` before a step."""

    def __init__(self, seed: int, length: int) -> None:
        """Create the masks of a run with a seed and a --seq-length."""
        self._seed = seed
        self._length = length
        self.iteration = 0

    def draw(self, site: int, rows: NDArray[np.int64], width: int, samples: int) -> Tensor:
        """Return the numbers in [0, 2^16) of the elements, [samples, *rows.shape, width]."""
        blocks = -(-width // 16)
        counter = np.empty((samples, *rows.shape, blocks, 4), dtype=np.uint64)
        # The first block of row 0 has the counter 1.
        counter[..., 0] = rows[..., None] * blocks + np.arange(1, blocks + 1)
        counter[..., 1] = site
        counter[..., 2] = np.arange(samples).reshape(-1, *[1] * (rows.ndim + 1))
        counter[..., 3] = self.iteration
        words = compute_philox(counter, self._seed)[..., None]
        numbers = words >> np.arange(0, 64, 16, dtype=np.uint64) & np.uint64(0xFFFF)
        numbers = numbers.reshape(*counter.shape[:-2], 16 * blocks)[..., :width]
        return torch.from_numpy(numbers.astype(np.int64))

    def drop(self, x: Tensor, key: Tensor, residual: Tensor | None, p: float, site: int) -> Tensor:
        """Return residual + dropout(x) for the residual stream, [s, B, h]."""
        length, samples, width = x.shape
        numbers = self.draw(site, np.arange(length), width, samples).transpose(0, 1)
        out = x * _keep(numbers, p)
        if residual is None:
            return out
        return residual + out

    def attend(
        self,
        attention: Attention,
        p: float,
        site: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Positions,
        _: object,
    ) -> Tensor:
        """Return attention, [B, n, s, d], from the scores of all pairs of positions."""
        samples, heads, length, width = query.shape
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        logits = query @ key.transpose(2, 3) / math.sqrt(width)
        bias = attention._select_bias(positions)
        if bias is not None:
            logits = logits + bias
        seen = torch.ones((samples, 1, length, length), dtype=torch.bool).tril()
        for sample, bounds in enumerate(positions.documents or ()):
            for begin, end in pairwise(bounds):
                seen[sample, :, begin:end, :begin] = False
        rows = np.arange(heads)[:, None] * self._length + np.arange(length)
        kept = _keep(self.draw(site, rows, self._length, samples)[..., :length], p)
        return (logits.masked_fill(~seen, -math.inf).softmax(dim=3) * kept) @ value


def _keep(numbers: Tensor, p: float) -> Tensor:
    """Return the factors of dropout, from numbers in [0, 2^16)."""
    threshold = round(p * 2**16)
    return (numbers >= threshold) * (2**16 / (2**16 - threshold))


def use_masks(model: GPT, plan: Plan) -> ReferenceMasks:
    """Let the complete model use the masks of the reference.

    Args:
        model: The reference's model.
        plan: The plan of the copy.
    """
    config = plan.config.model
    masks = ReferenceMasks(plan.config.batch.seed, config.seq_length)
    hidden = config.hidden_dropout
    if hidden > 0:
        assert model.embedding is not None, "the model is complete"
        _replace_forward(model.embedding.dropout, masks, hidden, 0)
    for number, block in model.get_blocks().items():
        # Site 0 is the embedding. Each block has three sites.
        site = 1 + 3 * number
        if hidden > 0:
            _replace_forward(block.attention_dropout, masks, hidden, site + 1)
            _replace_forward(block.mlp_dropout, masks, hidden, site + 2)
        if config.attention_dropout > 0 and isinstance(block.attention, Attention):
            compute = partial(masks.attend, block.attention, config.attention_dropout, site)
            block.attention._compute_core = compute  # type: ignore[method-assign]
    return masks


def _replace_forward(dropout: Any, masks: ReferenceMasks, p: float, site: int) -> None:
    dropout.forward = lambda x, key, residual=None: masks.drop(x, key, residual, p, site)


def use_recurrence(model: GPT) -> None:
    """Let each gated delta net of a complete model compute its state token by token."""
    for block in model.get_blocks().values():
        if isinstance(block.attention, GatedDeltaNet):
            block.attention._mix = partial(_mix, block.attention)  # type: ignore[method-assign]


def _mix(
    layer: GatedDeltaNet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    alpha: Tensor,
    positions: Positions,
) -> Tensor:
    """Return the outputs of all tokens, [s, b, m, d_v], from those of the projections."""
    length, samples, heads = beta.shape
    token = torch.arange(length).unsqueeze(1)
    documents = positions.documents or ((0, length),) * samples
    # The number of each token's document, [s, b].
    number = torch.stack([(token >= torch.tensor(each[1:])).sum(1) for each in documents], 1)

    def convolve(x: Tensor, weight: Tensor, width: int) -> Tensor:
        total = torch.zeros_like(x)
        for back in range(weight.shape[1]):
            earlier = F.pad(x, (0, 0, 0, 0, back, 0))[:length]
            # Tokens before the sample have the number -1, which no document has.
            same = F.pad(number, (0, 0, back, 0), value=-1)[:length] == number
            total = total + same.unsqueeze(2) * earlier * weight[:, -1 - back]
        found = F.silu(total).unflatten(2, (-1, width))
        return found.repeat_interleave(heads // found.shape[2], 2)

    query = convolve(query, layer.query_convolution, layer.key_dim)
    key = convolve(key, layer.key_convolution, layer.key_dim)
    value = convolve(value, layer.value_convolution, layer.value_dim)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    decay = torch.exp(-layer.A_log.exp() * F.softplus(alpha + layer.dt_bias))
    beta = beta.sigmoid() * layer.beta_factor
    state = torch.zeros(samples, heads, layer.key_dim, layer.value_dim)
    found = []
    for now in range(length):
        kept = decay[now] * (number[now] == number[max(0, now - 1)]).unsqueeze(1)
        state = kept[..., None, None] * state
        # The state answers the key with the value that it has stored for it.
        error = value[now] - (key[now].unsqueeze(3) * state).sum(2)
        state = state + key[now].unsqueeze(3) * (beta[now].unsqueeze(2) * error).unsqueeze(2)
        found.append((query[now].unsqueeze(3) * state).sum(2) / layer.key_dim**0.5)
    return torch.stack(found)
