"""What the check of types finds on one rank: plain data, without tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

STEP = "step"
"""The phase of messages outside of the stages."""


@dataclass(frozen=True)
class Message:
    """A message of a rank, in the order of its program."""

    kind: str
    group: str
    ranks: int
    dtype: str
    shape: tuple[int, ...]
    """Shape of the first tensor, without what differs between ranks that get uneven parts."""
    line: str

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "scalar"
        return f"{self.kind} of {self.dtype} {shape} in the {self.group} group at {self.line}"


@dataclass(frozen=True)
class Transfer:
    """A message between stages, as the sender or the receiver sees it."""

    chunk: int
    """Number of the sender's stage among those of its rank."""
    microbatch: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"microbatch {self.microbatch} of chunk {self.chunk}: {self.dtype} {shape}"


@dataclass
class RankTypes:
    """The step of one rank."""

    rank: int
    coordinate: str
    pipeline: int
    kind: str
    problems: list[str] = field(default_factory=list)
    phases: dict[str, list[Message]] = field(default_factory=dict)
    """Forward or backward pass of a microbatch -> its messages. The order is that of the step."""
    transfers: dict[str, list[Transfer]] = field(default_factory=dict)
    """Side and direction, such as `sent forward` -> the messages in order."""
    gradients: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Parameter -> group of ranks -> type of its gradient."""
    checked: dict[str, int] = field(default_factory=dict)
    """What was checked -> how often."""
