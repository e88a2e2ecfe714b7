"""Trading compute for memory: activations that are computed again in the backward pass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecomputeConfig:
    checkpoint_activations: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass (https://arxiv.org/abs/1604.06174)."""
    deepspeed_activation_checkpointing: bool = False
    """The same by DeepSpeed's implementation; needs --deepspeed."""
