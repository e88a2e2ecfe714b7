"""Copies of a parameter must stay equal, bit for bit: each rank updates its own, and nothing else would notice that they drift.

The invariant: ranks at the same data and pipeline coordinates hold the same weight and moments of each parameter that
tensor-parallel ranks replicate, and the last stage holds the same as the first of a tied word embedding. Moments are compared
because a drift begins there. Data-parallel ranks hold no copies that could drift: FSDP2 keeps every element once over them, and
gathers it for each use. What they do share, the optimizer's step count and the loss scale, must agree on all ranks.

A check costs two sums over the bits of what is compared, one small message in each group and one over all ranks; how far copies are
apart is only computed where they are. It is worth that: layer norms have drifted for 17,000 iterations before somebody looked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import TrainingError
from megatron.parallel.mesh import Mesh
from megatron.parallel.messages import gather_json
from megatron.parallel.shard import Kind

_SLICE = 1 << 22
"""Elements worked on at a time: a check must fit beside a training run, so its memory is some 64 MiB, whatever the parameter."""
_SHOWN = 4
"""Tensors, and ranks of each, that a message names."""


@dataclass(frozen=True)
class Replica:
    """A tensor of this rank that the other ranks of a group hold, too."""

    parameter: str
    kind: Kind
    tensor: Tensor


@dataclass(frozen=True)
class _ReplicaDifference:
    """A copy that is not the first rank's."""

    parameter: str
    kind: Kind
    rank: str
    amount: str
    """The largest absolute difference, as text; nan where one side is, which JSON does not have as a number."""

    def to_json(self) -> list[str]:
        """The fields in their order."""
        return [self.parameter, self.kind, self.rank, self.amount]


class InvariantChecker:
    """Knows what this rank holds in common with others. In a world of one rank, that is nothing, and a check does nothing."""

    def __init__(
        self, groups: list[tuple[dist.ProcessGroup | None, list[Replica]]], mesh: Mesh
    ) -> None:
        """`groups`: ranks, and what all of them hold, in the same order on each; None where this rank is alone."""
        self._mesh = mesh
        self._groups = [
            (group, replicas) for group, replicas in groups if group is not None and replicas
        ]

    def check(
        self, scalars: dict[str, Any], *, repair: bool, iteration: int, last_good: int | None
    ) -> list[str]:
        """Compare all copies, and `scalars` over all ranks; all ranks call it, and all of them come to the same result.

        `repair`: the copies of the first rank overwrite those that differ. Returns a line for each tensor that this was done to.
        `last_good`: the iteration after which a check found nothing; None before the first one.

        Raises:
            TrainingError: on every rank; copies differ and are not to be repaired, or the scalars differ.
        """
        if self._mesh.grid.world_size == 1:
            return []
        differing = [
            (group, replica)
            for group, replicas in self._groups
            for replica in self._find_differing(group, replicas)
        ]
        everyone = self._gather([scalars, len(differing)])
        if all(found == 0 and others == everyone[0][0] for others, found in everyone):
            return []
        wrong_scalars = self._describe_scalars([others for others, _ in everyone])
        repair = repair and not wrong_scalars
        mine = [self._measure(replica, group, repair=repair) for group, replica in differing]
        own = [difference.to_json() for difference in mine if difference is not None]
        lines = _describe(
            [_ReplicaDifference(*difference) for rank in self._gather(own) for difference in rank]
        )
        if repair:
            return lines
        since = "" if last_good is None else f"; a check after iteration {last_good} found nothing"
        rollback = "roll back to a checkpoint" + (
            "" if last_good is None else f" of iteration {last_good} or before"
        )
        flag = (
            ""
            if wrong_scalars
            else ", or give --sync-tp-duplicated-parameters to go on with the first rank's copies"
        )
        raise TrainingError(
            f"after iteration {iteration}, ranks disagree about what must be equal on them{since}:\n  "
            + "\n  ".join([*wrong_scalars, *lines])
            + f"\n{rollback}{flag}"
        )

    def _find_differing(self, group: dist.ProcessGroup, replicas: list[Replica]) -> list[Replica]:
        """What is not the same on all ranks of the group; they all get the same list."""
        mine = torch.stack(
            [_compute_checksum(replica.tensor) for replica in replicas]
        )  # [replicas, 2]
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        with self._mesh.tensor_parallel.comm_timer():
            dist.all_gather(everyone, mine, group=group)
        sums = torch.stack(everyone)  # [ranks, replicas, 2]
        equal = (sums == sums[0]).all(dim=2).all(dim=0).tolist()
        return [replica for replica, same in zip(replicas, equal, strict=True) if not same]

    def _measure(
        self, replica: Replica, group: dist.ProcessGroup, *, repair: bool
    ) -> _ReplicaDifference | None:
        """How far this rank's copy is from the first rank's, which overwrites it if asked to; None where they are the same."""
        amount, same = 0.0, True
        for part in _split_slices(replica.tensor):
            first = part.clone()
            dist.broadcast(first, group_src=0, group=group)
            same = same and torch.equal(first.view(torch.int32), part.view(torch.int32))
            apart = float((first - part).abs().max())
            amount = apart if apart != apart else max(apart, amount)  # nan stays
            if repair:
                part.copy_(first)
        return (
            None
            if same
            else _ReplicaDifference(
                replica.parameter, replica.kind, self._mesh.describe(), f"{amount:.3g}"
            )
        )

    def _describe_scalars(self, everyone: list[dict[str, Any]]) -> list[str]:
        if all(scalars == everyone[0] for scalars in everyone):
            return []
        lines = []
        for rank, scalars in zip(self._mesh.names, everyone, strict=True):
            differing = [
                f"{name} {scalars[name]}, not {first}"
                for name, first in everyone[0].items()
                if scalars[name] != first
            ]
            lines += [f"{rank} differs from rank 0: {'; '.join(differing)}"] if differing else []
        return _shorten_list(lines, "ranks")

    def _gather(self, mine: Any) -> list[Any]:
        return gather_json(mine, self._mesh.control)


def _split_slices(tensor: Tensor) -> Iterator[Tensor]:
    """Views of a contiguous tensor, [at most _SLICE] each; none of an empty one."""
    return iter(tensor.view(-1).split(_SLICE)) if tensor.numel() else iter(())


def _compute_checksum(tensor: Tensor) -> Tensor:
    """Of fp32 bits: their sum and their sum weighted by position, modulo 2^64, [2] int64.

    One changed element changes the first; of two that would cancel there, the places differ, and so does the second.
    """
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(_split_slices(tensor)):
        bits = part.view(torch.int32).long()
        plain = bits.sum()
        weighted = (
            bits.mul_(torch.arange(len(bits), device=bits.device)).sum() + number * _SLICE * plain
        )
        total += torch.stack((plain, weighted))
    return total


def _describe(differences: list[_ReplicaDifference]) -> list[str]:
    """A line for each tensor: which ranks' copies are not the first one's, and by how much."""

    def get_tensor_key(difference: _ReplicaDifference) -> tuple[str, str]:
        return difference.parameter, difference.kind

    lines = []
    for (parameter, kind), ranks in groupby(
        sorted(differences, key=get_tensor_key), key=get_tensor_key
    ):
        apart = _shorten_list([f"{d.rank} by up to {d.amount}" for d in ranks], "ranks")
        lines.append(f"{parameter} ({kind}) differs from the first copy on {', '.join(apart)}")
    return _shorten_list(lines, "tensors")


def _shorten_list(lines: list[str], what: str) -> list[str]:
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"and {more} more {what}"]
