"""The Triton kernels of `dropout.py`. Their masks are those of `megatron/parallel/rng.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.parallel.rng import LANES, STEPS

_BLOCK = 2048
"""Elements of a row that a program computes at most. Each thread has one block of the generator."""


@triton.jit
def _find_kept(key, threshold, site, sample, row, blocks, first_block, block: tl.constexpr):
    """Return which of the elements of a row are kept, from a block of the generator on."""
    seed = tl.load(key).to(tl.uint64)
    iteration = tl.load(key + 1)
    zero = tl.zeros((block // 16,), dtype=tl.int64)
    # The first block has the number 1, because NumPy counts up before it computes a block.
    number = row * blocks + first_block + 1 + tl.arange(0, block // 16)
    a, b, c, d = tl.philox(
        seed, number, zero + site, zero + sample + tl.load(key + 2), zero + iteration
    )
    # [blocks, 2, 2], in the order of the words.
    words = tl.join(tl.join(a, c), tl.join(b, d))
    words = tl.reshape(words, (block // 4, 1))
    # A word of 64 bits has four numbers of 16 bits, the lowest bits first.
    lanes = (words >> (tl.arange(0, 4) * 16).to(tl.uint64)[None, :]) & 0xFFFF
    return tl.reshape(lanes, (block,)).to(tl.int32) >= threshold


@triton.jit
def _drop(
    x,
    residual,
    out,
    key,
    threshold,
    scale,
    samples,
    rows,
    columns,
    site,
    blocks,
    first,
    step,
    length,
    column,
    sample,
    samples_first: tl.constexpr,
    has_residual: tl.constexpr,
    writes_mask: tl.constexpr,
    block: tl.constexpr,
):
    """Write residual + dropout(x), or which elements are kept."""
    # A line is a row of one sample. Its place in memory depends on the order of the axes.
    # Offsets of large tensors exceed 32 bits.
    line = tl.program_id(0).to(tl.int64)
    if samples_first:
        row = line % rows
        own = line // rows
    else:
        row = line // samples
        own = line % samples
    # Whole blocks of the generator, so some elements may be before the first column.
    first_block = column // 16 + tl.program_id(1) * (block // 16)
    at = first_block * 16 + tl.arange(0, block) - column
    present = (at >= 0) & (at < columns)
    row = first + row // length * step + row % length
    kept = _find_kept(key, threshold, site, sample + own, row, blocks, first_block, block)
    index = line * columns + at
    if writes_mask:
        tl.store(out + index, kept.to(tl.uint8), mask=present)
    else:
        value = tl.load(x + index, mask=present, other=0.0)
        # PyTorch's operators store the product, so it is rounded before the sum here too.
        value = tl.where(kept, value.to(tl.float32) * scale, 0.0).to(value.dtype)
        if has_residual:
            before = tl.load(residual + index, mask=present, other=0.0)
            value = value.to(tl.float32) + before.to(tl.float32)
        tl.store(out + index, value.to(out.dtype.element_ty), mask=present)


def launch(
    x: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    dropout_key: Tensor,
    site: int,
    threshold: int,
    place: list[int],
) -> None:
    """Write residual + dropout(x), or which elements are kept. All tensors are contiguous.

    Args:
        x: [rows, samples, columns] or [samples, heads, queries, columns]. None: which elements are
            kept is written.
        residual: Same shape. None: 0.
        out: Same shape.
        dropout_key: See `Inputs`. The host does not read it.
        site: See `draw_mask`.
        threshold: See `draw_mask`.
        place: See `draw_mask`.
    """
    samples_first = out.dim() == 4
    samples, columns = out.shape[0 if samples_first else 1], out.shape[-1]
    lines = out.numel() // columns
    # The aligned blocks of the generator that have these columns.
    count = triton.cdiv(place[4] % LANES + columns, LANES)
    block = min(_BLOCK, LANES * triton.next_power_of_2(count))
    _drop[(lines, triton.cdiv(LANES * count, block))](
        x,
        residual,
        out.view(torch.uint8) if x is None else out,
        dropout_key,
        threshold,
        STEPS / (STEPS - threshold),
        samples,
        lines // samples,
        columns,
        site,
        *place,
        samples_first,
        residual is not None,
        x is None,
        block,
        # Each of the 32 threads of a warp computes 16 elements.
        num_warps=max(1, block // 512),
    )
