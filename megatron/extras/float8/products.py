"""The three products of linear layers in float8, with scales that do not depend on the layout.

The largest value of a tensor comes from the complete tensor, even if ranks hold parts of it. So
each rank rounds its part as one process would round the complete tensor. The table shows which
ranks exchange the largest value.

| operand                          | tensorwise            | rowwise               |
|----------------------------------|-----------------------|-----------------------|
| weights                          | one message a step    | one message a step    |
| input, column-parallel           | no message            | no message            |
| input, row-parallel              | tensor-parallel ranks | tensor-parallel ranks |
| output gradient, column-parallel | tensor-parallel ranks | tensor-parallel ranks |
| output gradient, row-parallel    | no message            | no message            |

If ranks share query groups, each has the gradients of keys and values from its own queries. They
are added up before they are rounded (`SharedPair`).

With `tensorwise`, context-parallel ranks also exchange the largest value of each input and each
gradient. With `rowwise` they do not, because a row is a token, and one context-parallel rank has
all of it.

With `tensorwise`, all three products have operands in float8. With `rowwise`, a weight's gradient
would need scales along the tokens, so it is computed from operands that are not rounded. For the
input's gradient, the complete weight then has one scale (torchao's `rowwise_with_gw_hp`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.extras.float8.operand_shares import Operand, OperandCounter
from megatron.extras.float8.recipe import GRADIENTS, Recipe
from megatron.extras.float8.rounding import (
    FORWARD,
    Rounded,
    find_largest,
    multiply_rounded,
    round_to_float8,
)
from megatron.extras.float8.weight_scales import WeightScale
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import ParallelGroup, TensorParallel
from megatron.parallel.products import GradientProducts, number_products


@dataclass(frozen=True)
class SharedPair:
    """A key and a value that several tensor-parallel ranks compute, for their own queries."""

    tp: TensorParallel
    group: int
    """The number of the query group."""
    groups: int
    width: int
    """Width of a key and a value together."""

    def add_up(self, rows: Tensor) -> Tensor:
        """Return the gradients of queries, key and value, [n, out/t], complete on one rank only.

        The first of the ranks that share the group gets the sum of key and value, and the others
        get zeros. So the sum over the ranks stays the same, and the rounded values are those of
        one process.
        """
        every = rows.new_zeros(len(rows), self.groups, self.width)
        every[:, self.group] = rows[:, -self.width :]
        all_reduce(every, self.tp)
        if self.tp.rank % (self.tp.size // self.groups):
            every.zero_()
        return torch.cat((rows[:, : -self.width], every[:, self.group]), dim=1)


# Compiled graphs compare each field of a frozen dataclass.
@dataclass(eq=False)
class Float8Products:
    """Computes the products of layers that have the same input. See `Products`."""

    recipe: Recipe
    scales: tuple[WeightScale, ...]
    """Those of the layers' weights."""
    input_groups: tuple[ParallelGroup, ...]
    """Groups whose ranks hold parts of input values that share a scale."""
    gradient_groups: tuple[ParallelGroup, ...]
    """The same for the outputs' gradients."""
    shared_pair: SharedPair | None = None
    names: tuple[str, ...] = ()
    """Names of the layers in the complete model, for the counter."""
    counter: OperandCounter | None = None

    def __post_init__(self) -> None:
        """Make the products known to compiled graphs."""
        self.kept = 0 if self.recipe.rowwise else 1
        self.number = number_products(self)

    def multiply(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the outputs. See `Products.multiply`."""
        rows = x.reshape(-1, x.shape[-1])
        largest = find_largest(rows, by_row=self.recipe.rowwise)
        _share_largest(largest, self.input_groups)
        rounded = self.round(rows, largest, FORWARD)
        self._count("input", [rows], [rounded])
        outs = []
        for weight, scale, bias in zip(weights, self.scales, biases, strict=True):
            matrix = self.round(weight, scale.get_largest(), FORWARD)
            out = multiply_rounded(
                rounded, matrix.t(), x.dtype, emulated=self.recipe.emulated, fast=True
            )
            if bias is not None:
                out = out + bias
            outs.append(out.view(*x.shape[:-1], -1))
        # With `rowwise`, weights' gradients are computed from inputs that are not rounded.
        if self.recipe.rowwise:
            return outs, []
        return outs, [largest]

    def begin_backward(
        self, rows: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> GradientProducts:
        """Return the products of the backward pass. See `Products.begin_backward`."""
        rowwise = self.recipe.rowwise
        if self.shared_pair is not None:
            rows = [self.shared_pair.add_up(row) for row in rows]
        largest = torch.stack([find_largest(row, by_row=rowwise) for row in rows])
        _share_largest(largest, self.gradient_groups)
        dtype = getattr(torch, GRADIENTS[self.recipe.format])
        rounded = [
            self.round(row, number, dtype)
            for row, number in zip(rows, largest.unbind(), strict=True)
        ]
        self._count("gradient", rows, rounded)
        return _Gradients(self, rows, rounded, weights, kept)

    def round(self, x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
        """Round a matrix as the recipe says. See `round_to_float8`."""
        return round_to_float8(x, largest, dtype, compiled=self.recipe.compiled)

    def _count(
        self, operand: Operand, matrices: Sequence[Tensor], rounded: Sequence[Rounded]
    ) -> None:
        """Count the values that are lost, in an iteration with statistics of layers."""
        if self.counter is not None:
            for name, x, after in zip(self.names[: len(matrices)], matrices, rounded, strict=True):
                self.counter.count(operand, name, x, after)


class _Gradients:
    """The products of one backward pass. See `GradientProducts`."""

    def __init__(
        self,
        products: Float8Products,
        rows: Sequence[Tensor],
        rounded: Sequence[Rounded],
        weights: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> None:
        self._products = products
        self._rows = rows
        self._rounded = rounded
        self._weights = weights
        self._kept = kept
        """The largest value of the input, or nothing if it is not rounded here."""
        self._input: Rounded | None = None

    def multiply_weights(self) -> Tensor:
        """Return the input's gradient. See `GradientProducts.multiply_weights`."""
        products = []
        layers = zip(self._rounded, self._weights, self._products.scales, strict=True)
        for rounded, weight, scale in layers:
            matrix = self._products.round(weight, scale.get_largest_of_all(), FORWARD)
            products.append(self._multiply(rounded, matrix, weight.dtype))
        total, *others = products
        # Each product is rounded before it is added, as in a backward pass without float8.
        for product in others:
            total += product
        return total

    def multiply_input(self, number: int, x: Tensor) -> Tensor:
        """Return a weight's gradient. See `GradientProducts.multiply_input`."""
        if not self._kept:
            return self._rows[number].t().mm(x)
        # Layers with the same input share its copy.
        if self._input is None:
            self._input = self._products.round(x, self._kept[0], FORWARD)
        return self._multiply(self._rounded[number].t(), self._input, x.dtype)

    def _multiply(self, a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
        emulated = self._products.recipe.emulated
        return multiply_rounded(a, b, dtype, emulated=emulated, fast=False)


def _share_largest(largest: Tensor, groups: Sequence[ParallelGroup]) -> None:
    """Replace the largest values of this rank's parts by those of all parts, in place."""
    for group in groups:
        all_reduce(largest, group, dist.ReduceOp.MAX)
