"""RMSNorm of the heads of queries and keys, and their rotation, with one kernel in each direction.

The forward kernel reads queries and keys in the projection, and writes both. Values stay where they
are. The backward kernel reads the projection and three gradients, and writes the gradient of the
projection. A second, small kernel adds up the gradients of the weights. PyTorch's norm and the
rotation are two kernels for queries and two for keys in each direction, and one more that
concatenates the gradients (docs/kernels.md).
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.extras.step.kernels.rotary import rotate, rotate_projection
from megatron.model.norm import RMSNorm
from megatron.parallel.torch_private import make_operator


@make_operator("normalise_and_rotate")
def _normalise(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> list[Tensor]:
    """Return queries, keys and 1 / standard deviation of each."""
    from megatron.extras.step.kernels.head_norm_kernel import launch_forward

    query, key, statistics = _make_results(qkv)
    launch_forward(qkv, query, key, (query_weight, key_weight), cos, sin, statistics, eps)
    return [query, key, statistics]


@make_operator("normalise_and_rotate_backward")
def _differentiate(
    grads: list[Tensor],
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    statistics: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the projection, and those of both weights in one tensor."""
    from megatron.extras.step.kernels.head_norm_kernel import count_programs, launch_backward

    grad, grad_weights = _make_gradients(qkv, query_weight)
    programs = count_programs(qkv.shape[0] * qkv.shape[1])
    parts = qkv.new_empty((programs, *grad_weights.shape), dtype=torch.float32)
    # The kernel needs adjacent channels. Gradients of attention have them in any other order.
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in grads)
    weights = query_weight, key_weight
    launch_backward(
        qkv, (query, key, value), weights, cos, sin, statistics, grad, parts, grad_weights
    )
    return grad, grad_weights


def _make_results(qkv: Tensor) -> list[Tensor]:
    s, b, g, heads, d = qkv.shape
    return [
        qkv.new_empty((s, b, g, heads - 2, d)),
        qkv.new_empty((s, b, g, 1, d)),
        qkv.new_empty((s, b, g, heads - 1), dtype=torch.float32),
    ]


def _make_gradients(qkv: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), weight.new_empty((2, len(weight)))


@torch.library.register_fake("megatron::normalise_and_rotate")
def _(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> list[Tensor]:
    return _make_results(qkv)


@torch.library.register_fake("megatron::normalise_and_rotate_backward")
def _(
    grads: list[Tensor],
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    statistics: Tensor,
) -> tuple[Tensor, Tensor]:
    return _make_gradients(qkv, query_weight)


class _NormaliseProjection(torch.autograd.Function):
    """Both directions. The values are a view of the projection."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, statistics = _normalise(qkv, query_weight, key_weight, cos, sin, eps)
        # The normalised heads are not kept, because the backward kernel computes them again.
        ctx.save_for_backward(qkv, query_weight, key_weight, cos, sin, statistics)
        return query, key, qkv[:, :, :, -1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, of_weights = _differentiate(list(grads), *ctx.saved_tensors)
        return grad, of_weights[0], of_weights[1], None, None, None


def normalise_projection(
    qkv: Tensor, query_norm: RMSNorm, key_norm: RMSNorm, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised and rotated queries and keys, and values. See `RotateProjection`."""
    query, key, value = _NormaliseProjection.apply(
        qkv, query_norm.weight, key_norm.weight, cos, sin, query_norm.eps
    )
    return query, key, value


def divide_projection(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: nn.Module | None = None,
    key_norm: nn.Module | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values. See `RotateProjection`.

    PyTorch's operators compute LayerNorm, norms over all heads or with --apply-layernorm-1p, and
    norms that torch.compile traces.
    """
    if query_norm is None or key_norm is None:
        return rotate_projection(qkv, cos, sin)
    if isinstance(query_norm, RMSNorm) and isinstance(key_norm, RMSNorm):
        traced = torch.compiler.is_compiling()
        if not (traced or query_norm.zero_centred):
            return normalise_projection(qkv, query_norm, key_norm, cos, sin)
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    return rotate(query_norm(query), cos, sin), rotate(key_norm(key), cos, sin), value
