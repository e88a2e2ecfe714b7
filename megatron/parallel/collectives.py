"""Every tensor-parallel collective, as the conjugate pairs of Megatron-LM.

Each is an autograd Function whose backward is the other half of its pair (https://arxiv.org/abs/1909.08053, section 3, f and g;
https://arxiv.org/abs/2205.05198, section 4.2.2, g and g-bar for a sequence cut over the ranks):

    copy_to_tensor_parallel       f:      forward identity,        backward all-reduce
    reduce_from_tensor_parallel   g:      forward all-reduce,      backward identity
    gather_sequence               g:      forward all-gather,      backward reduce-scatter
    reduce_scatter_sequence       g-bar:  forward reduce-scatter,  backward all-gather

Activations are [s, b, h]; with sequence parallelism [s/t, b, h]. The invariant: with one rank each is the identity, for nothing.

In a compiled graph the same pairs are torch's functional collectives, which a compiler can trace; no clock runs there.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from megatron.parallel.mesh import TensorParallel

# torch 2.13 renamed them and warns of the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _group(tp: TensorParallel) -> dist.ProcessGroup:
    assert tp.group is not None, "one rank has no group, and needs no collective"
    return tp.group


def all_reduce(
    x: Tensor, tp: TensorParallel, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce in place over the tensor-parallel ranks; not differentiable."""
    if tp.size > 1:
        with tp.comm_timer():
            dist.all_reduce(x, op=op, group=tp.group)
    return x


def all_gather(x: Tensor, tp: TensorParallel) -> Tensor:
    """The ranks' tensors one after the other along the first dimension; not differentiable. [n, ...] -> [n t, ...]"""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_gather_tensor(x, 0, _group(tp)))
    out = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    with tp.comm_timer():
        _all_gather_single(out, x, group=tp.group)
    return out


def _sum(x: Tensor, tp: TensorParallel) -> Tensor:
    """The ranks' sum as a new tensor: the gradient or activation given may be shared with another branch of the graph."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", _group(tp)))
    return all_reduce(x.clone(memory_format=torch.contiguous_format), tp)


def _reduce_scatter(x: Tensor, tp: TensorParallel) -> Tensor:
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, _group(tp)))
    out = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    with tp.comm_timer():
        _reduce_scatter_single(out, x, group=tp.group)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.tp), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return _sum(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.tp), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.tp), None


def copy_to_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """f: enter a region that is cut over the ranks with an activation that all of them hold. [s, b, h] -> [s, b, h]"""
    return _Copy.apply(x, tp) if tp.size > 1 else x


def reduce_from_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """g: leave such a region by adding up the ranks' parts. [s, b, h] -> [s, b, h]"""
    return _Reduce.apply(x, tp) if tp.size > 1 else x


def gather_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enter a tensor-parallel region from a cut sequence. [s/t, b, h] -> [s, b, h]"""
    return _GatherSequence.apply(x, tp) if tp.size > 1 else x


def reduce_scatter_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leave a tensor-parallel region into a cut sequence. [s, b, h] -> [s/t, b, h]"""
    return _ReduceScatterSequence.apply(x, tp) if tp.size > 1 else x


def enter_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """Into a tensor-parallel region: [s, b, h] or [s/t, b, h] -> [s, b, h]."""
    return gather_sequence(x, tp) if tp.sequence_parallel else copy_to_tensor_parallel(x, tp)


def leave_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """Out of a tensor-parallel region: [s, b, h] (a part of the sum on each rank) -> [s, b, h] or [s/t, b, h]."""
    return (
        reduce_scatter_sequence(x, tp)
        if tp.sequence_parallel
        else reduce_from_tensor_parallel(x, tp)
    )
