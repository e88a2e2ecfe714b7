"""Linear layers at the entry of a tensor-parallel region, with communication during computation.

The backward pass of the operators f and g (`collectives.py`) adds up the input's gradient over the
ranks. The weight's gradient does not depend on the sum, so it is computed during this
communication. With sequence parallelism, only this rank's slice of the input is kept. The backward
pass gathers the slices again, while the input's gradient is computed
(https://arxiv.org/abs/2205.05198, section 4.2.2).

The invariant: all numbers equal those of `F.linear(enter_tensor_parallel(x, tp), weight, bias)`,
bit for bit. The same products are computed in the same order, and the same tensors are reduced.
Fused weight gradients are the exception. They are not rounded to 16 bits (`weight_gradient.py`).
On a GPU, products whose sizes are slow are computed with more columns, which are zero
(`padding.py`), and the input's gradient from a second layer is added before it is rounded.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import (
    PendingTensor,
    all_gather,
    begin_all_gather,
    begin_all_reduce,
    begin_reduce_scatter,
)
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.padding import (
    multiply_padded,
    needs_padding,
    pad_columns,
    pad_matrix,
    pad_width,
    trim_matrix,
)
from megatron.parallel.products import GradientProducts, Products, find_products
from megatron.parallel.spmd import OUTSIDE, declare
from megatron.parallel.torch_private import make_operator
from megatron.parallel.weight_gradient import add_to_gradient, find_weight

ALONE = TensorParallel()
"""The region of a layer whose product needs no communication."""
_regions: WeakValueDictionary[str, TensorParallel] = WeakValueDictionary()
"""The ranks that operators of compiled graphs communicate with, by the name of their region."""


def apply_entered_linears(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None]],
    tp: TensorParallel,
    *,
    numbers: Sequence[Tensor] = (),
    products: Products | None = None,
) -> tuple[Tensor, ...]:
    """Enter a tensor-parallel region, and apply linear layers to the same input.

    Args:
        x: [s, b, in], or [s/t, b, in] with sequence parallelism. It may have the padding of a
            layer before it.
        layers: Weight [out/t, in] and bias [out/t] of each layer.
        tp: The tensor-parallel ranks.
        numbers: What `number_layer` returned for each layer. The weights' gradients are then added
            up in fp32, as `add_to_gradient` does it, and the weights are leaves in 16 bits.
        products: Computes the products in another number format.

    Returns:
        The output of each layer, [s, b, out/t]. On a GPU it may have padding, so that `pad_width`
        is its width.
    """
    weights, biases = zip(*layers, strict=True)
    # Autograd would keep padded copies of weights for the backward pass.
    plain = not numbers and products is None and tp.size == 1
    if plain and not any(needs_padding(x, weight) for weight in weights):
        return tuple(F.linear(x, weight, bias) for weight, bias in layers)
    if not torch.compiler.is_compiling():
        return _EnteredLinears.apply(x, tp, bool(numbers), products, *weights, *biases)
    present = [bias for bias in biases if bias is not None]
    assert len(present) in (0, len(biases)), "in a graph, all layers have a bias or none has one"
    formats = [] if products is None else [products.number]
    kept = 0 if products is None else products.kept
    keeps_input = products is not None and products.keeps_input
    made = _entered_linears(
        x, list(weights), present, list(numbers), formats, kept, keeps_input, _name_region(tp)
    )
    return tuple(made[: len(weights)])


def _multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    tp: TensorParallel,
    products: Products | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output of each layer, and what `products` needs for the backward pass.

    The arguments are those of `apply_entered_linears`.
    """
    entered = all_gather(x, tp) if tp.sequence_parallel else x
    if products is not None:
        return products.multiply(entered, weights, biases)
    layers = zip(weights, biases, strict=True)
    return [multiply_padded(entered, weight, bias) for weight, bias in layers], []


def _differentiate(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    tp: TensorParallel,
    *,
    leaves: Sequence[Tensor] | None,
    needs_x: bool,
    need_weights: Sequence[bool],
    need_biases: Sequence[bool],
    products: Products | None = None,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Compute the gradients of all layers, with communication during the products.

    Args:
        grads: Gradient of each output, [s, b, out/t], padded as the output.
        x: The input as `apply_entered_linears` gets it, or what `products` keeps of it.
        weights: The weight of each layer, or a copy of it.
        tp: The tensor-parallel ranks.
        leaves: The weights whose `grad` the products are added to, or None to return the gradients.
        needs_x: Whether the gradient of the input is needed.
        need_weights: Whether the gradient of each weight is needed.
        need_biases: Whether the gradient of each bias is needed.
        products: Computes the products in another number format.
        kept: What `products` needs.

    Returns:
        The gradient of the input, those of the weights, and those of the biases.
    """
    rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]  # [s b, out/t]
    gradients = None
    if products is not None:
        # It may send small messages, which must not wait for the all-gather below.
        gradients = products.begin_backward(rows, weights, kept)
    entered = None
    if tp.sequence_parallel and True in need_weights:
        entered = begin_all_gather(x, tp)
    grad_x = pending = None
    if needs_x:
        grad_x = _multiply_back(rows, weights, x.shape[-1], gradients).view(-1, *x.shape[1:])
        if tp.size > 1:
            pending = _begin_sum(grad_x, tp)
    grad_weights: list[Tensor | None] = [None] * len(weights)
    # With two layers, the sum is communicated during both products.
    if True in need_weights:
        states = (x if entered is None else entered.wait()).flatten(0, 1)  # [s b, in]
        for number, needed in enumerate(need_weights):
            if needed and leaves is not None:
                _add_product(leaves[number], number, rows, states, gradients)
            elif needed and gradients is not None:
                grad_weights[number] = gradients.multiply_input(number, states)
            elif needed:
                product = rows[number].t().mm(pad_columns(states))
                grad_weights[number] = trim_matrix(product, *weights[number].shape)
    grad_biases = [
        row.sum(0)[: weight.shape[0]] if needed else None
        for row, weight, needed in zip(rows, weights, need_biases, strict=True)
    ]
    return grad_x if pending is None else pending.wait(), grad_weights, grad_biases


@declare(
    "tp",
    x=OUTSIDE,
    parameters="V",
    out="V",
    forward="/all_gather",
    backward="all_reduce/all_gather reduce_scatter",
)
class _EnteredLinears(torch.autograd.Function):
    """Several linear layers of one input. See `apply_entered_linears`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: TensorParallel,
        fused: bool,
        products: Products | None,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights = parameters[:count]
        ctx.tp = tp
        # A recomputation unpacks saved tensors as copies, which are not the leaves.
        ctx.leaves = weights if fused else None
        ctx.products = products
        ctx.count = count
        outs, kept = _multiply(x, weights, parameters[count:], tp, products)
        if products is not None and products.keeps_input:
            x = kept.pop()
        # This is the slice of the sequence, not the gathered input.
        ctx.save_for_backward(x, *weights, *kept)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        needs_x, _, _, _, *needed = ctx.needs_input_grad
        count = ctx.count
        weights = saved[:count]
        grad_x, grad_weights, grad_biases = _differentiate(
            grads,
            x,
            weights,
            ctx.tp,
            leaves=ctx.leaves,
            needs_x=needs_x,
            need_weights=needed[:count],
            need_biases=needed[count:],
            products=ctx.products,
            kept=saved[count:],
        )
        return grad_x, None, None, None, *grad_weights, *grad_biases


def _adds_products(rows: Tensor) -> bool:
    """Return whether a product of the device adds to a matrix in the same kernel."""
    return rows.is_cuda


def _multiply_back(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    width: int,
    gradients: GradientProducts | None,
) -> Tensor:
    """Return the input's gradient from all layers, [s b, width], a partial sum of this rank."""
    if gradients is not None:
        return gradients.multiply_weights()
    columns = pad_width(width, rows[0])
    total = rows[0].mm(pad_matrix(weights[0], rows[0].shape[1], columns))
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        matrix = pad_matrix(weight, row.shape[1], columns)
        if _adds_products(row):
            # One rounding less than below, and no second matrix to write and read.
            total.addmm_(row, matrix)
        else:
            # Each product is rounded before it is added, as autograd does it. The last layer comes
            # first in a backward pass, but the order of two summands does not change a sum.
            total += row.mm(matrix)
    return total if columns == width else trim_matrix(total, total.shape[0], width)


def _add_product(
    leaf: Tensor,
    number: int,
    rows: Sequence[Tensor],
    states: Tensor,
    gradients: GradientProducts | None,
) -> None:
    """Add the gradient of a layer's weight to the leaf."""
    if gradients is None:
        add_to_gradient(leaf, rows[number].t(), pad_columns(states))
    else:
        gradients.add_to_gradient(leaf, number, states)


def _begin_sum(partial: Tensor, tp: TensorParallel) -> PendingTensor:
    """Start to add up the input's gradient over several ranks, [s, b, in] in any case."""
    if tp.sequence_parallel:
        return begin_reduce_scatter(partial, tp)
    return begin_all_reduce(partial, tp)


# What follows is for compiled graphs. Inductor would place each wait directly after the start of
# the communication. It does not look into an operator that it does not know, so the order inside
# of these operators does not change. torch keeps compiled graphs between runs, and finds them by
# the arguments of the forward operator. If only those of the backward operator change, both need
# new names.
#
# `formats` has the number of an object for the products, or is empty (`products.py`).


def offer_to_graphs(tp: TensorParallel) -> None:
    """Let operators of compiled graphs communicate with these tensor-parallel ranks."""
    # The region of one rank has the same name as `ALONE`, which is always registered.
    if tp.size > 1:
        _regions[_name_region(tp)] = tp


def _name_region(tp: TensorParallel) -> str:
    """Return the name of a region, from which the shapes of all outputs follow."""
    return f"{tp.size}, sequence" if tp.sequence_parallel else f"{tp.size}"


def run_forward(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    numbers: list[Tensor],
    formats: list[Tensor],
    kept: int,
    keeps_input: bool,
    region: str,
) -> list[Tensor]:
    """Compute the forward operator. See `apply_entered_linears`.

    `biases` is empty if the layers have no bias. The outputs are followed by what `products` keeps.
    """
    given: Sequence[Tensor | None] = biases or [None] * len(weights)
    outs, saved = _multiply(x, weights, given, _regions[region], find_products(formats))
    return [*outs, *saved]


def run_backward(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    biased: bool,
    numbers: list[Tensor],
    formats: list[Tensor],
    kept: list[Tensor],
    region: str,
) -> list[Tensor]:
    """Compute the backward operator.

    Returns:
        The gradients of the input, of the weights, and of the biases if there are some. Those of
        the weights are left out if the layers have numbers, because they are added to the leaves.
    """
    grad_x, grad_weights, grad_biases = _differentiate(
        grads,
        x,
        weights,
        _regions[region],
        leaves=[find_weight(number) for number in numbers] or None,
        needs_x=True,
        need_weights=[True] * len(weights),
        need_biases=[biased] * len(weights),
        products=find_products(formats),
        kept=kept,
    )
    every = (grad_x, *grad_weights, *grad_biases)
    return [grad for grad in every if grad is not None]


def _shape_forward(*inputs: Any) -> list[Tensor]:
    x, weights, _, _, formats, kept, keeps_input, region = inputs
    tp = _regions[region]
    parts = tp.size if tp.sequence_parallel else 1
    widths = [weight.shape[0] for weight in weights]
    if not formats:
        widths = [pad_width(width, x, parts) for width in widths]
    outs = [x.new_empty((x.shape[0] * parts, *x.shape[1:-1], width)) for width in widths]
    outs += [x.new_empty((), dtype=torch.float32) for _ in range(kept)]
    if keeps_input:
        by_columns = x.new_empty((x.shape[-1], *x.shape[:-1]), dtype=torch.float8_e4m3fn)
        outs.append(by_columns.movedim(0, -1))
    return outs


def _shape_backward(*inputs: Any) -> list[Tensor]:
    grads, x, weights, biased, numbers, *_ = inputs
    made = [grads[0].new_empty(x.shape)]
    if not numbers:
        made += [weight.new_empty(weight.shape) for weight in weights]
    if biased:
        made += [weight.new_empty(weight.shape[:1]) for weight in weights]
    return made


_entered_linears = make_operator("padded_linears", _shape_forward)(run_forward)
_entered_linears_backward = make_operator("padded_linears_backward", _shape_backward)(run_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, numbers, formats, kept, keeps_input, ctx.region = inputs
    ctx.biased = bool(biases)
    ctx.sizes = len(weights), len(numbers), len(formats)
    scalars = output[len(weights) : len(weights) + kept]
    ctx.save_for_backward(output[-1] if keeps_input else x, *weights, *numbers, *formats, *scalars)


def _call_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    layers = ctx.sizes[0]
    weights, numbers, formats, kept = (
        rest[begin:end] for begin, end in pairwise((0, *accumulate(ctx.sizes), None))
    )
    grad_x, *others = _entered_linears_backward(
        grads[:layers], x, weights, ctx.biased, numbers, formats, kept, ctx.region
    )
    grad_biases = others[-layers:] if ctx.biased else []
    grad_weights = [None] * layers if numbers else others[:layers]
    without = [None] * len(numbers), [None] * len(formats), None, None, None
    return grad_x, grad_weights, grad_biases, *without


torch.library.register_autograd("megatron::padded_linears", _call_backward, setup_context=_save)
_regions[_name_region(ALONE)] = ALONE
