"""The Triton kernel of `adamw.py`.

All arithmetic is in fp32, and rounds where torch's operator of a CPU with AVX2 or AVX-512 rounds.
So both give the same bits. `tl.fma` stands where that operator contracts a product and a sum, and
the compiler contracts nothing else.

One launch updates all parameters. A program updates a block of one of them, and finds the memory of
this parameter in a table of addresses.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements that a program updates."""
_TABLES = 2
"""Tables that are kept. Gradients that are allocated again often return to the same memory."""
_COLUMNS = 7
"""Columns of a table: five addresses, the number of elements, the number of the first program."""


@triton.jit
def _update_block(
    pointers,
    has_copy,
    limit,
    numbers,
    factor,
    betas,
    from_gradient: tl.constexpr,
    block: tl.constexpr,
):
    """Update the first `limit` elements of the block at these addresses."""
    weight, grad, first, second, copy = pointers
    weight1, beta2, rest2 = betas
    offset = tl.arange(0, block)
    present = offset < limit
    shrink = tl.load(numbers)
    step_size = tl.load(numbers + 1)
    root = tl.load(numbers + 2)
    eps = tl.load(numbers + 3)
    g = tl.load(grad + offset, mask=present, other=0.0) * factor
    w = tl.load(weight + offset, mask=present, other=0.0) * shrink
    m = tl.load(first + offset, mask=present, other=0.0).to(tl.float32)
    v = tl.load(second + offset, mask=present, other=0.0).to(tl.float32)
    zero = tl.zeros((block,), dtype=tl.float32)
    # This is `lerp` of torch: from m to g, or from g to m if the weight is at least one half.
    m = tl.fma(weight1 + zero, g - m, g if from_gradient else m)
    v = tl.fma(rest2 * g, g, v * beta2)
    # Triton's own division and root may be approximations. These two round as a CPU does.
    w -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root + zero) + eps)
    tl.store(weight + offset, w, mask=present)
    tl.store(first + offset, m.to(first.dtype.element_ty), mask=present)
    tl.store(second + offset, v.to(second.dtype.element_ty), mask=present)
    # A run in fp32 has no copies, and neither have weights whose place float8 values take.
    if has_copy:
        tl.store(copy + offset, w.to(copy.dtype.element_ty), mask=present)


@triton.jit
def _find(table, start, dtype: tl.constexpr, aligned: tl.constexpr):
    """Return the address of an element of a tensor, whose address is in the table."""
    pointer = tl.load(table).to(tl.pointer_type(dtype)) + start
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def update(
    table,
    owners,
    settings,
    decision,
    weight1,
    beta2,
    rest2,
    from_gradient: tl.constexpr,
    columns: tl.constexpr,
    first_dtype: tl.constexpr,
    second_dtype: tl.constexpr,
    copy_dtype: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
):
    """Read gradient, weight and moments, and write weight, moments and the copy."""
    # A dropped step reads and writes nothing.
    if tl.load(decision) == 0:
        return
    program = tl.program_id(0)
    owner = tl.load(owners + program).to(tl.int64)
    row = table + owner * columns
    # Column 5 has the number of elements, and column 6 the number of the first program.
    start = (program - tl.load(row + 6)) * block
    left = tl.load(row + 5) - start
    pointers = (
        _find(row, start, tl.float32, aligned),
        _find(row + 1, start, tl.float32, aligned),
        _find(row + 2, start, first_dtype, aligned),
        _find(row + 3, start, second_dtype, aligned),
        _find(row + 4, start, copy_dtype, aligned),
    )
    has_copy = tl.load(row + 4) != 0
    numbers = settings + owner * 4
    factor = tl.load(decision + 1)
    betas = (weight1, beta2, rest2)
    # A limit that the compiler knows lets it move 16 bytes at once.
    if left >= block:
        _update_block(pointers, has_copy, block, numbers, factor, betas, from_gradient, block)
    else:
        _update_block(pointers, has_copy, left, numbers, factor, betas, from_gradient, block)


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    copies: Sequence[Tensor],
    settings: Tensor,
    decision: Tensor,
    betas: tuple[float, float],
) -> None:
    """Update all parameters with one kernel. See `adamw.update`."""
    sizes = tuple(weight.numel() for weight in weights)
    if not any(sizes):
        return
    columns = (weights, gradients, firsts, seconds)
    # Where the model computes with float8 values, all elements of a copy are the same memory.
    kept = [copy.data_ptr() * copy.is_contiguous() for copy in copies]
    addresses = (
        *(tuple(map(Tensor.data_ptr, column)) for column in columns),
        tuple(kept or [0] * len(sizes)),
    )
    device = weights[0].device
    table, aligned = _make_table(addresses, sizes, device)
    owners = _make_owners(sizes, device)
    beta1, beta2 = betas
    # torch interpolates from the nearer end, with a weight in fp32.
    weight1 = torch.tensor(1 - beta1, dtype=torch.float32).item()
    from_gradient = weight1 >= 0.5
    update[(len(owners),)](
        table,
        owners,
        settings,
        decision,
        weight1 - from_gradient,
        beta2,
        1 - beta2,
        from_gradient,
        _COLUMNS,
        _DTYPES[firsts[0].dtype],
        _DTYPES[seconds[0].dtype],
        _DTYPES[copies[0].dtype] if copies else tl.float32,
        aligned,
        BLOCK,
        # The compiler must not contract a product and a sum. The CPU's operator does not.
        enable_fp_fusion=False,
    )


@lru_cache(maxsize=_TABLES)
def _make_table(
    addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, bool]:
    """Return the table, and whether all addresses are aligned."""
    blocks = _count_blocks(sizes)
    starts = blocks.cumsum(0) - blocks
    table = torch.stack([*map(torch.tensor, addresses), torch.tensor(sizes), starts], dim=1)
    # Only aligned addresses let the compiler move 16 bytes at once.
    aligned = all(address % 16 == 0 for column in addresses for address in column)
    return _upload(table, device), aligned


@lru_cache(maxsize=_TABLES)
def _make_owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row of each program in the table. A model of 7B has 3.3 million programs."""
    rows = torch.arange(len(sizes), dtype=torch.int32)
    return _upload(rows.repeat_interleave(_count_blocks(sizes)), device)


def _count_blocks(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device. The host does not wait for it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
