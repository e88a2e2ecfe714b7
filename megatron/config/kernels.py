"""Settings of kernels, which select the implementation that computes a step.

None of these settings changes the mathematics.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelsConfig:
    """Settings that select kernels."""

    use_torch_compile: bool = False
    """Compile each transformer layer with torch.compile. This fuses norms, rotary positions and
    activations, and the start is slower. Dropout draws other masks with it, so a resumed run that
    turns it on or off is not bit-identical."""
