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
    """A process alone."""

    rank: int = 0
    size: int = 1

    def gather(self, mine: Any) -> list[Any]:
        """Return the own value."""
        return [mine]
