"""The seam between engines and checkpoints: the state of a run as boxes of global tensors.

An engine names its tensors and where they lie in the whole model; whoever stores, loads or initialises them knows nothing else. The
invariant: chunks of one (kind, name) that are marked `owner`, over all ranks, tile the global tensor exactly once.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class TensorShard:
    """A live tensor: reading it saves, writing into it loads."""

    kind: Kind
    """weight: fp32 master; exp_avg, exp_avg_sq: Adam's moments."""
    name: str
    """The parameter's name in the whole model."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where the box begins in the global tensor."""
    tensor: Tensor
    """fp32; its shape is the box's."""
    owner: bool
    """This rank's copy is the one to be stored."""
