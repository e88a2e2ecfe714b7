"""What a dry run reports of a rank: plain data, without tensors."""

import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.base.code_version import PACKAGE

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
COMMUNICATION = "communication"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION)
"""Kinds of memory.

Weights are the parameters of the model. With FSDP2, these are the fp32 shards. The optimizer has
its moments, and the fp32 masters if they are not the parameters themselves. Communication has what
FSDP2 gathers and reduces, and the receive buffers of the pipeline. Activations are everything else,
also temporary tensors.
"""


@dataclass(frozen=True, order=True)
class Collective:
    """A message between ranks, as one rank sees it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive or barrier."""
    group: str
    """tensor, context, data, shards, replicas, pipeline, ends, world or control. With experts also
    experts, equal experts, copies of experts and stage."""
    ranks: int
    """Size of the group."""
    dtype: str
    size: int
    """Bytes of the larger of the input and the output."""
    stream: str
    """Stream of this rank on which it was started."""


@dataclass(frozen=True, order=True)
class Synchronisation:
    """A point at which the host waits for the GPU."""

    cause: str
    """Why the host waits, such as `blocking copy to the host`."""
    line: str
    """The line of this project that caused it, as `engine/native.py:345`."""


@dataclass(frozen=True, order=True)
class HostCopy:
    """A copy between host memory and the GPU."""

    direction: str
    """`to the GPU` or `to the host`."""
    size: int
    """Bytes."""
    blocking: bool
    """Whether the host waits for it."""
    line: str


@dataclass(frozen=True, order=True)
class Product:
    """A product of two matrices, by its dtypes."""

    left: str
    right: str
    result: str


@dataclass
class StepTrace:
    """What one step of one rank did."""

    collectives: Counter[Collective] = field(default_factory=Counter)
    """Message -> how often."""
    synchronisations: Counter[Synchronisation] = field(default_factory=Counter)
    copies: Counter[HostCopy] = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)
    """Kind of memory -> bytes at the moment at which most memory was in use."""
    kept: dict[str, int] = field(default_factory=dict)
    """Kind of memory -> bytes that stay in use between steps."""
    operators: int = 0
    """Number of operators on the GPU."""
    products: Counter[Product] = field(default_factory=Counter)
    """Product of two matrices -> how often."""
    registered: Counter[str] = field(default_factory=Counter)
    """Line of this project -> bytes of host memory that it pinned by `cudaHostRegister`.

    Memory that was allocated as pinned is not counted.
    """

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak."""
        return sum(self.peak.values())

    def sort(self) -> "StepTrace":
        """Return a copy in which everything that was counted is in order."""
        ordered: dict[str, Any] = {
            name: Counter(dict(sorted(value.items())))
            for name, value in vars(self).items()
            if isinstance(value, Counter)
        }
        return replace(self, **ordered)


@dataclass(frozen=True)
class RankReport:
    """The dry run of one rank."""

    rank: int
    coordinate: str
    """The coordinate in the grid, as text."""
    microbatches: int
    """Microbatches that were run."""
    step: StepTrace
    imbalance: float = 1.0
    """Rows of the rank's experts, in multiples of the mean."""


_PACKAGE = f"{PACKAGE}/"
_WATCHING = ("extras/planner/", "extras/watch/operator_mode.py")
"""Files of the package that only watch a step."""


def name_line(path: str, number: int) -> str | None:
    """Return a line of the step, such as `engine/native.py:345`. None for lines of other files."""
    file = path.removeprefix(_PACKAGE)
    if file == path or file.startswith(_WATCHING):
        return None
    return f"{file}:{number}"


def find_line_of_error(error: BaseException) -> str | None:
    """Return the innermost line of the step that an error comes from, or None."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = (name_line(frame.filename, frame.lineno or 0) for frame in frames)
    return next(filter(None, lines), None)
