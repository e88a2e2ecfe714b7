"""The tokens that the goldfish loss leaves out (https://arxiv.org/abs/2406.10209).

The product of the ids of h tokens is an index into a table of random numbers. The last of the
tokens is left out if its number is below 1/k. The first h - 1 tokens of a sample are never left
out. This is the paper's choice "hash-table", with its size and its seed. The table is drawn on the
CPU, so every device leaves out the same tokens. Products wrap around at 64 bits. An id 0 makes the
product 0, as in the paper's program.
"""

import functools

import torch
from torch import Tensor

_TABLE_SIZE = 1_000_003
_TABLE_SEED = 2971215073


def keep_tokens(labels: Tensor, k: int, h: int) -> Tensor:
    """Return 1 for each label whose loss counts and 0 for the others, [b, s] in fp32.

    Args:
        labels: Ids, [b, s].
        k: One in k labels is left out.
        h: Number of labels, the one itself included, that decide.
    """
    kept = torch.ones(labels.shape, dtype=torch.float32, device=labels.device)
    # A shorter sample has no complete run of h labels.
    if labels.shape[1] < h:
        return kept
    index = labels.unfold(1, h, 1).prod(dim=-1) % _TABLE_SIZE
    kept[:, h - 1 :] = (_make_table(labels.device)[index] >= 1 / k).float()
    return kept


@functools.cache
def _make_table(device: torch.device) -> Tensor:
    """Return the table of random numbers from 0 to 1 on a device."""
    generator = torch.Generator().manual_seed(_TABLE_SEED)
    return torch.rand(_TABLE_SIZE, generator=generator).to(device)
