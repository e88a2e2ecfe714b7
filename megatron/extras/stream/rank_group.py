"""The ranks that read streamed data together."""

import dataclasses
from typing import Any, Protocol


class RankGroup(Protocol):
    """The ranks that read together."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def gather(self, mine: Any) -> list[Any]:
        """Return the value of every rank, on every rank."""
        ...


@dataclasses.dataclass(frozen=True)
class OneRank:
    """A group of one process."""

    rank: int = 0
    size: int = 1

    def gather(self, mine: Any) -> list[Any]:
        """Return the value of the only rank."""
        return [mine]
