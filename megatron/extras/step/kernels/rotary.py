"""Rotary positions, and RMSNorm of heads before them, with one kernel for each direction.

Without a norm, the forward kernel reads the projection to queries, keys and values, rotates in
registers, and writes three tensors. The backward kernel reads their gradients, and writes the
gradient of the projection. PyTorch needs several kernels with fp32 temporaries for the rotation,
and concatenates the three gradients afterwards.

The values are copied too. The projection is then not kept for the backward pass. A view of the
values would keep all of it.

With norms of queries and keys, the forward kernel writes both, and values stay where they are. The
backward kernel reads the projection, which is kept, and three gradients. A second, small kernel
adds up the gradients of the weights. PyTorch's norm and the rotation are two kernels for queries
and two for keys in each direction, and one more that concatenates the gradients (docs/kernels.md).
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.norm import RMSNorm
from megatron.parallel.torch_private import make_operator


def _make_parts(x: Tensor, *others: Any) -> list[Tensor]:
    s, b, g, _, d = x.shape
    return [x.new_empty((s, b, g, size, d)) for size in others[-1]]


def _make_whole(parts: list[Tensor], *rest: object) -> Tensor:
    s, b, g, _, d = parts[0].shape
    return parts[0].new_empty((s, b, g, sum(part.shape[3] for part in parts), d))


@make_operator("rotate_heads", _make_parts)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sizes: list[int]) -> list[Tensor]:
    """Divide [s, b, g, sum of sizes, d] into parts [s, b, g, size, d]. Rotate the first two."""
    from megatron.extras.step.kernels.rotary_kernel import launch

    parts = _make_parts(x, sizes)
    launch(_align(x), parts, cos, sin, join=False)
    return parts


@make_operator("rotate_heads_backward", _make_whole)
def _rotate_back(grads: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the undivided heads, from those of the parts."""
    from megatron.extras.step.kernels.rotary_kernel import launch

    whole = _make_whole(grads)
    launch(whole, [_align(grad) for grad in grads], cos, sin, join=True)
    return whole


def _align(x: Tensor) -> Tensor:
    """Return a tensor whose channels are adjacent, as the kernel needs them."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, list[int]], output: list[Tensor]) -> None:
    # The rotation is linear, so the backward pass needs the tables only. All layers share them.
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, None, None, None]:
    cos, sin = ctx.saved_tensors
    return _rotate_back(grads, cos, sin), None, None, None


torch.library.register_autograd("megatron::rotate_heads", _backward, setup_context=_save)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [s, b, g, n, d], as `megatron.model.positions.rotate`."""
    (rotated,) = _rotate(x, cos, sin, [x.shape[3]])
    return rotated


def rotate_projection(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the projection, and rotate queries and keys. See `RotateProjection`."""
    query, key, value = _rotate(qkv, cos, sin, [qkv.shape[3] - 2, 1, 1])
    return query, key, value


def _make_normalised(qkv: Tensor, *_: object) -> list[Tensor]:
    s, b, g, heads, d = qkv.shape
    return [
        qkv.new_empty((s, b, g, heads - 2, d)),
        qkv.new_empty((s, b, g, 1, d)),
        qkv.new_empty((s, b, g, heads - 1), dtype=torch.float32),
    ]


def _make_gradients(
    _: list[Tensor], qkv: Tensor, weight: Tensor, *rest: object
) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), weight.new_empty((2, len(weight)))


@make_operator("normalise_and_rotate", _make_normalised)
def _normalise(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> list[Tensor]:
    """Return queries, keys and 1 / standard deviation of each."""
    from megatron.extras.step.kernels.rotary_kernel import launch_forward

    query, key, statistics = _make_normalised(qkv)
    launch_forward(qkv, query, key, (query_weight, key_weight), cos, sin, statistics, eps)
    return [query, key, statistics]


@make_operator("normalise_and_rotate_backward", _make_gradients)
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
    from megatron.extras.step.kernels.rotary_kernel import count_programs, launch_backward

    grad, grad_weights = _make_gradients(grads, qkv, query_weight)
    programs = count_programs(qkv.shape[0] * qkv.shape[1])
    parts = qkv.new_empty((programs, *grad_weights.shape), dtype=torch.float32)
    # Gradients of attention have their channels in any order.
    query, key, value = map(_align, grads)
    weights = query_weight, key_weight
    launch_backward(
        qkv, (query, key, value), weights, cos, sin, statistics, grad, parts, grad_weights
    )
    return grad, grad_weights


class _NormaliseProjection(torch.autograd.Function):
    """Both directions. The values are a view of the projection."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, eps = inputs
        query, key, statistics = _normalise(*tensors, eps)
        # The normalised heads are not kept, because the backward kernel computes them again.
        ctx.save_for_backward(*tensors, statistics)
        return query, key, tensors[0][:, :, :, -1:]

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
