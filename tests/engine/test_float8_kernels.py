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

from megatron.extras.float8 import rounding
from megatron.extras.float8.rounding import (
    FORWARD,
    Rounded,
    find_largest,
    round_complete_rows,
    round_to_float8,
    round_weight,
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
    wide = torch.randn(20, 80, generator=generator).bfloat16().to(device)
    yield wide[:, :33]
    yield wide.t()


def are_equal(found: Rounded, expected: Rounded) -> bool:
    """Return whether all bits are equal. The sign of a nan is no part of its value."""
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


find_largest_by_pytorch = partial(compute_reference, find_largest)


def compare_all(device: str) -> list[str]:
    """Return the names of the comparisons that fail."""
    wrong = []

    def check(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        found = function(*arguments, **options)
        expected = compute_reference(function, *arguments, **options)
        if isinstance(found, Tensor):
            equal = torch.equal(found, expected)
        elif isinstance(found, tuple):
            equal = all(map(are_equal, found, expected))
        else:
            equal = are_equal(found, expected)
        if not equal:
            wrong.append(name)

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
        # Each number as the largest value of a row.
        largest = find_largest_by_pytorch(numbers.view(-1, 1), by_row=True)
        check(f"scales, {dtype}", round_to_float8, numbers.view(-1, 1), largest, dtype)
    for number, x in enumerate(make_matrices(device)):
        name = f"matrix {number}"
        for by_row in (False, True):
            if len(x) or by_row:
                check(f"{name}, largest, {by_row}", partial(find_largest, by_row=by_row), x)
        if len(x) == 0:
            check(f"{name}, rows", round_complete_rows, x, FORWARD)
            continue
        whole, by_row = (find_largest(x, by_row=each) for each in (False, True))
        for dtype in FORMATS:
            for order in ("rows", "columns", "both"):
                check(f"{name}, {order}", round_to_float8, x, whole, dtype, order)
            check(f"{name}, rows of shards", round_to_float8, x, by_row, dtype)
            check(f"{name}, complete rows", round_complete_rows, x, dtype)
        # Masters have digits that bf16 does not have.
        master = x.float() * (1 + 2.0**-9)
        largest = (find_largest(master, by_row=each).bfloat16().float() for each in (False, True))
        whole, by_row = largest
        for scales in (whole, by_row):
            check(f"{name}, weight", round_weight, master, scales, whole, torch.bfloat16)
            check(f"{name}, copy", round_weight, master.bfloat16(), scales, whole, torch.bfloat16)
    return wrong


def test_kernels_have_the_bits_of_pytorch(interpreters: ProcessPoolExecutor) -> None:
    assert interpreters.submit(compare_all, "cpu").result() == []
