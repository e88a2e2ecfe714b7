"""Rounding to float8 with scales that are powers of two, and products of rounded matrices.

A scale is a power of two, so multiplying by it changes no digit. The only error is that of the
rounding to float8. Source: https://arxiv.org/abs/2209.05433. Scales and padding are torchao's.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.extras.float8.torchao_import import (
    amax_to_scale,
    pad_tensor_for_matmul,
)

FORWARD = torch.float8_e4m3fn
"""The format of inputs and weights."""
_DIMENSIONS = {False: (0, 1), True: (1,)}
"""Whether each row has a scale -> the dimensions that share one."""


@dataclass(frozen=True)
class Rounded:
    """A matrix [m, k] in float8."""

    values: Tensor
    """The matrix times its scale, in float8."""
    inverse: Tensor
    """1 / scale in fp32: a scalar, [m, 1], or [1, k] after a transposition."""

    def t(self) -> "Rounded":
        """Return the transposed matrix."""
        return Rounded(self.values.t(), self.inverse.t())


def find_largest(x: Tensor, *, by_row: bool) -> Tensor:
    """Return the largest absolute value of a matrix [m, k] in fp32, a scalar or [m, 1].

    It is infinite if there is a nan. Otherwise ranks could get different results, because backends
    do not agree on the maximum of a nan and a number.
    """
    largest = torch.linalg.vector_norm(x, math.inf, dim=_DIMENSIONS[by_row], keepdim=by_row)
    return largest.float().nan_to_num(nan=math.inf, posinf=math.inf)


def round_to_float8(
    x: Tensor, largest: Tensor, dtype: torch.dtype, *, compiled: bool = False
) -> Rounded:
    """Round a matrix [m, k] to float8.

    With an infinity or a nan in the tensor, the scale is 0 and each product becomes nan. The step
    is then skipped on all ranks.

    Args:
        x: The matrix.
        largest: The largest absolute value of what has the same scale, a scalar or [m, 1].
        dtype: The float8 format.
        compiled: Convert the values in one kernel that torch.compile makes, with the same result.
    """
    # A compiler may round the scale's logarithm differently, so only the conversion is compiled.
    scale = amax_to_scale(largest, dtype, round_scales_to_power_of_2=True)
    convert = compile_conversion() if compiled else _convert
    return Rounded(convert(x.detach(), scale, dtype), scale.reciprocal())


def _convert(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # The largest value times its scale does not exceed the format, so nothing is clamped. bf16 has
    # the range of fp32, so the product is exact in bf16 and needs no copy in fp32. A product below
    # the normal range of bf16 becomes zero in float8 in any case.
    if x.dtype == torch.bfloat16:
        return (x * scale.to(x.dtype)).to(dtype)
    return (x.float() * scale).to(dtype)


@functools.cache
def compile_conversion() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Return `_convert` as a compiled function for matrices of any size."""
    return torch.compile(_convert, dynamic=True)


def multiply_rounded(
    a: Rounded, b: Rounded, dtype: torch.dtype, *, emulated: bool, fast: bool
) -> Tensor:
    """Return the product of two rounded matrices [m, k] and [k, n], [m, n].

    Args:
        a: A matrix with one scale, or with one for each row.
        b: A matrix with one scale, or with one for each column.
        dtype: The dtype of the result.
        emulated: Multiply in `dtype`. In fp32 the products of float8 values are exact.
        fast: Let the tensor cores of a GPU add up with fewer bits, which is faster.
    """
    if emulated:
        product = a.values.to(dtype) @ b.values.to(dtype)
        # One after the other, because the product of both inverses may be out of range.
        return product * a.inverse.to(dtype) * b.inverse.to(dtype)
    return _multiply_on_tensor_cores(a, b, dtype, fast=fast)


def _multiply_on_tensor_cores(a: Rounded, b: Rounded, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return the product by `torch._scaled_mm`. See `multiply_rounded`."""
    columns = b.values.shape[1]
    # The kernels need sizes that are multiples of 16, the first matrix stored by rows and the
    # second by columns. Zeros change no sum.
    left = _pad(a.values.contiguous(), 1)
    right = _pad(b.values.t().contiguous(), (0, 1)).t()
    scales = a.inverse, b.inverse
    # Both must have one scale, or neither.
    if a.inverse.dim() or b.inverse.dim():
        padded = torch.nn.functional.pad(
            b.inverse.expand(1, columns), (0, right.shape[1] - columns)
        )
        scales = a.inverse.expand(left.shape[0], 1).contiguous(), padded.contiguous()
    out = torch._scaled_mm(
        left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, use_fast_accum=fast
    )
    return out[:, :columns]


def _pad(matrix: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Pad dimensions of a matrix to multiples of 16. It is copied only if one is no multiple."""
    chosen = (dims,) if isinstance(dims, int) else dims
    if all(matrix.shape[dim] % 16 == 0 for dim in chosen):
        return matrix
    return pad_tensor_for_matmul(matrix, dims)
