"""Comparisons of kernels with PyTorch's operators, on any device that runs the kernels.

Each returns the largest difference of each result in units of `count_units`. In fp32 the operators
compute in fp64, because torch's GELU has errors of 2e-6.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.extras.step.kernels import gate, rotary
from megatron.model.positions import make_rotary_table, rotate

ACTIVATIONS: dict[str, Any] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
    "liglu": lambda x: x,
}


def find_power(x: Tensor) -> Tensor:
    """Return the largest power of two that is at most x, for each positive x on the CPU."""
    # The mantissa is in [0.5, 1), so the quotient is exactly a power of two.
    return x / (2 * torch.frexp(x).mantissa)


FP32_ERROR = 1e-6
"""Error of a computation in fp32, relative to the numbers from which it is computed."""


def count_units(found: Tensor, expected: Tensor, operands: Tensor | None = None) -> float:
    """Return the largest difference in units of rounding.

    A unit is the error of the computation in fp32, and in 16 bits also the distance between two
    numbers of the type. The error in fp32 is relative to the operands. A GPU contracts `a - b c` to
    one operation, which rounds once. So a difference of two numbers that are nearly equal has other
    digits there, and may have another sign.

    Args:
        found: The results of a kernel.
        expected: Those of PyTorch's operators.
        operands: The size of the numbers from which each result is computed, where they may be
            larger than the result.
    """
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    # The powers of two of a GPU are not exact.
    one, two = found.detach().cpu().double(), expected.detach().cpu().double()
    largest = torch.maximum(one.abs(), two.abs())
    sizes = largest
    if operands is not None:
        sizes = torch.maximum(largest, operands.detach().cpu().double().abs())
    unit = FP32_ERROR * sizes
    if found.dtype != torch.float32:
        assert found.dtype == expected.dtype
        limits = torch.finfo(found.dtype)
        normal = largest.clamp(min=limits.smallest_normal)
        unit += limits.eps * find_power(normal)
    difference = (one - two).abs()
    return float(torch.where(difference == 0, 0.0, difference / unit).max())


def measure_pairs(x: Tensor, channels: int) -> Tensor:
    """Return the length of the pair of channels that each element of [..., d] belongs to.

    A rotation does not change it. It is at least the sum of both products of a result.
    """
    first, second = x[..., : channels // 2], x[..., channels // 2 : channels]
    length = torch.hypot(first.float(), second.float())
    return torch.cat((length, length, x[..., channels:].float().abs()), dim=-1)


def widen(x: Tensor) -> Tensor:
    """Return the leaf from which PyTorch's operators compute the expected results."""
    wide = x.detach().double() if x.dtype == torch.float32 else x.detach()
    return wide.requires_grad_()


def compare_rotary(
    sizes: tuple[int, ...], channels: int, dtype: torch.dtype, device: str, *, by_sample: bool
) -> dict[str, float]:
    """Compare the rotation and the division of a projection.

    Args:
        sizes: [s, b, g, n, d].
        channels: How many of d are rotated.
        dtype: That of the projection.
        device: Where it is computed.
        by_sample: Whether samples have different positions.
    """
    s, b, g, n, d = sizes
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((s, b, g, n + 2, d), generator=generator).to(device, dtype)
    exact = widen(x)
    x.requires_grad_()
    # The tables of a part of the sequence.
    cos, sin = (
        table[3:] for table in make_rotary_table(s + 3, channels, 1e4, torch.device(device))
    )
    if by_sample:
        cos, sin = (torch.cat((table, table.flip(0)), dim=1) for table in (cos, sin))
    query_key, value = exact.split((n + 1, 1), dim=3)
    query, key = rotate(query_key, cos, sin).split((n, 1), dim=3)
    alone = rotate(exact, cos, sin)
    expected = [query, key, value, alone]
    found = [*rotary.rotate_projection(x, cos, sin), rotary.rotate(x, cos, sin)]
    # The gradients of attention have other strides: [b, n, s, d] is contiguous.
    grads = [
        torch.randn((b, *part.shape[2:4], s, d), generator=generator)
        .to(device, dtype)
        .permute(3, 0, 1, 2, 4)
        for part in expected
    ]
    for leaf, results in ((exact, expected), (x, found)):
        grads = [grad.to(leaf.dtype) for grad in grads]
        divided = torch.autograd.grad(results[:3], leaf, grads[:3])
        rotated = torch.autograd.grad(results[3:], leaf, grads[3:])
        results += [*divided, *rotated]
    names = ("query", "key", "value", "rotate", "gradient", "gradient of rotate")
    # Values are not rotated, so no error is allowed for them.
    return {
        name: count_units(one, two, None if name == "value" else measure_pairs(two, channels))
        for name, one, two in zip(names, found, expected, strict=True)
    }


def compare_gate(
    activation: Any, sizes: tuple[int, ...], dtype: torch.dtype, device: str
) -> dict[str, float]:
    """Compare the product inside of a gated MLP.

    Args:
        activation: A value of --glu-activation.
        sizes: [s, b, f].
        dtype: That of all tensors.
        device: Where it is computed.
    """
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(sizes, generator=generator).to(device, dtype) for _ in range(3)]
    exact = [widen(each) for each in inputs]
    for each in inputs:
        each.requires_grad_()
    expected = [ACTIVATIONS[activation](exact[0]) * exact[1]]
    found = [gate.apply_gate(inputs[0], inputs[1], activation)]
    for leaves, results in ((exact, expected), (inputs, found)):
        results.extend(torch.autograd.grad(results, leaves[:2], leaves[2].detach()))
    names = ("product", "gradient of gate", "gradient of up")
    # Each activation is at most its input, and sums of at most 1 + |input| are in its slope.
    gate_input, up_input, grad = (each.detach().double() for each in inputs)
    operands = (gate_input * up_input, grad * up_input * (1 + gate_input.abs()), grad * gate_input)
    return {
        name: count_units(*each)
        for name, *each in zip(names, found, expected, operands, strict=True)
    }
