"""The kernels that round to float8 have the bits of PyTorch's operators, in Triton's interpreter.

`compare_all` also runs on a GPU, where PyTorch's operators are the reference too.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.extras.step.float8 import rounding
from megatron.extras.step.float8.rounding import (
    FORWARD,
    find_all_largest,
    find_largest,
    round_complete_rows,
    round_to_float8,
    round_weight,
    round_weights_in_place,
)

E5M2 = torch.float8_e5m2
FORMATS = (FORWARD, E5M2)


def make_matrices(device: str) -> Iterator[Tensor]:
    """Yield matrices in bf16: odd sizes, zeros, infinities, nan, and values that become zero."""
    generator = torch.Generator().manual_seed(1)
    # Several tiles in both directions, and sizes that are no multiples of anything.
    for shape in ((130, 71), (1, 1), (0, 16)):
        x = torch.randn(shape, generator=generator) * 1e-3
        yield x.bfloat16().to(device)
    x = (torch.randn(9, 40, generator=generator) * 1e-6).bfloat16()
    x[0] = 0.0
    x[2, 3] = 3e38
    x[4] = -0.0
    x[5] = 1e-39
    yield x.to(device)
    for wrong in (math.inf, -math.inf, math.nan):
        other = x.clone()
        other[3, 7] = wrong
        yield other.to(device)
    # Rows of a wider matrix, and a transposed one.
    wide = torch.randn(9, 80, generator=generator).bfloat16().to(device)
    yield wide[:, :33]
    yield wide[:, :20].t()


def are_equal(found: Any, expected: Any) -> bool:
    """Return whether all bits are equal. The sign of a nan is no part of its value."""
    if isinstance(found, Tensor):
        return _are_equal(found, expected)
    pairs = [(found.values, expected.values), (found.inverse, expected.inverse)]
    if found.other is not None:
        pairs.append((found.other, expected.values))
    return all(_are_equal(*pair) for pair in pairs)


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    a, b = found.float(), expected.float()
    # Zeros have a sign too.
    pairs = [(a.isnan(), b.isnan()), (a.nan_to_num(7.0), b.nan_to_num(7.0))]
    pairs.append((a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()))
    return all(torch.equal(*pair) for pair in pairs)


def compute_reference(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what PyTorch's operators compute."""
    with mock.patch.object(rounding, "_has_kernels", return_value=False):
        return function(*arguments, **options)


find_whole = partial(find_largest, by_row=False)
find_by_row = partial(find_largest, by_row=True)


def compare_all(device: str) -> list[str]:
    """Return the names of the comparisons that fail."""
    wrong = []
    # All numbers of bf16 with a scale of 1, with those that the format does not have.
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).to(device)
    every = numbers.view(256, 256)
    for dtype in FORMATS:
        top = torch.tensor(torch.finfo(dtype).max, device=device)
        # Some versions of PyTorch cut off what e4m3 does not have. The kernels give nan, as others.
        reference = every
        if dtype == FORWARD:
            reference = every.where(every.abs() <= 464, math.nan)
        expected = compute_reference(round_to_float8, reference, top, dtype)
        if not are_equal(round_to_float8(every, top, dtype, "both"), expected):
            wrong.append(f"all, {dtype}")
        # Rows with a largest value of each exponent, next to the mantissa that halves the scale.
        last_digits = numbers.view(torch.int16) & 0x7F
        near = (last_digits == 0) | ((last_digits - 0x60).abs() <= 1)
        rows = numbers[near].view(-1, 1)
        arguments = rows, compute_reference(find_by_row, rows), dtype
        found = round_to_float8(*arguments)
        if not are_equal(found, compute_reference(round_to_float8, *arguments)):
            wrong.append(f"scales, {dtype}")
    for number, x in enumerate(make_matrices(device)):
        wrong += [f"matrix {number}, {name}" for name in compare_matrix(x)]
    return wrong


def compare_matrix(x: Tensor) -> list[str]:
    """Return the names of the comparisons of a matrix that fail."""
    found: dict[str, tuple[Any, Any]] = {}

    def compare(name: str, function: Callable[..., Any], *arguments: Any) -> None:
        found[name] = function(*arguments), compute_reference(function, *arguments)

    # A row has a program of its own, which takes milliseconds in the interpreter.
    some = x if x.is_cuda or len(x) < 10 else x[-3:]
    compare("rows", round_complete_rows, some, FORWARD)
    compare("largest of rows", find_by_row, some)
    if len(x):
        whole, by_row = (compute_reference(find, x) for find in (find_whole, find_by_row))
        compare("largest", find_whole, x)
        compare("both orders", round_to_float8, x, whole, E5M2, "both")
        compare("order of columns", round_to_float8, x, whole, FORWARD, "columns")
        compare("rows of shards", round_to_float8, x, by_row, E5M2)
        # A master has digits that bf16 does not have.
        master = x.float() * (1 + 2.0**-9)
        compare("largest of a master", find_whole, master)
        compare("largest of rows of a master", find_by_row, master[-3:])
        whole, by_row = (
            compute_reference(find, master).bfloat16().float() for find in (find_whole, find_by_row)
        )
        for name, scales in (("weight", whole), ("weight by rows", by_row)):
            compare(name, round_weight, master, scales, whole, torch.bfloat16)
    return [name for name, (a, b) in found.items() if not all(map(are_equal, *map(wrap, (a, b))))]


def compare_all_weights(device: str) -> list[str]:
    """Return the names of the comparisons of kernels for many weights that fail."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((130, 71), (1, 16), (7, 300), (40, 16))
    masters = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    masters[1][0, 3] = math.nan
    masters[2][2, 299] = -math.inf
    masters[3].zero_()
    wrong = []
    for by_row in (False, True):
        counts = [len(each) if by_row else 1 for each in masters]
        starts = [sum(counts[:number]) for number in range(len(masters))]
        wholes = [sum(counts) + number for number in range(len(masters))]
        arguments = masters, starts, wholes
        largest = torch.zeros(sum(counts) + len(masters), device=device)
        expected = torch.zeros_like(largest)
        find_all_largest(*arguments, largest, by_row=by_row)
        compute_reference(find_all_largest, *arguments, expected, by_row=by_row)
        if not torch.equal(largest, expected):
            wrong.append(f"largest, by row: {by_row}")
        scales = expected.bfloat16().float()
        weights = []
        for master, start, count, whole in zip(masters, starts, counts, wholes, strict=True):
            own = scales[start : start + count].unsqueeze(1) if by_row else scales[start]
            weights.append((master, own, scales[whole] if by_row else own))
        fresh = [round_weight(*each, torch.bfloat16) for each in weights]
        kept = [round_weight(x + 1, own, whole, torch.bfloat16) for x, own, whole in weights]
        before = [each.values.data_ptr() for pair in kept for each in pair]
        round_weights_in_place(weights, kept, torch.bfloat16)
        if before != [each.values.data_ptr() for pair in kept for each in pair]:
            wrong.append("memory")
        wrong += [
            f"weight {number}, by row: {by_row}"
            for number, pairs in enumerate(zip(kept, fresh, strict=True))
            if not all(map(are_equal, *pairs))
        ]
    return wrong


def wrap(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_kernels_have_the_bits_of_pytorch(interpreters: ProcessPoolExecutor) -> None:
    assert interpreters.submit(compare_all, "cpu").result() == []
    assert interpreters.submit(compare_all_weights, "cpu").result() == []


POINTERS = {
    **dict.fromkeys(("values", "transposed"), "u8"),
    "table": "i64",
    "owners": "i64",
    **dict.fromkeys(("largest", "whole", "inverse", "inverse_of_whole"), "fp32"),
}


TABLE = {"fields": 10, "aligned": True, "by_row": True}
"""Constants of the kernels for many weights."""


def compile_kernel(kernel: Any, source: str, constants: dict[str, Any]) -> str:
    """Return the code of a kernel on a GPU of capability 9.0. It needs no GPU.

    Args:
        kernel: The kernel.
        source: The type of the matrix.
        constants: Argument -> its value.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = POINTERS | {"x": source}
    if "block" in constants and kernel.arg_names[2] in ("size", "largest"):
        pointers["largest"] = "i32"
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {name: f"*{pointers[name]}" for name in kernel.arg_names if name in pointers}
    divisible = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if types[name] != "constexpr"
    }
    made = ASTSource(kernel, types, constants, divisible)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return str(triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def test_kernels_compile_for_hopper_and_move_16_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from megatron.extras.step.float8 import rounding_kernel as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block = {"block": 4096}
    tile = {"block_rows": 128, "block_columns": 64}
    tiles: dict[str, Any] = tile | {"with_values": True, "with_transposed": True}
    tiles |= {"down": None, "across": None}
    wide_loads = {
        compile_kernel(kernels._find_largest, "bf16", block): 0,
        compile_kernel(kernels._find_largest_of_rows, "fp32", block): 0,
        compile_kernel(kernels._round_row, "bf16", block | {"is_e4m3": False}): 2,
        compile_kernel(kernels._find_largest_of_some, "fp32", TABLE | block): 0,
        compile_kernel(kernels._round_tile_of_some, "fp32", TABLE | tile): 8,
        # 64 values of a thread, in both orders.
        compile_kernel(kernels._round_tile, "fp32", tiles | {"by_row": True, "is_e4m3": True}): 8,
    }
    for code, stores in wide_loads.items():
        # The scales of rows are read one by one.
        assert "ld.global.v4.b32" in code
        assert code.count("st.global.v4.b32") == stores
