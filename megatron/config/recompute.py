"""Trading compute for memory: activations that are computed again in the backward pass."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class RecomputeConfig:
    checkpoint_activations: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass (https://arxiv.org/abs/1604.06174)."""
    checkpoint_fraction: str = "1"
    """Part of the layers that --checkpoint-activations is for, evenly spread over the whole model:
    1 for all, 1/3 for the second of every three. They are the layers of fms-fsdp's rule."""
    recompute_attention_core: bool = False
    """Recompute scores and their product with the values only; saves memory where attention has no flash kernel
    (https://arxiv.org/abs/2205.05198, section 5)."""
    partition_activations: bool = False
    """Of the inputs that --checkpoint-activations keeps, each tensor-parallel rank keeps a part
    (https://arxiv.org/abs/1910.02054, section 6.1)."""
    checkpoint_in_cpu: bool = False
    """Keep these inputs in host memory."""

    @property
    def recomputed_part(self) -> Fraction:
        """Part of the layers that are recomputed whole. Raises ValueError or ZeroDivisionError where it is no fraction."""
        return Fraction(self.checkpoint_fraction) if self.checkpoint_activations else Fraction(0)
