"""The interface between engines and checkpoints: the state of a run as shards of global tensors.

An engine names its tensors and their offsets in the complete model. The code that stores, loads or
initialises them knows nothing else of the layout.

The invariant: the shards of one (kind, name) that are marked `owner`, over all ranks, cover each
element of the global tensor exactly once.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron.config.optimizer import StateKind

Kind = StateKind
ADAM_KINDS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TensorShard:
    """A rectangular slice of a global tensor, with the live tensor that holds it.

    A save reads the tensor, and a load writes into it.
    """

    kind: Kind
    """The fp32 master or one of the optimizer's states."""
    name: str
    """The parameter's name in the complete model."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Offset of the slice in the global tensor."""
    tensor: Tensor
    """The slice on this rank's memory, in fp32 or, if it is a moment, in bf16."""
    owner: bool
    """Whether this rank stores the slice. Among replicas exactly one rank does."""
