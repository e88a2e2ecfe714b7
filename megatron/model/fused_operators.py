"""Interfaces of kernels that compute several operators of the model at once.

The model needs none of them. Without a kernel, it computes the same with PyTorch's operators. They
are the reference for each kernel, and the only path on a CPU.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.config.model import GLU


class Rotate(Protocol):
    """Applies the rotary embedding. It stands for `megatron.model.positions.rotate`."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate all heads [s, b, g, n, d]. `Positions` has the shapes of the tables."""


class RotateProjection(Protocol):
    """Divides the projection to queries, keys and values, and rotates queries and keys."""

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [s, b, g, n, d], and keys and values [s, b, g, 1, d].

        Args:
            qkv: [s, b, g, n + 2, d]. Each group has n queries, a key and a value.
            cos: See `Positions`.
            sin: See `Positions`.
        """


class ApplyGate(Protocol):
    """Computes the product inside a gated MLP."""

    def __call__(self, gate: Tensor, up: Tensor, activation: GLU) -> Tensor:
        """Return activation(gate) * up, each [s, b, f/t]."""


@dataclass(frozen=True)
class FusedOperators:
    """The kernels that a model uses. None stands for PyTorch's operators."""

    rotate: Rotate | None = None
    rotate_projection: RotateProjection | None = None
    apply_gate: ApplyGate | None = None
