"""Float8 weights that take the place of 16-bit copies and keep their memory during the run.

A CUDA graph reads the memory that it was recorded with, so each step rounds into the same memory.
"""

from collections.abc import Sequence

import torch

from megatron.engine.optimizer import MasterParameter
from megatron.extras.step.float8.products import Float8Products
from megatron.extras.step.float8.rounding import (
    Rounded,
    round_weight,
    round_weights_in_place,
)

Replaced = tuple[Float8Products, list[MasterParameter]]
"""Products whose float8 weights take the place of 16-bit copies, and their masters."""


class FixedWeights:
    """The rounded weights of all layers that replace their 16-bit copies."""

    def __init__(self, replaced: Sequence[Replaced], dtype: torch.dtype) -> None:
        """Create the weights, without memory yet.

        Args:
            replaced: The products and their masters.
            dtype: The dtype that a weight is rounded to before float8.
        """
        self._replaced = replaced
        self._dtype = dtype
        self._rounded: list[tuple[Rounded, Rounded]] = []

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters, and give the products the result."""
        weights = [
            (master.weight.data, scale.get_largest(), scale.get_largest_of_all())
            for products, masters in self._replaced
            for scale, master in zip(products.scales, masters, strict=True)
        ]
        # The first time, each weight gets its memory.
        if self._rounded:
            round_weights_in_place(weights, self._rounded, self._dtype)
        else:
            self._rounded = [round_weight(*each, self._dtype) for each in weights]
        numbers = iter(self._rounded)
        for products, masters in self._replaced:
            products.use_weights([next(numbers) for _ in masters])

    def free(self) -> None:
        """Free the memory, if there is some."""
        self._rounded = []
