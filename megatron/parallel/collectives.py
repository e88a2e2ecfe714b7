"""Every tensor-parallel collective, as the conjugate pairs of Megatron-LM.

Each is an autograd Function whose backward is the other half of its pair. f and g are from
https://arxiv.org/abs/1909.08053, section 3. g and g-bar for a sequence that is sharded over the
ranks are from https://arxiv.org/abs/2205.05198, section 4.2.2.

    copy_to_tensor_parallel       f:      forward identity,        backward all-reduce
    reduce_from_tensor_parallel   g:      forward all-reduce,      backward identity
    enter_tensor_parallel         g:      forward all-gather,      backward reduce-scatter
    leave_tensor_parallel         g-bar:  forward reduce-scatter,  backward all-gather

The last two have the first two without sequence parallelism. Activations are [s, b, h], and
[s/t, b, h] with sequence parallelism. The invariant: with one rank
each function is the identity and has no cost.

`begin_all_gather` also gathers the keys of the context-parallel ranks (`context.py`).

In a compiled graph the same pairs are torch's functional collectives, because the compiler can
trace them. `comm_timer` does not run there. The layers of `entered_linear.py` call the functions
below in graphs too.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import CommTimer, ParallelGroup, TensorParallel
from megatron.parallel.rank_progress import wait_for
from megatron.parallel.spmd import declare
from megatron.parallel.torch_private import (
    all_gather_in_graph,
    all_reduce_in_graph,
    reduce_scatter_in_graph,
)

# torch 2.13 renamed these functions and logs a warning if the old names are used.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _group(tp: ParallelGroup) -> dist.ProcessGroup:
    assert tp.group is not None, "one rank has no group, and needs no collective"
    return tp.group


def all_reduce(
    x: Tensor, tp: ParallelGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce `x` in place over the tensor-parallel ranks, and return it. Not differentiable."""
    if tp.size > 1:
        with tp.comm_timer():
            dist.all_reduce(x, op=op, group=tp.group)
    return x


def all_gather(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension: [n, ...] -> [n t, ...].

    Not differentiable.
    """
    # Collectives refuse tensors that are not contiguous.
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return all_gather_in_graph(x, _group(tp))
    out = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    with tp.comm_timer():
        all_gather_single(out, x, group=tp.group)
    return out


def _sum(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Return the ranks' sum as a new tensor.

    An all-reduce in place would change `x`, which another branch of the graph may use.
    """
    if torch.compiler.is_compiling():
        return all_reduce_in_graph(x.contiguous(), _group(tp))
    return all_reduce(x.clone(memory_format=torch.contiguous_format), tp)


def _reduce_scatter(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Return this rank's part of the ranks' sum: [n, ...] -> [n/t, ...]."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return reduce_scatter_in_graph(x, _group(tp))
    out = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    with tp.comm_timer():
        _reduce_scatter_single(out, x, group=tp.group)
    return out


@dataclass
class PendingTensor:
    """A tensor that a collective may still be writing into."""

    tensor: Tensor
    work: dist.Work | None = None
    """The collective, or None if there is nothing to wait for."""
    comm_timer: CommTimer = nullcontext

    def wait(self) -> Tensor:
        """Return the tensor when it is complete. On a GPU only the stream waits, not the host.

        The timer measures the wait. What was hidden behind computation does not count.
        """
        if self.work is not None:
            with self.comm_timer():
                wait_for(self.work)
        return self.tensor


def begin_all_reduce(x: Tensor, tp: ParallelGroup) -> PendingTensor:
    """Start to add up `x` in place over the tensor-parallel ranks. Not differentiable."""
    return PendingTensor(x, dist.all_reduce(x, group=_group(tp), async_op=True), tp.comm_timer)


def begin_all_gather(x: Tensor, tp: ParallelGroup) -> PendingTensor:
    """Start to concatenate the ranks' tensors: [n, ...] -> [n t, ...]. Not differentiable."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    work = all_gather_single(out, x, group=_group(tp), async_op=True)
    return PendingTensor(out, work, tp.comm_timer)


def begin_reduce_scatter(x: Tensor, tp: ParallelGroup) -> PendingTensor:
    """Start to compute this rank's part of the ranks' sum: [n, ...] -> [n/t, ...].

    Not differentiable.
    """
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    work = _reduce_scatter_single(out, x, group=_group(tp), async_op=True)
    return PendingTensor(out, work, tp.comm_timer)


# The second result of each `backward` is the gradient of `tp`, which has none.


@declare("tp", x="I", out="R", backward="all_reduce")
class _Copy(torch.autograd.Function):
    """f: forward identity, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.tp = tp
        # A view is a tensor of its own in the graph, without a copy of the data.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.tp), None


@declare("tp", x="V", out="I", forward="all_reduce")
class _Reduce(torch.autograd.Function):
    """g: forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        return _sum(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@declare("tp", x="V", out="R", forward="all_gather", backward="reduce_scatter")
class _GatherSequence(torch.autograd.Function):
    """g with a sharded sequence: forward all-gather, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.tp), None


@declare("tp", x="V", out="V", forward="reduce_scatter", backward="all_gather")
class _ReduceScatterSequence(torch.autograd.Function):
    """g-bar: forward reduce-scatter, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.tp = tp
        return _reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.tp), None


def copy_to_tensor_parallel(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Enter a tensor-parallel region with a replicated activation (f): [s, b, h] -> [s, b, h]."""
    if tp.size > 1:
        return _Copy.apply(x, tp)
    return x


def reduce_from_tensor_parallel(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Leave a tensor-parallel region by adding up partial sums (g): [s, b, h] -> [s, b, h]."""
    if tp.size > 1:
        return _Reduce.apply(x, tp)
    return x


def enter_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enter a tensor-parallel region: [s, b, h] or [s/t, b, h] -> [s, b, h]."""
    if tp.sequence_parallel and tp.size > 1:
        return _GatherSequence.apply(x, tp)
    return copy_to_tensor_parallel(x, tp)


def leave_tensor_parallel(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leave a tensor-parallel region: [s, b, h] -> [s, b, h] or [s/t, b, h].

    Each rank's input is a partial sum.
    """
    if tp.sequence_parallel and tp.size > 1:
        return _ReduceScatterSequence.apply(x, tp)
    return reduce_from_tensor_parallel(x, tp)
