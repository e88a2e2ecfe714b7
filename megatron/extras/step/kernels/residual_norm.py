"""The norm of the residual stream and the addition beside it, with one kernel for each direction.

The forward kernel adds the output of attention to the stream, and computes the norm of the sum.
The backward kernel computes the gradient of the norm, and adds the gradient that the residual
connection passes on. A second, small kernel adds up the gradients of weight and bias. In 16 bits,
the two large ones move 16 bytes for each element. PyTorch's operators move 22, and some of them
are several kernels that read their inputs again (docs/kernels.md).

They have no gradients for torch.compile, which fuses these operators itself.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.config.table import Absent, Table
from megatron.model.norm import Norm
from megatron.parallel.torch_private import make_operator


def _make_results(x: Tensor, branch: Tensor | None, *others: Any) -> list[Tensor]:
    centred = others[-1]
    rows = x.numel() // x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    results = [out, x.new_empty((1 + centred, rows), dtype=torch.float32)]
    if branch is not None:
        results.append(torch.empty_like(out))
    return results


def _make_gradients(*arguments: Any) -> tuple[Tensor, Tensor]:
    _, _, total, weight, _, has_bias = arguments
    grad = torch.empty_like(total, memory_format=torch.contiguous_format)
    return grad, weight.new_empty((1 + has_bias, len(weight)))


@make_operator("add_and_normalise", _make_results)
def _add(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> list[Tensor]:
    """Return the norm and its statistics, and the sum if there is a branch."""
    from megatron.extras.step.kernels.residual_norm_kernel import launch_forward

    results = _make_results(x, branch, centred)
    total = None
    if branch is not None:
        total = results[2]
        branch = branch.contiguous()
    launch_forward(x.contiguous(), branch, weight, bias, total, results[0], results[1], eps)
    return results


@make_operator("add_and_normalise_backward", _make_gradients)
def _differentiate(
    grad_total: Tensor,
    grad_out: Tensor,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sum, and those of weight and bias in one tensor."""
    from megatron.extras.step.kernels.residual_norm_kernel import count_programs, launch_backward

    grad, grad_vectors = _make_gradients(grad_total, grad_out, total, weight, statistics, has_bias)
    programs = count_programs(statistics.shape[1], len(weight))
    parts = weight.new_empty((programs, *grad_vectors.shape), dtype=torch.float32)
    of_total, of_out, kept = (each.contiguous() for each in (grad_total, grad_out, total))
    launch_backward(of_total, of_out, kept, weight, statistics, grad, parts, grad_vectors)
    return grad, grad_vectors


class _AddAndNormalise(torch.autograd.Function):
    """Both directions. Without a branch, the first result is the input itself."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, branch, weight, bias, _, _ = inputs
        results = _add(*inputs)
        # An output must not be an input itself.
        total = x.view_as(x) if branch is None else results[2]
        ctx.save_for_backward(total, weight, results[1])
        ctx.has_branch, ctx.has_bias = branch is not None, bias is not None
        return total, results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, vectors = _differentiate(*grads, *ctx.saved_tensors, ctx.has_bias)
        of_branch = grad if ctx.has_branch else None
        of_bias = vectors[1] if ctx.has_bias else None
        return grad, of_branch, vectors[0], of_bias, None, None


NORM_KERNELS = Table(
    "--normalization",
    {"LayerNorm": True, "RMSNorm": False},
    otherwise=Absent("has no kernel, so PyTorch's operators compute it"),
)
"""Value of --normalization -> whether the kernel subtracts the mean."""


def add_and_normalise(x: Tensor, branch: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm. See `AddAndNormalise`.

    A residual stream in fp32 has weights of another dtype. PyTorch's operators compute it, a norm
    without a kernel or with --apply-layernorm-1p, and what torch.compile traces.
    """
    centred = None if norm.zero_centred else NORM_KERNELS.get(norm.name)
    if centred is None or x.dtype != norm.weight.dtype or torch.compiler.is_compiling():
        total = x if branch is None else x + branch
        return total, norm(total)
    total, out = _AddAndNormalise.apply(x, branch, norm.weight, norm.bias, norm.eps, centred)
    return total, out
