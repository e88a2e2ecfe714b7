"""Linear layers at the entry of a tensor-parallel region, with communication during computation.

The backward pass of f and g (`collectives.py`) adds up the input's gradient over the ranks. The
weight's gradient does not depend on the sum, so it is computed during this communication. With
sequence parallelism, only this rank's slice of the input is kept. The backward pass gathers the
slices again, while the input's gradient is computed (https://arxiv.org/abs/2205.05198, section
4.2.2).

The invariant: all numbers equal those of `F.linear(enter_tensor_parallel(x, tp), weight, bias)`,
bit for bit. The same products are computed in the same order, and the same tensors are reduced.
Fused weight gradients are the exception. They are not rounded to 16 bits (`weight_gradient.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import (
    PendingTensor,
    all_gather,
    begin_all_gather,
    begin_all_reduce,
    begin_reduce_scatter,
    enter_tensor_parallel,
)
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.weight_gradient import add_to_gradient


def apply_entered_linears(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None]],
    tp: TensorParallel,
    *,
    fused: bool = False,
) -> tuple[Tensor, ...]:
    """Enter a tensor-parallel region, and apply linear layers to the same input.

    Args:
        x: [s, b, in], or [s/t, b, in] with sequence parallelism.
        layers: Weight [out/t, in] and bias [out/t] of each layer.
        tp: The tensor-parallel ranks.
        fused: Add the weights' gradients in fp32, as `add_to_gradient` does. The weights are then
            leaves in 16 bits.

    Returns:
        The output of each layer, [s, b, out/t].
    """
    # The compiler arranges communication and computation itself.
    if not fused and (tp.size == 1 or torch.compiler.is_compiling()):
        entered = enter_tensor_parallel(x, tp)
        return tuple(F.linear(entered, weight, bias) for weight, bias in layers)
    weights = [weight for weight, _ in layers]
    biases = [bias for _, bias in layers]
    return _EnteredLinears.apply(x, tp, fused, *weights, *biases)


class _EnteredLinears(torch.autograd.Function):
    """Several linear layers of one input. See `apply_entered_linears`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: TensorParallel, fused: bool, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights = [weight for weight in parameters[:count] if weight is not None]
        ctx.tp = tp
        # A recomputation unpacks saved tensors as copies, which are not the leaves.
        ctx.leaves = weights if fused else None
        # This is the slice of the sequence, not the gathered input.
        ctx.save_for_backward(x, *weights)
        entered = all_gather(x, tp) if tp.sequence_parallel else x
        return tuple(
            F.linear(entered, weight, bias)
            for weight, bias in zip(weights, parameters[count:], strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp = ctx.tp
        count = len(weights)
        needs_x, _, _, *needed = ctx.needs_input_grad
        entered = PendingTensor(x)
        if tp.sequence_parallel and any(needed[:count]):
            entered = begin_all_gather(x, tp)
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]  # [s b, out/t]
        grad_x = None
        if needs_x:
            grad_x = _begin_sum(_multiply(rows, weights), x, tp)
        grad_weights: list[Tensor | None] = [None] * count
        # With two layers, the sum is communicated during both products.
        if any(needed[:count]):
            states = entered.wait().flatten(0, 1)  # [s b, in]
            for number in range(count):
                if not needed[number]:
                    continue
                if ctx.leaves is None:
                    grad_weights[number] = rows[number].t().mm(states)
                else:
                    add_to_gradient(ctx.leaves[number], rows[number].t(), states)
        grad_biases = [
            row.sum(0) if wanted else None for row, wanted in zip(rows, needed[count:], strict=True)
        ]
        return (
            None if grad_x is None else grad_x.wait(),
            None,
            None,
            *grad_weights,
            *grad_biases,
        )


def _multiply(rows: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the input's gradient from all layers, [s b, in]. It is this rank's partial sum."""
    # Each product is rounded before it is added, as autograd does it. The last layer comes first
    # in a backward pass, but the order of two summands does not change a sum.
    total = rows[0].mm(weights[0])
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total += row.mm(weight)
    return total


def _begin_sum(partial: Tensor, x: Tensor, tp: TensorParallel) -> PendingTensor:
    """Start to add up the input's gradient over the ranks, in the shape of `x`."""
    if tp.size == 1:
        return PendingTensor(partial.view(x.shape))
    if tp.sequence_parallel:
        return begin_reduce_scatter(partial.view(-1, *x.shape[1:]), tp)
    return begin_all_reduce(partial.view(x.shape), tp)
