"""Dropout and the addition of its result to the residual stream, with a kernel for each direction.

The forward kernel computes the mask and residual + dropout(x) in one pass. The backward kernel
computes the mask again, so none is kept. In 16 bits they move 10 bytes for each element. PyTorch's
operators move 16, in two kernels forward and one backward, and keep one byte.

`torch.compile` fuses the product and the addition itself. It gets the mask from an operator.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.parallel.rng import draw_mask_in_graph


@torch.library.custom_op("megatron::drop", mutates_args=())
def _apply(
    x: Tensor,
    residual: Tensor | None,
    dropout_key: Tensor,
    site: Tensor,
    threshold: int,
    place: list[int],
) -> Tensor:
    """Return residual + dropout(x)."""
    from megatron.extras.step.kernels.dropout_kernel import launch

    out = _make_result(x, residual)
    if residual is not None:
        residual = residual.contiguous()
    launch(x.contiguous(), residual, out, dropout_key, int(site), threshold, place)
    return out


@_apply.register_fake
def _make_result(x: Tensor, residual: Tensor | None, *_: object) -> Tensor:
    # The residual stream may be in fp32.
    if residual is not None:
        x = residual
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@draw_mask_in_graph.register_kernel("cuda")
def _draw_mask(
    dropout_key: Tensor, site: Tensor, threshold: int, shape: list[int], place: list[int]
) -> Tensor:
    from megatron.extras.step.kernels.dropout_kernel import launch

    kept = torch.empty(shape, dtype=torch.bool, device=dropout_key.device)
    launch(None, None, kept, dropout_key, int(site), threshold, place)
    return kept


class _Drop(torch.autograd.Function):
    """Both directions. The gradient of the residual is the one that arrives."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, key: Tensor, site: Tensor, *rest: Any
    ) -> Tensor:
        ctx.save_for_backward(key, site)
        ctx.rest, ctx.has_residual, ctx.dtype = rest, residual is not None, x.dtype
        return _apply(x, residual, key, site, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # With a residual stream in fp32, the gradient that arrives is in fp32.
        grad = _apply(grads[0].to(ctx.dtype), None, *ctx.saved_tensors, *ctx.rest)
        grad_residual = None
        if ctx.has_residual:
            grad_residual = grads[0]
        return grad, grad_residual, None, None, None, None


def drop(x: Tensor, residual: Tensor | None, *place: Any) -> Tensor:
    """Return residual + dropout(x). See `Drop`."""
    out: Tensor = _Drop.apply(x, residual, *place)
    return out
