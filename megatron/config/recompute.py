"""Trading compute for memory: activations that are computed again in the backward pass."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class RecomputeConfig:
    checkpoint_activations: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass (https://arxiv.org/abs/1604.06174)."""
    checkpoint_fraction: str = "1"
    """Part of the layers that --checkpoint-activations is for, evenly spread: 1 for all, 1/3 for every third."""
    recompute_attention_core: bool = False
    """Recompute scores and their product with the values only; saves memory where attention has no flash kernel
    (https://arxiv.org/abs/2205.05198, section 5)."""
    deepspeed_activation_checkpointing: bool = False
    """The same by DeepSpeed's implementation; needs --deepspeed."""

    @property
    def recomputed_part(self) -> Fraction:
        """Part of the layers that are recomputed whole. Raises ValueError or ZeroDivisionError where it is no fraction."""
        asked = self.checkpoint_activations or self.deepspeed_activation_checkpointing
        return Fraction(self.checkpoint_fraction) if asked else Fraction(0)
