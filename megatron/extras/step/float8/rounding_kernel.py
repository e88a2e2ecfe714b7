"""The Triton kernels of `rounding.py`.

The last dimension of all tensors has stride 1.

Casts of GPUs cut off large values, while PyTorch's give infinities or nan. `_convert` does what
PyTorch does. The scale is computed from the exponent of the largest value. It equals torchao's
for each largest value that is exact in bf16.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
"""Values that a program reads to find the largest one."""
_ROWS = 128
"""Rows of a tile. A transposed row of a tile has so many bytes, a cache line."""
_COLUMNS = 64
"""Columns of a tile."""


@triton.jit
def _read_magnitude(x):
    """Return the absolute values as whole numbers in the same order. nan becomes infinity."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(bits, 0x7F800000)


@triton.jit
def _compute_scale(magnitude, is_e4m3: tl.constexpr):
    """Return the scale for a largest value, and its inverse, both in fp32.

    Both formats have 1.75 * 2^n as their largest value. So the scale is 2^(n - exponent), or half
    of it if the mantissa is above 1.75.
    """
    # torchao takes 1e-12 for smaller values.
    bits = tl.maximum(magnitude, 0x2B8CBCCC)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    n = 8 if is_e4m3 else 15
    scale = ((254 + n - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - n) << 23).to(tl.float32, bitcast=True)
    finite = magnitude < 0x7F800000
    return tl.where(finite, scale, 0.0), tl.where(finite, inverse, float("inf"))


@triton.jit
def _convert(x, is_e4m3: tl.constexpr):
    """Return fp32 values in float8, as bytes."""
    size = tl.abs(x)
    sign = ((x.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    if is_e4m3:
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        # 464 lies between 448 and the code of nan.
        return tl.where(size > 464.0, sign | 0x7F, bits)
    bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    # 61,440 lies between 57,344 and the code of infinity.
    return tl.where(size >= 61440.0, sign | 0x7C, bits)


@triton.jit
def _find_largest(x, largest, size, block: tl.constexpr):
    """Raise `largest` to the largest absolute value of a block. Both are whole numbers."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    values = tl.load(x + index, mask=index < size, other=0.0)
    tl.atomic_max(largest, tl.max(_read_magnitude(values), 0))


@triton.jit
def _find_largest_of_rows(x, largest, stride, columns, block: tl.constexpr):
    """Write the largest absolute value of a row."""
    row = tl.program_id(0).to(tl.int64)
    top = 0
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        values = tl.load(x + row * stride + column, mask=column < columns, other=0.0)
        top = tl.maximum(top, tl.max(_read_magnitude(values), 0))
    tl.store(largest + row, tl.cast(top, tl.float32, bitcast=True))


@triton.jit
def _round_row(x, values, inverse, stride, columns, is_e4m3: tl.constexpr, block: tl.constexpr):
    """Find the largest value of a row, and round the row. It is read once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    v = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale, inverted = _compute_scale(tl.max(_read_magnitude(v), 0), is_e4m3)
    tl.store(values + row * columns + column, _convert(v * scale, is_e4m3), mask=inside)
    tl.store(inverse + row, inverted)


@triton.jit
def _round_tile(
    x,
    largest,
    whole,
    values,
    inverse,
    transposed,
    inverse_of_whole,
    stride,
    rows,
    columns,
    by_row: tl.constexpr,
    with_values: tl.constexpr,
    with_transposed: tl.constexpr,
    is_e4m3: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    down=None,
    across=None,
):
    """Round a tile, and write it in both orders or in one. None: the tile of this program.

    The values in the order of rows have the scales of `largest`, one for each row or only one. The
    transposed ones have that of `whole`.
    """
    if down is None:
        down = tl.program_id(0)
        across = tl.program_id(1)
    row = down.to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = across.to(tl.int64) * block_columns + tl.arange(0, block_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    v = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    # A weight in fp32 is first rounded to bf16, as the copy that is multiplied without float8.
    v = v.to(tl.bfloat16).to(tl.float32)
    number = tl.load(whole).to(tl.int32, bitcast=True)
    scale, inverted = _compute_scale(number, is_e4m3)
    rounded = _convert(v * scale, is_e4m3)
    if with_transposed:
        place = column[:, None] * rows + row[None, :]
        tl.store(transposed + place, tl.trans(rounded), mask=tl.trans(inside))
        if down + across == 0:
            tl.store(inverse_of_whole, inverted)
    if with_values:
        if by_row:
            own = tl.load(largest + row, mask=row < rows, other=0.0).to(tl.int32, bitcast=True)
            scales, inverses = _compute_scale(own, is_e4m3)
            rounded = _convert(v * scales[:, None], is_e4m3)
            if across == 0:
                tl.store(inverse + row, inverses, mask=row < rows)
        elif down + across == 0:
            tl.store(inverse, inverted)
        tl.store(values + row[:, None] * columns + column[None, :], rounded, mask=inside)


@triton.jit
def _read_number(entry, number: tl.constexpr, aligned: tl.constexpr):
    """Return a number of a table. The compiler learns whether it is a multiple of 16."""
    found = tl.load(entry + number)
    if aligned:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _read_pointer(entry, number: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    """Return an address of a table as a pointer."""
    pointer = tl.load(entry + number).to(tl.pointer_type(kind))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _round_tile_of_some(
    table,
    owners,
    by_row: tl.constexpr,
    aligned: tl.constexpr,
    fields: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Round a tile of one of many weights, in both orders. See `launch_all_tiles`."""
    entry = table + tl.load(owners + tl.program_id(0)) * fields
    rows = _read_number(entry, 7, aligned)
    columns = _read_number(entry, 8, aligned)
    # The tiles of a weight are numbered by rows.
    tile = tl.program_id(0) - tl.load(entry + 9)
    tiles = tl.cdiv(columns, block_columns)
    _round_tile(
        _read_pointer(entry, 0, tl.float32, aligned),
        _read_pointer(entry, 1, tl.float32, False),
        _read_pointer(entry, 2, tl.float32, False),
        _read_pointer(entry, 3, tl.uint8, aligned),
        _read_pointer(entry, 4, tl.float32, False),
        _read_pointer(entry, 5, tl.uint8, aligned),
        _read_pointer(entry, 6, tl.float32, False),
        columns,
        rows,
        columns,
        by_row,
        True,
        True,
        True,
        block_rows,
        block_columns,
        tile // tiles,
        tile % tiles,
    )


@triton.jit
def _find_largest_of_some(
    table,
    owners,
    largest,
    by_row: tl.constexpr,
    aligned: tl.constexpr,
    fields: tl.constexpr,
    block: tl.constexpr,
):
    """Raise the largest values of a row, or of a block, of one of many weights.

    See `launch_all_largest`.
    """
    entry = table + tl.load(owners + tl.program_id(0)) * fields
    size = _read_number(entry, 1, aligned)
    width = _read_number(entry, 2, aligned)
    row = tl.program_id(0) - tl.load(entry + 5)
    first = row * width
    x = _read_pointer(entry, 0, tl.float32, aligned)
    top = 0
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = (column < width) & (first + column < size)
        values = tl.load(x + first + column, mask=inside, other=0.0)
        top = tl.maximum(top, tl.max(_read_magnitude(values), 0))
    # Whole numbers have an order that does not depend on the order of the programs.
    tl.atomic_max(largest + tl.load(entry + 3) + (row if by_row else 0), top)
    if by_row:
        tl.atomic_max(largest + tl.load(entry + 4), top)


def launch_largest(x: Tensor, largest: Tensor) -> None:
    """Write the largest absolute values of a matrix [m, k].

    Args:
        x: In bf16 or fp32. It is contiguous if there is one value for all of it.
        largest: A scalar that is zero, or [m, 1]. It is in fp32.
    """
    rows, columns = x.shape
    if largest.dim():
        block = min(triton.next_power_of_2(columns), _BLOCK)
        _find_largest_of_rows[(rows,)](x, largest, x.stride(0), columns, block)
        return
    # Whole numbers have the same order as the positive floats with the same bits.
    bits = largest.view(torch.int32)
    _find_largest[(triton.cdiv(x.numel(), _BLOCK),)](x, bits, x.numel(), _BLOCK, num_warps=8)


def launch_rows(x: Tensor, values: Tensor, inverse: Tensor) -> None:
    """Round a matrix [m, k] in bf16 with a scale for each row, which comes from the complete row.

    Args:
        x: The matrix. A row is kept in registers.
        values: [m, k] in float8.
        inverse: [m, 1], the inverse scales in fp32.
    """
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    _round_row[(rows,)](
        x,
        values.view(torch.uint8),
        inverse,
        x.stride(0),
        columns,
        values.dtype == torch.float8_e4m3fn,
        block,
        num_warps=min(16, max(1, block // 1024)),
    )


def launch_tiles(
    x: Tensor,
    largest: Tensor,
    whole: Tensor,
    by_rows: Sequence[Tensor],
    by_columns: Sequence[Tensor],
) -> None:
    """Round a matrix [m, k], and write it in the order of its rows, of its columns, or in both.

    Args:
        x: In bf16, or in fp32 to be rounded to bf16 first.
        largest: The largest absolute values for the order of rows, a scalar or [m, 1] in fp32.
        whole: That of the order of columns, a scalar in fp32.
        by_rows: Values [m, k] in float8 and inverse scales in the shape of `largest`, or nothing.
        by_columns: Values [k, m] in float8 and an inverse scale, or nothing.
    """
    rows, columns = x.shape
    some, _ = by_rows or by_columns
    values, inverse = by_rows or (x, whole)
    transposed, inverse_of_whole = by_columns or (x, whole)
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)
    _round_tile[grid](
        x,
        largest,
        whole,
        values.view(torch.uint8),
        inverse,
        transposed.view(torch.uint8),
        inverse_of_whole,
        x.stride(0),
        rows,
        columns,
        largest.dim() > 0,
        len(by_rows) > 0,
        len(by_columns) > 0,
        some.dtype == torch.float8_e4m3fn,
        _ROWS,
        _COLUMNS,
    )


@lru_cache(maxsize=8)
def _build_table(
    entries: tuple[tuple[int, ...], ...], programs: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return a table of whole numbers [n, fields], and for each program the number of its entry.

    Args:
        entries: The fields of each entry but the last one, its first program.
        programs: The number of programs of each entry.
        device: The device of the result.
    """
    # Weights keep their memory, so that a run builds each table once. The copy to the device waits.
    firsts = [0, *accumulate(programs)]
    rows = [(*entry, first) for entry, first in zip(entries, firsts, strict=False)]
    numbers = torch.arange(len(programs)).repeat_interleave(torch.tensor(programs))
    return torch.tensor(rows).to(device), numbers.to(device)


def _are_aligned(numbers: Iterable[int]) -> bool:
    """Return whether addresses and sizes are multiples of 16."""
    return all(number % 16 == 0 for number in numbers)


def launch_all_largest(
    matrices: Sequence[Tensor],
    starts: Sequence[int],
    wholes: Sequence[int],
    largest: Tensor,
    *,
    by_row: bool,
) -> None:
    """Raise largest absolute values to those of many matrices, in one kernel.

    Args:
        matrices: [m, k] each, contiguous in fp32.
        starts: Where in `largest` the value of a matrix, or of its first row, is.
        wholes: Where that of all rows is. It is used with `by_row`.
        largest: In fp32, at least 0.
        by_row: Whether each row has a value.
    """
    # A program reads one row. With one value for a matrix, a block of its memory counts as a row.
    widths = [each.shape[1] if by_row else _BLOCK for each in matrices]
    programs = tuple(
        triton.cdiv(each.numel(), width) for each, width in zip(matrices, widths, strict=True)
    )
    entries = tuple(
        (each.data_ptr(), each.numel(), width, start, whole)
        for each, width, start, whole in zip(matrices, widths, starts, wholes, strict=True)
    )
    table, owners = _build_table(entries, programs, largest.device)
    aligned = _are_aligned(number for entry in entries for number in entry[:3])
    block = min(triton.next_power_of_2(max(widths)), _BLOCK)
    bits = largest.view(torch.int32)
    _find_largest_of_some[(len(owners),)](
        table, owners, bits, by_row, aligned, table.shape[1], block, num_warps=8
    )


def launch_all_tiles(weights: Sequence[Tensor], rounded: Sequence[Tensor]) -> None:
    """Round many weights to e4m3 in both orders, in one kernel.

    Args:
        weights: For each weight, its master [m, k], contiguous in fp32, the largest values, a
            scalar or [m, 1], and that of all rows, in fp32.
        rounded: For each weight, values [m, k] in float8 and their inverse scales, values [k, m] in
            float8 and their inverse scale.
    """
    masters = weights[::3]
    before, after = ([each.data_ptr() for each in some] for some in (weights, rounded))
    entries = tuple(
        (*before[3 * number : 3 * number + 3], *after[4 * number : 4 * number + 4], *master.shape)
        for number, master in enumerate(masters)
    )
    programs = tuple(
        triton.cdiv(it.shape[0], _ROWS) * triton.cdiv(it.shape[1], _COLUMNS) for it in masters
    )
    table, owners = _build_table(entries, programs, masters[0].device)
    by_row = weights[1].dim() > 0
    # Scales are read and written one by one, so only matrices have to be aligned.
    aligned = _are_aligned(entry[field] for entry in entries for field in (0, 3, 5, 7, 8))
    _round_tile_of_some[(len(owners),)](
        table, owners, by_row, aligned, table.shape[1], _ROWS, _COLUMNS
    )
