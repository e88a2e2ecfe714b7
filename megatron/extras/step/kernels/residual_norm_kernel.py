"""The Triton kernels of `residual_norm.py`. All arithmetic is in fp32.

They round to 16 bits at the same places as PyTorch's operators: the sum before the norm, and the
gradient of the norm before the gradient of the residual connection is added.
"""

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 256
"""Programs of the backward kernel for rows of at least 4,096 elements: at most two on each of the
132 multiprocessors of an H100. Shorter rows have more of them."""
_ELEMENTS = 2**20
"""Elements of the rows that all programs read at once, if the rows are shorter than that."""
_SUMMED_ROWS = 64
_SUMMED_COLUMNS = 32


@triton.jit
def _forward(
    x,
    branch,
    weight,
    bias,
    total,
    out,
    statistics,
    rows,
    width,
    eps,
    has_branch: tl.constexpr,
    has_bias: tl.constexpr,
    centred: tl.constexpr,
    block: tl.constexpr,
):
    """Write the sum of a row, its norm, and the numbers that the backward pass needs."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    present = column < width
    index = row * width + column
    value = tl.load(x + index, mask=present, other=0.0).to(tl.float32)
    if has_branch:
        value += tl.load(branch + index, mask=present, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + index, rounded, mask=present)
        value = rounded.to(tl.float32)
    if centred:
        mean = tl.sum(value, 0) / width
        tl.store(statistics + rows + row, mean)
        value = tl.where(present, value - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(statistics + row, rstd)
    value = value * rstd * tl.load(weight + column, mask=present, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=present)


@triton.jit
def _backward(
    grad_total,
    grad_out,
    total,
    weight,
    statistics,
    grad,
    parts,
    rows,
    width,
    has_bias: tl.constexpr,
    centred: tl.constexpr,
    block: tl.constexpr,
):
    """Write the gradient of some rows, and their part of the gradients of weight and bias."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, block)
    present = column < width
    w = tl.load(weight + column, mask=present, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((block,), dtype=tl.float32)
    grad_bias = tl.zeros((block,), dtype=tl.float32)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = program.to(tl.int64) + turn * programs
        index = row * width + column
        rstd = tl.load(statistics + row)
        normal = tl.load(total + index, mask=present, other=0.0).to(tl.float32)
        if centred:
            normal = tl.where(present, normal - tl.load(statistics + rows + row), 0.0)
        normal *= rstd
        slope = tl.load(grad_out + index, mask=present, other=0.0).to(tl.float32)
        grad_weight += slope * normal
        if has_bias:
            grad_bias += slope
        slope *= w
        # The derivative of the statistics removes the component along the normalised input, and
        # the mean.
        change = slope - normal * (tl.sum(slope * normal, 0) / width)
        if centred:
            change -= tl.sum(slope, 0) / width
        change = (change * rstd).to(grad.dtype.element_ty).to(tl.float32)
        change += tl.load(grad_total + index, mask=present, other=0.0).to(tl.float32)
        tl.store(grad + index, change.to(grad.dtype.element_ty), mask=present)
    parts += program.to(tl.int64) * width * (1 + has_bias)
    tl.store(parts + column, grad_weight, mask=present)
    if has_bias:
        tl.store(parts + width + column, grad_bias, mask=present)


@triton.jit
def _add_parts(parts, out, programs, size, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Write the sum of the parts of all programs, always in the same order."""
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    total = tl.zeros((block_columns,), dtype=tl.float32)
    for start in range(0, programs, block_rows):
        row = start + tl.arange(0, block_rows)
        inside = (row < programs)[:, None] & (column < size)[None, :]
        index = row.to(tl.int64)[:, None] * size + column[None, :]
        total += tl.sum(tl.load(parts + index, mask=inside, other=0.0), 0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < size)


def count_programs(rows: int, width: int) -> int:
    """Return the programs of the backward kernel, each of which has a part of the gradients.

    The number depends on nothing else, so a sum has the same bits on each GPU of a type.
    """
    return min(rows, max(_PROGRAMS, _ELEMENTS // triton.next_power_of_2(width)))


def launch_forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    total: Tensor | None,
    out: Tensor,
    statistics: Tensor,
    eps: float,
) -> None:
    """Write x + branch and its norm. All tensors are contiguous.

    Args:
        x: [..., h].
        branch: Same shape. None: the norm is that of x, and no sum is written.
        weight: [h].
        bias: [h]. None: there is none.
        total: Same shape as x, the sum. None without a branch.
        out: Same shape as x, the norm.
        statistics: [1 or 2, rows] in fp32: 1 / standard deviation, and the mean of LayerNorm.
        eps: Added to the variance or to the mean square.
    """
    centred, rows, width, block, warps = _measure(out, statistics)
    _forward[(rows,)](
        x,
        branch,
        weight,
        bias,
        total,
        out,
        statistics,
        rows,
        width,
        eps,
        branch is not None,
        bias is not None,
        centred,
        block,
        num_warps=warps,
    )


def launch_backward(
    grad_total: Tensor,
    grad_out: Tensor,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    grad: Tensor,
    parts: Tensor,
    grad_vectors: Tensor,
) -> None:
    """Write the gradients of the sum, the weight and the bias. All tensors are contiguous.

    Args:
        grad_total: [..., h], the gradient of the sum from other uses of it.
        grad_out: Same shape, the gradient of the norm.
        total: Same shape, the sum.
        weight: [h].
        statistics: What the forward kernel wrote.
        grad: Same shape as the sum, its gradient.
        parts: [programs, vectors, h] in fp32, overwritten.
        grad_vectors: [vectors, h], the gradients of the weight, and of the bias if there is one.
    """
    centred, rows, width, block, warps = _measure(grad, statistics)
    programs, vectors, _ = parts.shape
    _backward[(programs,)](
        grad_total,
        grad_out,
        total,
        weight,
        statistics,
        grad,
        parts,
        rows,
        width,
        vectors == 2,
        centred,
        block,
        num_warps=warps,
    )
    add_parts(parts, grad_vectors)


def add_parts(parts: Tensor, out: Tensor) -> None:
    """Write the sum of the parts of all programs.

    Args:
        parts: [programs, vectors, h] in fp32, contiguous.
        out: [vectors, h], contiguous.
    """
    size = out.numel()
    _add_parts[(triton.cdiv(size, _SUMMED_COLUMNS),)](
        parts, out, len(parts), size, _SUMMED_ROWS, _SUMMED_COLUMNS
    )


def _measure(out: Tensor, statistics: Tensor) -> tuple[bool, int, int, int, int]:
    """Return whether there is a mean, the rows, their width, and a program's block and warps."""
    rows, width = statistics.shape[1], out.shape[-1]
    block = triton.next_power_of_2(width)
    # A thread has 16 elements of each tensor.
    warps = min(max(block // 512, 1), 32)
    return statistics.shape[0] == 2, rows, width, block, warps
