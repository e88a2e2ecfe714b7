"""Which implementation computes a step; none of these changes the mathematics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelsConfig:
    use_torch_compile: bool = False
    """Compile each transformer layer with torch.compile: fuses norms, rotary positions and activations, after a slower start.
    Dropout draws other masks with it: a resumed run that turns it on or off is not bit-identical."""
