"""Rotary positions, with one kernel for each direction.

The forward kernel reads the projection to queries, keys and values, rotates in registers, and
writes three tensors. The backward kernel reads their gradients, and writes the gradient of the
projection. PyTorch needs several kernels with fp32 temporaries for the rotation, and
concatenates the three gradients afterwards.

The values are copied too. The projection is then not kept for the backward pass. A view of the
values would keep all of it.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.parallel.torch_private import make_operator


@make_operator("rotate_heads")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sizes: list[int]) -> list[Tensor]:
    """Divide [s, b, g, sum of sizes, d] into parts [s, b, g, size, d]. Rotate the first two."""
    from megatron.extras.step.kernels.rotary_kernel import launch

    parts = _make_parts(x, sizes)
    launch(_align(x), parts, cos, sin, join=False)
    return parts


@make_operator("rotate_heads_backward")
def _rotate_back(grads: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the undivided heads, from those of the parts."""
    from megatron.extras.step.kernels.rotary_kernel import launch

    whole = _make_whole(grads)
    launch(whole, [_align(grad) for grad in grads], cos, sin, join=True)
    return whole


def _make_parts(x: Tensor, sizes: list[int]) -> list[Tensor]:
    s, b, g, _, d = x.shape
    return [x.new_empty((s, b, g, size, d)) for size in sizes]


def _make_whole(parts: list[Tensor]) -> Tensor:
    s, b, g, _, d = parts[0].shape
    return parts[0].new_empty((s, b, g, sum(part.shape[3] for part in parts), d))


def _align(x: Tensor) -> Tensor:
    """Return a tensor whose channels are adjacent, as the kernel needs them."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


@torch.library.register_fake("megatron::rotate_heads")
def _(x: Tensor, cos: Tensor, sin: Tensor, sizes: list[int]) -> list[Tensor]:
    return _make_parts(x, sizes)


@torch.library.register_fake("megatron::rotate_heads_backward")
def _(grads: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    return _make_whole(grads)


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
