"""Matrix products in which each expert has rows of its own.

The rows of all experts are one matrix, sorted by expert. On GPUs that have a kernel for it, one
launch computes all products. Otherwise there is one product for each expert. Both are behind two
operators, so dry runs know the shapes.

The invariant: every row belongs to an expert. torch's kernel leaves rows after the last expert's
uninitialised, and they would reach gradients.

m: rows of all experts, e: experts of this rank, i and o: widths of input and output.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.spmd import declare
from megatron.parallel.torch_private import make_operator

_ALIGNMENT = 8
"""The kernel's operands need rows of a multiple of 16 bytes, which are 8 numbers in bf16."""
_CAPABILITIES = (9, 10)
"""Major compute capabilities of the GPUs that have the kernel."""


def has_grouped_kernel(x: Tensor, *widths: int) -> bool:
    """Return whether one kernel computes the products of all experts.

    Args:
        x: An operand.
        widths: Widths of the operands.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(x.device)[0] not in _CAPABILITIES:
        return False
    return all(width % _ALIGNMENT == 0 for width in widths)


def _split_experts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with its rows. The host waits for `ends`."""
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            yield number, slice(start, end)
        start = end


def _multiply_rows(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its expert, [m, o].

    Args:
        x: [m, i].
        weights: [e, i, o], of any strides.
        ends: int32[e], the end of each expert's rows. The last is m.
    """
    if has_grouped_kernel(x, *weights.shape[1:]) and len(x):
        return F.grouped_mm(x, weights, offs=ends)
    out = _make_product(x, weights, ends)
    for number, rows in _split_experts(ends):
        torch.mm(x[rows], weights[number], out=out[rows])
    return out


def _make_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((len(x), weights.shape[2]))


_multiply = make_operator("multiply_grouped", _make_product)(_multiply_rows)


def _make_gradients(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((len(ends), gradient.shape[1], x.shape[1]))


@make_operator("multiply_gradients", _make_gradients)
def _multiply_gradients(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradients of the weights, [e, o, i]. They are 0 for an expert without rows.

    Args:
        gradient: [m, o].
        x: [m, i].
        ends: int32[e], the end of each expert's rows. The last is m.
    """
    widths = gradient.shape[1], x.shape[1]
    if has_grouped_kernel(x, *widths) and len(x):
        return F.grouped_mm(gradient.t(), x, offs=ends)
    out = x.new_zeros((len(ends), *widths))
    for number, rows in _split_experts(ends):
        torch.mm(gradient[rows].t(), x[rows], out=out[number])
    return out


@declare()
class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        matrices = weight.view(len(ends), -1, x.shape[1])
        return _multiply(x, matrices.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        # The kernel refuses an expanded gradient, whose strides are 0.
        gradient = grads[0].contiguous()
        matrices = weight.view(len(ends), -1, x.shape[1])
        of_input = _multiply(gradient, matrices, ends)
        of_weight = _multiply_gradients(gradient, x, ends)
        return of_input, of_weight.view_as(weight), None


def multiply_by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x A^T for each expert's rows and its matrix A, [m, o].

    Args:
        x: [m, i], contiguous, sorted by expert.
        weight: [e o, i], the matrices one below the other.
        ends: int32[e], the end of each expert's rows. The last is m.
    """
    if not torch.is_grad_enabled() and not x.is_cuda:
        # For the few rows of a generated token, the operator takes longer than the products.
        matrices = weight.view(len(ends), -1, x.shape[1]).transpose(1, 2)
        aligned = all(width * x.element_size() % 16 == 0 for width in matrices.shape[1:])
        if aligned and len(x) and x.dtype != torch.float64:
            return F.grouped_mm(x, matrices, offs=ends)
        return _multiply_rows(x, matrices, ends)
    return _GroupedLinear.apply(x, weight, ends)
