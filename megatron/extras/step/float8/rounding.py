"""Rounding to float8 with scales that are powers of two, and products of rounded matrices.

A scale is a power of two, so multiplying by it changes no digit. The only error is that of the
rounding to float8. Source: https://arxiv.org/abs/2209.05433. Scales and padding are torchao's. Its
import takes seconds, and logs lines about kernels that are not used here, which are suppressed.

On a GPU, Triton's kernels find the largest value, and round in the order of rows, of columns or in
both (`rounding_kernel.py`). PyTorch's operators are the reference, and give the same bits.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from megatron.parallel.torch_private import make_operator

_LOGGERS = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _LOGGERS]
for _logger in _LOGGERS:
    _logger.setLevel(logging.ERROR)
try:
    from torchao.float8.float8_utils import amax_to_scale, pad_tensor_for_matmul
finally:
    for _logger, _level in zip(_LOGGERS, _levels, strict=True):
        _logger.setLevel(_level)

__all__ = ["amax_to_scale", "pad_tensor_for_matmul"]


FORWARD = torch.float8_e4m3fn
"""The format of inputs and weights."""
LONGEST_ROW = 1 << 14
"""A kernel keeps rows up to this length in registers, so that it reads them once."""
_DIMENSIONS = {False: (0, 1), True: (1,)}
"""Whether each row has a scale -> the dimensions that share one."""

Order = Literal["rows", "columns", "both"]
"""The order in memory in which a product needs the values. The first operand of torch's operator
is stored by rows, and the second one by columns."""


@dataclass(frozen=True)
class Rounded:
    """A matrix [m, k] in float8."""

    values: Tensor
    """The matrix times its scale, in float8."""
    inverse: Tensor
    """1 / scale in fp32: a scalar, [m, 1], or [1, k] after a transposition."""
    other: Tensor | None = None
    """The same values in the other order, if a kernel has written both."""

    def t(self) -> "Rounded":
        """Return the transposed matrix."""
        other = None if self.other is None else self.other.t()
        return Rounded(self.values.t(), self.inverse.t(), other)

    def store_by_rows(self) -> Tensor:
        """Return the values in the order of rows. They are copied if they have no such order."""
        if self.other is not None and self.other.is_contiguous():
            return self.other
        return self.values.contiguous()


def _shape_scales(x: Tensor, by_row: bool) -> tuple[int, ...]:
    return (x.shape[0], 1) * by_row


def _make_largest(x: Tensor, by_row: bool) -> Tensor:
    return x.new_zeros(_shape_scales(x, by_row), dtype=torch.float32)


def _make_rounded(x: Tensor, by_row: bool, dtype: torch.dtype) -> list[Tensor]:
    """Return memory for values in the order of rows, and for inverse scales."""
    return [
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(_shape_scales(x, by_row), dtype=torch.float32),
    ]


def _make_tiles(
    x: Tensor, largest: Tensor, whole: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> list[Tensor]:
    made = []
    if rows:
        made += _make_rounded(x, largest.dim() > 0, dtype)
    if columns:
        made += _make_rounded(x.t(), False, dtype)
    return made


@make_operator("find_largest", _make_largest)
def _find_largest(x: Tensor, by_row: bool) -> Tensor:
    from megatron.extras.step.float8.rounding_kernel import launch_largest

    largest = _make_largest(x, by_row)
    launch_largest(x, largest)
    return largest


@make_operator("round_complete_rows", lambda x, dtype: _make_rounded(x, True, dtype))
def _round_rows(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the values [m, k] and the inverse scales [m, 1]."""
    from megatron.extras.step.float8.rounding_kernel import launch_rows

    values, inverse = _make_rounded(x, True, dtype)
    launch_rows(x, values, inverse)
    return [values, inverse]


@make_operator("round_tiles", _make_tiles)
def _round_tiles(
    x: Tensor, largest: Tensor, whole: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> list[Tensor]:
    """Return values and inverse scales in the order of rows, of columns [k, m], or in both."""
    from megatron.extras.step.float8.rounding_kernel import launch_tiles

    made = _make_tiles(x, largest, whole, dtype, rows, columns)
    launch_tiles(x, largest, whole, made[:2] * rows, made[-2:] * columns)
    return made


# Operators without a result need no function for their shapes.
@torch.library.custom_op("megatron::find_all_largest", mutates_args=("largest",))
def _find_all_largest(
    matrices: list[Tensor], starts: list[int], wholes: list[int], largest: Tensor, by_row: bool
) -> None:
    from megatron.extras.step.float8.rounding_kernel import launch_all_largest

    launch_all_largest(matrices, starts, wholes, largest, by_row=by_row)


@torch.library.custom_op("megatron::round_all_tiles", mutates_args=("rounded",))
def _round_all_tiles(weights: list[Tensor], rounded: list[Tensor]) -> None:
    from megatron.extras.step.float8.rounding_kernel import launch_all_tiles

    launch_all_tiles(weights, rounded)


def _has_kernels(x: Tensor) -> bool:
    """Return whether kernels round on the device of a matrix.

    A CPU runs them only in Triton's interpreter, which is for tests.
    """
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _align(x: Tensor) -> Tensor:
    """Return a matrix whose rows are adjacent, as the kernels need them."""
    if x.stride(-1) != 1:
        return x.detach().contiguous()
    return x.detach()


def find_largest(x: Tensor, *, by_row: bool) -> Tensor:
    """Return the largest absolute value of a matrix [m, k] in fp32, a scalar or [m, 1].

    It is infinite if there is a nan. Otherwise ranks could get different results, because backends
    do not agree on the maximum of a nan and a number.
    """
    if _has_kernels(x):
        if not by_row:
            # The kernel reads a block of memory.
            x = x.contiguous()
        return _find_largest(_align(x), by_row)
    largest = torch.linalg.vector_norm(x, math.inf, dim=_DIMENSIONS[by_row], keepdim=by_row)
    return largest.float().nan_to_num(nan=math.inf, posinf=math.inf)


def round_to_float8(
    x: Tensor, largest: Tensor, dtype: torch.dtype, order: Order = "rows"
) -> Rounded:
    """Round a matrix [m, k] to float8.

    With an infinity or a nan in the tensor, the scale is 0 and each product becomes nan. The step
    is then skipped on all ranks.

    Args:
        x: The matrix.
        largest: The largest absolute value of what has the same scale, a scalar or [m, 1].
        dtype: The float8 format.
        order: The order that a kernel stores. Only a matrix with one scale has more than "rows".
    """
    if x.dtype != torch.bfloat16 or not _has_kernels(x):
        scale = amax_to_scale(largest, dtype, round_scales_to_power_of_2=True)
        return Rounded(_convert(x.detach(), scale, dtype), scale.reciprocal())
    made = _round_tiles(_align(x), largest, largest, dtype, order != "columns", order != "rows")
    return _join(made, order)


def _join(made: list[Tensor], order: Order) -> Rounded:
    """Return the matrix that `_round_tiles` has written."""
    if order == "columns":
        return Rounded(made[0].t(), made[1])
    if order == "both":
        return Rounded(made[0], made[1], made[2].t())
    return Rounded(made[0], made[1])


def round_complete_rows(x: Tensor, dtype: torch.dtype) -> Rounded:
    """Round a matrix [m, k] with the scale of each row, which has all values of the row."""
    if x.dtype == torch.bfloat16 and _has_kernels(x) and x.shape[1] <= LONGEST_ROW:
        return Rounded(*_round_rows(_align(x), dtype))
    return round_to_float8(x, find_largest(x, by_row=True), dtype)


def round_weight(
    x: Tensor, largest: Tensor, whole: Tensor, dtype: torch.dtype
) -> tuple[Rounded, Rounded]:
    """Round a weight [out, in] for the forward and for the backward pass.

    Args:
        x: In `dtype`, or its master in fp32.
        largest: The largest absolute values for the forward pass, a scalar or [out, 1].
        whole: The largest absolute value of the complete weight, a scalar.
        dtype: The dtype that it is rounded to before float8.
    """
    by_row = largest.dim() > 0
    if dtype != torch.bfloat16 or not _has_kernels(x):
        x = x.to(dtype)
        forward = round_to_float8(x, largest, FORWARD)
        if not by_row:
            return forward, forward
        return forward, round_to_float8(x, whole, FORWARD)
    made = _round_tiles(_align(x), largest, whole, FORWARD, True, True)
    return Rounded(made[0], made[1]), Rounded(made[2].t(), made[3])


def find_all_largest(
    matrices: Sequence[Tensor],
    starts: Sequence[int],
    wholes: Sequence[int],
    largest: Tensor,
    *,
    by_row: bool,
) -> None:
    """Raise largest absolute values to those of many matrices in fp32. See `find_largest`.

    Args:
        matrices: [m, k] each, contiguous.
        starts: Where in `largest` the value of a matrix, or of its first row, is.
        wholes: Where that of all rows is. It is used with `by_row`.
        largest: Zeros, or what other matrices have left.
        by_row: Whether each row has a value.
    """
    if _has_kernels(largest):
        _find_all_largest(list(matrices), list(starts), list(wholes), largest, by_row)
        return
    for matrix, start, whole in zip(matrices, starts, wholes, strict=True):
        found = find_largest(matrix, by_row=by_row).flatten()
        part = largest[start : start + len(found)]
        torch.maximum(part, found, out=part)
        if by_row:
            largest[whole] = largest[whole].maximum(part.max())


def round_weights_in_place(
    weights: Sequence[tuple[Tensor, Tensor, Tensor]],
    rounded: Sequence[tuple[Rounded, Rounded]],
    dtype: torch.dtype,
) -> None:
    """Write the results of `round_weight` into the memory of earlier ones.

    Args:
        weights: For each weight, the first three arguments of `round_weight`.
        rounded: The earlier results.
        dtype: See `round_weight`.
    """
    if dtype == torch.bfloat16 and _has_kernels(weights[0][0]):
        outs = [(one.values, one.inverse, two.values.t(), two.inverse) for one, two in rounded]
        _round_all_tiles(list(chain(*weights)), list(chain(*outs)))
        return
    for arguments, pair in zip(weights, rounded, strict=True):
        for old, new in zip(pair, round_weight(*arguments, dtype), strict=True):
            old.values.copy_(new.values)
            old.inverse.copy_(new.inverse)


def _convert(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # The largest value times its scale does not exceed the format, so nothing is clamped. bf16 has
    # the range of fp32, so the product is exact in bf16 and needs no copy in fp32. A product below
    # the normal range of bf16 becomes zero in float8 in any case.
    if x.dtype == torch.bfloat16:
        return (x * scale.to(x.dtype)).to(dtype)
    return (x.float() * scale).to(dtype)


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
    left = _pad(a.store_by_rows(), 1)
    right = _pad(b.t().store_by_rows(), (0, 1)).t()
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
