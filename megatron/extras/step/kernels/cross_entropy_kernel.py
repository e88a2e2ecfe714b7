"""The Triton kernels of `cross_entropy.py`.

A program of the first kernel reads a complete row. It keeps a running maximum and the sum of
exp(logit - maximum), and multiplies the sum by exp(old - new) whenever the maximum grows
(https://arxiv.org/abs/1805.02867). A program of the second kernel writes a part of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Columns that a program reads at once: 16 for each of its 256 threads."""
_WARPS = 8


@triton.jit
def _reduce(
    logits,
    stride,
    real,
    columns,
    local,
    holds_target,
    results,
    with_hits: tl.constexpr,
    block: tl.constexpr,
):
    """Write the maximum, the sum and the target of a row, and whether the target is the maximum."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    logits += row * stride
    held = tl.load(holds_target + row) != 0
    index = tl.load(local + row)
    target = tl.load(logits + index, mask=held, other=0.0).to(tl.float32)
    top = float("-inf")
    total = 0.0
    beaten = 0
    for start in range(0, real, block):
        column = start + tl.arange(0, block)
        inside = column < real
        # A thread loads 16 bytes at once if the limit of the mask is a multiple of 16. A padded
        # vocabulary has such a number of columns. The number of real ids often is no multiple.
        x = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
        x = tl.where(inside, x, float("-inf"))
        before = top
        top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(before - top) + tl.sum(tl.exp(x - top), 0)
        if with_hits:
            # Of equal logits, the one with the lowest id is the most likely.
            better = (x > target) | ((x == target) & (column < index))
            beaten = tl.maximum(beaten, tl.max((better & inside).to(tl.int32), 0))
    tl.store(results + row, top)
    tl.store(results + rows + row, total)
    tl.store(results + 2 * rows + row, target)
    if with_hits:
        tl.store(results + 3 * rows + row, tl.where(held & (beaten == 0), 1.0, 0.0))


@triton.jit
def _write_gradient(
    logits,
    stride,
    real,
    columns,
    local,
    holds_target,
    top,
    factor,
    mask,
    has_mask: tl.constexpr,
    block: tl.constexpr,
):
    """Replace a part of a row by (exp(logit - top) * factor - one_hot(target)) * mask."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < real
    logits += row * stride
    index = tl.where(tl.load(holds_target + row) != 0, tl.load(local + row), -1)
    x = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
    gradient = tl.exp(x - tl.load(top + row)) * tl.load(factor + row)
    gradient = tl.where(column == index, gradient - 1.0, gradient)
    if has_mask:
        gradient *= tl.load(mask + row)
    # The logits of padding are not part of the loss.
    gradient = tl.where(inside, gradient, 0.0)
    tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < columns)


def launch_reduction(
    logits: Tensor, real: int, local: Tensor, holds_target: Tensor, results: Tensor
) -> None:
    """Write the results of `LossKernels.reduce` for each row, one result in each row of `results`.

    Args:
        logits: [n', columns]. The last dimension has stride 1.
        real: Number of columns that are real ids.
        local: [n'] int64, contiguous. The column of the target.
        holds_target: [n'] bool, contiguous. Whether this rank has the target.
        results: [3 or 4, n'] in fp32, contiguous. The fourth row has the hits, if they are wanted.
    """
    _reduce[(logits.shape[0],)](
        logits,
        logits.stride(0),
        real,
        logits.shape[1],
        local,
        holds_target,
        results,
        results.shape[0] == 4,
        _BLOCK,
        num_warps=_WARPS,
    )


def launch_gradient(logits: Tensor, real: int, *vectors: Tensor, mask: Tensor | None) -> None:
    """Replace logits by their gradient. The arguments are those of `LossKernels.write_gradient`.

    All vectors are contiguous. The last dimension of `logits` has stride 1.
    """
    rows, columns = logits.shape
    if columns == 0:
        return
    _write_gradient[(rows, triton.cdiv(columns, _BLOCK))](
        logits,
        logits.stride(0),
        real,
        columns,
        *vectors,
        mask,
        mask is not None,
        _BLOCK,
        num_warps=_WARPS,
    )
