"""Agreement between the ranks that save and load together."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Who saves together."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """For small messages, on the CPU."""

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def all(self, mine: bool) -> bool:
        """Whether it holds on every rank; cheaper than `gather`."""
        if self.size == 1:
            return mine
        agreed = torch.tensor([int(mine)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.group)
        return bool(agreed.item())
