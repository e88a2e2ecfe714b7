"""Recomputation of activations in the backward pass, which trades compute for memory."""

from dataclasses import dataclass
from fractions import Fraction

OPERATORS = ("matmul", "attention")
"""Values of --checkpoint-keep-operators."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Settings that select which activations are kept, and where."""

    checkpoint_activations: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass
    (https://arxiv.org/abs/1604.06174)."""
    checkpoint_fraction: str = "1"
    """Fraction of the layers that --checkpoint-activations applies to, evenly spread over the
    model: 1 for all, 1/3 for the second of every three. They are the layers of fms-fsdp's rule."""
    checkpoint_keep_operators: tuple[str, ...] = ()
    """Operators whose results --checkpoint-activations keeps instead of computing them again:
    matmul, attention or both. These operators take most of the computing time. The planner's
    peak memory includes their results, but its time assumes that they are computed again."""
    recompute_attention_core: bool = False
    """Recompute only the scores and their product with the values. This saves memory where
    attention has no flash kernel (https://arxiv.org/abs/2205.05198, section 5)."""
    partition_activations: bool = False
    """Shard the inputs that --checkpoint-activations keeps over the tensor-parallel ranks
    (https://arxiv.org/abs/1910.02054, section 6.1)."""
    checkpoint_in_cpu: bool = False
    """Keep the inputs that --checkpoint-activations keeps in host memory."""

    @property
    def recomputed_part(self) -> Fraction:
        """Fraction of the layers that are recomputed completely.

        Raises:
            ValueError: `checkpoint_fraction` is not a number or a fraction.
            ZeroDivisionError: its denominator is 0.
        """
        if self.checkpoint_activations:
            return Fraction(self.checkpoint_fraction)
        return Fraction(0)
