"""Interface for matrix products of linear layers in another number format, such as float8.

A linear layer has three products: its output, its input's gradient and its weight's gradient.
`entered_linear.py` decides when they are computed, and what is communicated at the same time. An
object with this interface decides how they are computed. A layer without one multiplies in the
dtype of its operands.
"""

from collections.abc import Sequence
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class GradientProducts(Protocol):
    """The products of one backward pass through layers that have the same input."""

    def multiply_weights(self) -> Tensor:
        """Return the gradient of the input from all layers, [n, in], a partial sum of this rank."""

    def multiply_input(self, number: int, x: Tensor) -> Tensor:
        """Return the gradient of a layer's weight, [out/t, in].

        Args:
            number: The layer, from 0.
            x: The input of the layers, [n, in], or what `Products.multiply` returned in its place.
        """

    def add_to_gradient(self, weight: Tensor, number: int, x: Tensor) -> None:
        """Add the gradient of a layer's weight to `weight.grad`, which is in fp32.

        Args:
            weight: [out/t, in], a leaf in 16 bits.
            number: Same as for `multiply_input`.
            x: Same as for `multiply_input`.
        """


class Products(Protocol):
    """Computes the products of layers that have the same input, for n tokens."""

    number: Tensor
    """What `number_products` returned."""
    kept: int
    """Number of scalars in fp32 that `multiply` keeps for the backward pass."""
    keeps_input: bool
    """Whether it also keeps the input in float8_e4m3fn, which takes the place of the input."""

    def multiply(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the outputs.

        Args:
            x: [..., in].
            weights: The weight [out/t, in] of each layer.
            biases: The bias [out/t] of each layer.

        Returns:
            The output [..., out/t] of each layer, and what the backward pass needs besides the
            arguments. With `keeps_input`, its last entry is the rounded input [..., in], whose
            memory has the order [in, ...].
        """

    def begin_backward(
        self, rows: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> GradientProducts:
        """Return the products of the backward pass.

        Args:
            rows: The gradient of each layer's output, [n, out/t].
            weights: The weight [out/t, in] of each layer.
            kept: The scalars that `multiply` returned for the backward pass.
        """


_numbered: WeakValueDictionary[int, Products] = WeakValueDictionary()
"""The objects that compiled graphs know by a number."""
_numbers = count()


def number_products(products: Products) -> Tensor:
    """Return a number by which `find_products` finds an object, a scalar on the host.

    As with `number_layer`, several layers share a compiled graph, and a tensor may differ.
    """
    number = next(_numbers)
    _numbered[number] = products
    return torch.tensor(number, device="cpu")


def find_products(numbers: Sequence[Tensor]) -> Products | None:
    """Return the object with a number, or None without a number."""
    for number in numbers:
        return _numbered[int(number)]
    return None
