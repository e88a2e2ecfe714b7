"""The tokens that the goldfish loss leaves out (https://arxiv.org/abs/2406.10209).

The ids of h successive tokens are multiplied. The product modulo the table size is an index into a
table of random numbers. The last of the h tokens is left out if the number there is below 1/k. The
first h - 1 tokens of a sample are never left out. This is the strategy "hash-table" of the paper's
program, with the same table size and seed. The table is drawn on the CPU, so every device leaves
out the same tokens. Products wrap around at 64 bits. An id 0 makes the product 0, as it does there.
"""

import functools

import torch
from torch import Tensor

from megatron.config.loss import LossConfig
from megatron.model.inputs import Inputs

_TABLE_SIZE = 1_000_003
_TABLE_SEED = 2971215073


def find_loss_mask(inputs: Inputs, loss: LossConfig, *, training: bool) -> Tensor | None:
    """Return 1 for each position whose loss counts and 0 for the others, [b, s] in fp32.

    None means that all positions count. An evaluation keeps the tokens that training leaves out.
    """
    if not training or not loss.goldfish_loss:
        return inputs.loss_mask
    assert inputs.labels is not None, "the loss needs labels"
    kept = keep_tokens(inputs.labels, loss.goldfish_k, loss.goldfish_h)
    if inputs.loss_mask is None:
        return kept
    return inputs.loss_mask * kept


def keep_tokens(labels: Tensor, k: int, h: int) -> Tensor:
    """Return 1 for each label whose loss counts and 0 for the others, [b, s] in fp32.

    Args:
        labels: Ids, [b, s].
        k: About one in k labels is left out.
        h: A label and the h - 1 labels before it decide whether it is left out.
    """
    kept = torch.ones(labels.shape, dtype=torch.float32, device=labels.device)
    # A shorter sample does not have h labels in a row.
    if labels.shape[1] < h:
        return kept
    index = labels.unfold(1, h, 1).prod(dim=-1) % _TABLE_SIZE
    kept[:, h - 1 :] = (_make_table(labels.device)[index] >= 1 / k).float()
    return kept


@functools.cache
def _make_table(device: torch.device) -> Tensor:
    """Return the table of random numbers in [0, 1) on a device."""
    generator = torch.Generator().manual_seed(_TABLE_SEED)
    return torch.rand(_TABLE_SIZE, generator=generator).to(device)
