"""Quantised weights, read as bf16.

FP8, in files of DeepSeek-V3: a block of 128 x 128 numbers has a scale
(https://arxiv.org/abs/2412.19437, section 3.3.2). The last ones of a row or a column of blocks may
have fewer.

MXFP4, in files of gpt-oss: a block of 32 numbers has a scale. A number has 4 bits: a sign, two bits
of exponent and one of mantissa (E2M1). A scale is a power of two (E8M0), stored with 127 added to
its exponent. Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1
(https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
"""

import torch
from torch import Tensor

FP8_SCALES = "_scale_inv"
"""End of the name of the tensor with the scales of a weight. A scale multiplies."""
FP8_SIDE = 128
"""Rows and columns of a block."""


def list_scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    return tuple(-(-size // FP8_SIDE) for size in shape)


def read_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of a matrix in bf16.

    Args:
        weight: float8[rows, columns].
        scales: fp32, in the shape of `list_scales`.
    """
    rows, columns = weight.shape
    factors = scales.repeat_interleave(FP8_SIDE, dim=0)[:rows]
    factors = factors.repeat_interleave(FP8_SIDE, dim=1)[:, :columns]
    # The product is rounded once.
    return (weight.float() * factors).to(torch.bfloat16)


MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"
"""Ends of the names of the two tensors that hold one matrix of each expert."""
MXFP4_BYTES = 16
"""Bytes of a block."""
MXFP4_NUMBERS = 32
"""Numbers of a block."""
_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 mean. The codes 8 to 15 have the opposite sign."""


def read_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks in bf16. Each is exact, unless it is beyond bf16's range.

    Args:
        blocks: uint8[..., groups, 16]. A byte has two numbers, the first one in its low four bits.
        scales: uint8[..., groups].

    Returns:
        [..., groups x 32].
    """
    values = torch.tensor([*_POSITIVE, *(-x for x in _POSITIVE)], dtype=torch.bfloat16)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(values[codes.int()], exponents).flatten(-2)
