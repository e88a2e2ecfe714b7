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
    deterministic_mode: bool = False
    """Use only kernels that give the same bits each time, and NCCL's ring algorithm. On a GPU,
    backward passes of attention otherwise add up in an order that changes, so a resumed run is not
    bit-identical. It is slower. The run ends with an error at an operator that has no such kernel.
    apex, DeepSpeed and torch.compile choose kernels of their own. A CPU needs no such flag."""
