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
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.extras.step.float8.operand_shares import Operand, OperandCounter
from megatron.extras.step.float8.recipe import GRADIENTS, Recipe
from megatron.extras.step.float8.rounding import (
    FORWARD,
    Order,
    Rounded,
    find_largest,
    multiply_rounded,
    round_complete_rows,
    round_to_float8,
    round_weight,
)
from megatron.extras.step.float8.weight_scales import WeightScale
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import ParallelGroup, TensorParallel
from megatron.parallel.products import GradientProducts, number_products
from megatron.parallel.weight_gradient import add_to_gradient

_ORDERS: dict[bool, Order] = {False: "rows", True: "both"}
"""Whether the product for a weight's gradient reads a matrix -> the orders of its values."""


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
    keeps_weights: bool = False
    """Whether rounded weights are used until `use_weights` or `forget_weights` is called."""
    keeps_input: bool = False
    """See `Products`. It needs one scale, and an input that is not gathered."""
    names: tuple[str, ...] = ()
    """Names of the layers in the complete model, for the counter."""
    counter: OperandCounter | None = None

    _weights: dict[int, tuple[Rounded, Rounded]] = field(default_factory=dict)
    """The number of a layer -> its weight for the forward and for the backward pass."""

    def __post_init__(self) -> None:
        """Make the products known to compiled graphs."""
        self.kept = 0 if self.recipe.rowwise else 1
        self.number = number_products(self)

    def forget_weights(self) -> None:
        """Drop the rounded weights. Each one is rounded when it is next used."""
        self._weights.clear()

    def use_weights(self, rounded: Sequence[tuple[Rounded, Rounded]]) -> None:
        """Use weights that were rounded from their masters, until `forget_weights` is called.

        Args:
            rounded: For each layer, its weight for the forward and for the backward pass.
        """
        self._weights.update(enumerate(rounded))

    def get_weight(self, number: int, weight: Tensor, *, backward: bool) -> Rounded:
        """Return the weight of a layer in float8 for one of the passes.

        Args:
            number: The layer, from 0.
            weight: [out/t, in]. It is read only if no rounded one is kept.
            backward: Whether the product is the one for the input's gradient.
        """
        scale = self.scales[number]
        if self.keeps_weights and number not in self._weights:
            self._weights[number] = round_weight(
                weight.detach(), scale.get_largest(), scale.get_largest_of_all(), weight.dtype
            )
        if number in self._weights:
            return self._weights[number][backward]
        if backward:
            return round_to_float8(weight, scale.get_largest_of_all(), FORWARD, "columns")
        return round_to_float8(weight, scale.get_largest(), FORWARD)

    def multiply(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the outputs. See `Products.multiply`."""
        rows = x.reshape(-1, x.shape[-1])
        largest = self._find_largest([rows], self.input_groups)
        order = _ORDERS[self.keeps_input]
        (rounded,) = self._round_all([rows], largest, FORWARD, order)
        self._count("input", [rows], [rounded])
        outs = []
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            matrix = self.get_weight(number, weight, backward=False)
            out = multiply_rounded(
                rounded, matrix.t(), x.dtype, emulated=self.recipe.emulated, fast=True
            )
            if bias is not None:
                out = out + bias
            outs.append(out.view(*x.shape[:-1], -1))
        if self.keeps_input:
            by_columns = rounded.t().store_by_rows().t()
            return outs, [rounded.inverse, by_columns.view(x.shape)]
        # With `rowwise`, weights' gradients are computed from inputs that are not rounded.
        if self.recipe.rowwise:
            return outs, []
        return outs, [*largest]

    def begin_backward(
        self, rows: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> GradientProducts:
        """Return the products of the backward pass. See `Products.begin_backward`."""
        if self.shared_pair is not None:
            rows = [self.shared_pair.add_up(row) for row in rows]
        dtype = getattr(torch, GRADIENTS[self.recipe.format])
        largest = self._find_largest(rows, self.gradient_groups)
        # The product for the weight's gradient needs the order of columns.
        order = _ORDERS[not self.recipe.rowwise]
        rounded = self._round_all(rows, largest, dtype, order)
        self._count("gradient", rows, rounded)
        return _Gradients(self, rows, rounded, weights, kept)

    def _find_largest(
        self, matrices: Sequence[Tensor], groups: Sequence[ParallelGroup]
    ) -> Sequence[Tensor]:
        """Return the largest values of complete matrices or rows, after one message.

        The result is empty if this rank has complete rows. A kernel finds them when it rounds.
        """
        rowwise = self.recipe.rowwise
        if rowwise and all(group.size == 1 for group in groups):
            return ()
        found = [find_largest(each, by_row=rowwise) for each in matrices]
        largest = found[0].unsqueeze(0)
        if len(found) > 1:
            largest = torch.stack(found)
        for group in groups:
            all_reduce(largest, group, dist.ReduceOp.MAX)
        return largest.unbind()

    def _round_all(
        self,
        matrices: Sequence[Tensor],
        largest: Sequence[Tensor],
        dtype: torch.dtype,
        order: Order,
    ) -> list[Rounded]:
        """Round matrices with what `_find_largest` returned."""
        if not largest:
            return [round_complete_rows(each, dtype) for each in matrices]
        pairs = zip(matrices, largest, strict=True)
        return [round_to_float8(each, number, dtype, order) for each, number in pairs]

    def _count(
        self, operand: Operand, matrices: Sequence[Tensor], rounded: Sequence[Rounded]
    ) -> None:
        """Count the values that are lost, in an iteration with statistics of layers."""
        if self.counter is not None:
            for name, x, after in zip(self.names[: len(matrices)], matrices, rounded, strict=True):
                self.counter.count(operand, name, x, after)


@dataclass(eq=False)
class _Gradients:
    """The products of one backward pass. See `GradientProducts`."""

    _products: Float8Products
    _rows: Sequence[Tensor]
    _rounded: Sequence[Rounded]
    _weights: Sequence[Tensor]
    _kept: Sequence[Tensor]
    """The largest value of the input, or nothing if it is not rounded here. If the rounded input is
    kept, its inverse scale."""
    _input: Rounded | None = None

    def multiply_weights(self) -> Tensor:
        """Return the input's gradient. See `GradientProducts.multiply_weights`."""
        products = []
        for number, (rounded, weight) in enumerate(zip(self._rounded, self._weights, strict=True)):
            matrix = self._products.get_weight(number, weight, backward=True)
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
            self._input = self._round_input(x)
        dtype = self._weights[number].dtype
        return self._multiply(self._rounded[number].t(), self._input, dtype)

    def _round_input(self, x: Tensor) -> Rounded:
        if not self._products.keeps_input:
            return round_to_float8(x, self._kept[0], FORWARD, "columns")
        if self._products.recipe.emulated:
            # The order of the values determines that of the sums.
            x = x.contiguous()
        return Rounded(x, self._kept[0])

    def add_to_gradient(self, weight: Tensor, number: int, x: Tensor) -> None:
        """Add a weight's gradient to its `grad`. See `GradientProducts.add_to_gradient`."""
        if not self._kept:
            add_to_gradient(weight, self._rows[number].t(), x)
        elif weight.grad is None:
            weight.grad = self.multiply_input(number, x).float()
        else:
            # A float8 product cannot be added to a sum. One kernel reads it in bf16 and adds it.
            weight.grad += self.multiply_input(number, x)

    def _multiply(self, a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
        emulated = self._products.recipe.emulated
        return multiply_rounded(a, b, dtype, emulated=emulated, fast=False)
