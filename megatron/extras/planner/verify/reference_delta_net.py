"""The reference's gated delta net, token by token from the formulas.

They are those of `megatron/model/gated_delta_net.py`, whose chunks, convolution and state are not
used here, so that their errors are found and not computed twice.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.gated_delta_net import GatedDeltaNet
from megatron.model.gpt import GPT
from megatron.model.positions import Positions


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
