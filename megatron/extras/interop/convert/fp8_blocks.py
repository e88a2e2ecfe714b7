"""Weights in FP8 with a scale for each block, as the files of DeepSeek-V3 have them, read as bf16.

A block has 128 x 128 numbers (https://arxiv.org/abs/2412.19437, section 3.3.2). The last ones of a
row or a column of blocks may have fewer.
"""

import torch
from torch import Tensor

SCALES = "_scale_inv"
"""End of the name of the tensor with the scales of a weight. A scale multiplies."""
SIDE = 128
"""Rows and columns of a block."""


def list_scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    return tuple(-(-size // SIDE) for size in shape)


def read_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of a matrix in bf16.

    Args:
        weight: float8[rows, columns].
        scales: fp32, in the shape of `list_scales`.
    """
    rows, columns = weight.shape
    factors = scales.repeat_interleave(SIDE, dim=0)[:rows]
    factors = factors.repeat_interleave(SIDE, dim=1)[:, :columns]
    # The product is rounded once.
    return (weight.float() * factors).to(torch.bfloat16)
