"""Check that replicas of a parameter stay equal, bit for bit.

Each rank updates its own replica. Nothing else would detect that replicas drift apart.

The invariant: ranks at the same data and pipeline coordinates hold the same weight and moments of
each parameter that tensor-parallel ranks replicate. The first and the last stage hold the same tied
word embedding. With several copies of the model (HSDP, or ZeRO stage 0), the ranks with the same
shard of each copy hold the same weights and moments. Moments are compared because a drift starts
there. The ranks that share a copy hold no replicas that could drift. FSDP2 keeps every element on
one of them and gathers it for each use. The optimizer's step count and the loss scale must be equal
on all ranks.

A check costs two sums over the bits of each tensor, one small message in each group, and one over
all ranks. The size of a difference is computed only where there is one. The cost is justified. In
one case layer norms had drifted for 17,000 iterations before it was noticed.

One cause of a drift is avoided in `add_over_tensor_ranks`. Each tensor-parallel rank reduces its
gradients over data-parallel ranks of its own. NCCL may add them up in another order there, so the
sums of a replicated parameter may differ in the last bit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.base.errors import TrainingError
from megatron.parallel.mesh import Mesh, TensorParallel
from megatron.parallel.messages import gather_json
from megatron.parallel.shard import Kind

_SLICE = 1 << 22
"""Number of elements processed at a time.

It bounds the memory of a check to about 64 MiB for any parameter, because training leaves little
memory free.
"""
_ROUNDS = 5
"""Number of checks of a repair. Three kinds of groups need at most four."""
_SHOWN = 4
"""Number of tensors, and of ranks for each, that a message names."""


@dataclass(frozen=True)
class Replica:
    """A tensor of this rank that the other ranks of a group hold too."""

    parameter: str
    kind: Kind
    tensor: Tensor


@dataclass(frozen=True)
class _ReplicaDifference:
    """A replica that differs from the first rank's."""

    parameter: str
    kind: Kind
    rank: str
    amount: str
    """The largest absolute difference as text, because JSON has no number nan.

    It is nan if one side is nan.
    """

    def to_json(self) -> list[str]:
        """Return the fields in their order."""
        return [self.parameter, self.kind, self.rank, self.amount]


class InvariantChecker:
    """Compares this rank's replicas with those of other ranks.

    In a world of one rank a check does nothing.
    """

    def __init__(
        self, groups: list[tuple[dist.ProcessGroup | None, list[Replica]]], mesh: Mesh
    ) -> None:
        """Create a checker.

        Args:
            groups: Process groups, each with the replicas that all its ranks hold. Their order must
                be the same on each rank. A group is None if this rank is its only member.
            mesh: This rank's mesh.
        """
        self._mesh = mesh
        self._groups = [
            (group, replicas) for group, replicas in groups if group is not None and replicas
        ]

    def check(
        self, scalars: dict[str, Any], *, repair: bool, iteration: int, last_good: int | None
    ) -> list[str]:
        """Compare all replicas, and `scalars` over all ranks.

        All ranks must call it, and all of them get the same result.

        Args:
            scalars: The optimizer's scalar state, which must be equal on all ranks.
            repair: Overwrite replicas that differ with those of the first rank.
            iteration: The last completed iteration, for the error message.
            last_good: The iteration after which the last check found no difference, for the error
                message. None before the first check.

        Returns:
            A line for each tensor that was repaired.

        Raises:
            TrainingError: Replicas differ and `repair` is not set, or the scalars differ. Every
                rank raises it.
        """
        repaired: list[str] = []
        # A rank may be in several groups, so a repair in one of them may make replicas of another
        # differ. The first rank of each group prevails, so the differences end.
        for _ in range(_ROUNDS):
            differing = [
                (group, replica)
                for group, replicas in self._groups
                for replica in self._find_differing(group, replicas)
            ]
            # A rank whose own replicas are equal must still learn that others differ. Otherwise
            # only some ranks would raise, and the others would wait in the next collective.
            everyone = self._gather([scalars, len(differing)])
            if all(found == 0 and others == everyone[0][0] for others, found in everyone):
                return list(dict.fromkeys(repaired))
            wrong_scalars = self._describe_scalars([others for others, _ in everyone])
            # Different step counts mean that ranks have taken different steps. Equal weights would
            # not make such a run right.
            repair = repair and not wrong_scalars
            measured = [
                self._measure(replica, group, repair=repair) for group, replica in differing
            ]
            own = [difference.to_json() for difference in measured if difference is not None]
            lines = _describe(
                [
                    _ReplicaDifference(*difference)
                    for rank in self._gather(own)
                    for difference in rank
                ]
            )
            repaired += lines
            if not repair:
                break
        since = ""
        if last_good is not None:
            since = f"; the check after iteration {last_good} found no difference"
        rollback = "roll back to a checkpoint" + (
            "" if last_good is None else f" of iteration {last_good} or earlier"
        )
        flag = ", or set --sync-tp-duplicated-parameters to continue with the first rank's copies"
        if wrong_scalars:
            flag = ""
        raise TrainingError(
            f"after iteration {iteration}, replicated state differs between ranks{since}:"
            "\n  " + "\n  ".join([*wrong_scalars, *lines]) + f"\n{rollback}{flag}"
        )

    def _find_differing(self, group: dist.ProcessGroup, replicas: list[Replica]) -> list[Replica]:
        """Return the replicas that are not the same on all ranks of the group.

        All ranks of the group get the same list, which `_measure` relies on.
        """
        own = torch.stack(
            [compute_checksum(replica.tensor) for replica in replicas]
        )  # [replicas, 2]
        everyone = [torch.empty_like(own) for _ in range(group.size())]
        with self._mesh.tensor_parallel.comm_timer():
            dist.all_gather(everyone, own, group=group)
        sums = torch.stack(everyone)  # [ranks, replicas, 2]
        equal = (sums == sums[0]).all(dim=2).all(dim=0).tolist()
        return [replica for replica, same in zip(replicas, equal, strict=True) if not same]

    def _measure(
        self, replica: Replica, group: dist.ProcessGroup, *, repair: bool
    ) -> _ReplicaDifference | None:
        """Return how far this rank's replica is from the first rank's, or None if they are equal.

        With `repair`, the first rank's replica overwrites it.
        """
        amount = 0.0
        same = True
        for part in _split_slices(replica.tensor):
            first = part.clone()
            dist.broadcast(first, group_src=0, group=group)
            # Bits are compared, because nan differs from itself and -0.0 equals 0.0.
            same = same and torch.equal(_view_bits(first), _view_bits(part))
            apart = float((first - part).abs().max())
            # A nan stays, whatever later slices have. `max` would lose it, because it compares.
            if math.isnan(apart) or math.isnan(amount):
                amount = math.nan
            else:
                amount = max(apart, amount)
            if repair:
                part.copy_(first)
        if same:
            return None
        return _ReplicaDifference(
            replica.parameter, replica.kind, self._mesh.describe(), f"{amount:.3g}"
        )

    def _describe_scalars(self, everyone: list[dict[str, Any]]) -> list[str]:
        if all(scalars == everyone[0] for scalars in everyone):
            return []
        lines = []
        for rank, scalars in zip(self._mesh.names, everyone, strict=True):
            differing = [
                f"{name} is {scalars[name]}, not {first}"
                for name, first in everyone[0].items()
                if scalars[name] != first
            ]
            lines += [f"{rank} differs from rank 0: {'; '.join(differing)}"] if differing else []
        return _shorten_list(lines, "ranks")

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, self._mesh.control)


def _split_slices(tensor: Tensor, size: int = _SLICE) -> Iterator[Tensor]:
    """Return views of a contiguous tensor, each [at most size]. An empty tensor has none."""
    if tensor.numel():
        return iter(tensor.view(-1).split(size))
    return iter(())


def _view_bits(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as integers of their bits."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.itemsize])


def compute_checksum(tensor: Tensor, slice_size: int = _SLICE) -> Tensor:
    """Return the sum of a tensor's bits and their sum weighted by position, [2] int64.

    Both are modulo 2^64. One changed element changes the first sum. Two changes may cancel in the
    first sum. Their positions differ, so they do not cancel in the second.

    Args:
        tensor: A contiguous tensor.
        slice_size: Number of elements processed at a time. The result does not depend on it.
    """
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(_split_slices(tensor, slice_size)):
        # A copy, because the product below is in place.
        bits = _view_bits(part).to(torch.int64, copy=True)
        plain = bits.sum()
        positions = torch.arange(len(bits), device=bits.device)
        weighted = bits.mul_(positions).sum() + number * slice_size * plain
        total += torch.stack((plain, weighted))
    return total


def _describe(differences: list[_ReplicaDifference]) -> list[str]:
    """Return a line for each tensor, with the ranks that differ from the first and by how much."""

    def get_tensor_key(difference: _ReplicaDifference) -> tuple[str, str]:
        return difference.parameter, difference.kind

    lines = []
    # `groupby` only joins neighbours, so the differences are sorted by the same key.
    for (parameter, kind), ranks in groupby(
        sorted(differences, key=get_tensor_key), key=get_tensor_key
    ):
        # A rank that is in several groups may differ in each of them.
        found = dict.fromkeys(f"{d.rank} by up to {d.amount}" for d in ranks)
        apart = _shorten_list(list(found), "ranks")
        lines.append(
            f"{parameter} ({kind}) differs from the first rank's replica on {', '.join(apart)}"
        )
    return _shorten_list(lines, "tensors")


def _shorten_list(lines: list[str], what: str) -> list[str]:
    more = len(lines) - _SHOWN
    if more <= 0:
        return lines
    return [*lines[:_SHOWN], f"and {more} more {what}"]


def add_over_tensor_ranks(
    partial: Sequence[Tensor], replicated: Sequence[Tensor], tp: TensorParallel
) -> None:
    """Make the gradients of replicated parameters equal on all tensor-parallel ranks, bit for bit.

    They change in place.

    One all-reduce sends all of them, because most are small. A number of any rank that is not
    finite gives a number on all ranks that is not finite.

    Args:
        partial: Gradients that cover only this rank's slice of the sequence, or its heads or
            channels. They become the sum over the ranks.
        replicated: Gradients that should be equal already. They become those of the first rank.
        tp: The tensor-parallel ranks.
    """
    # A rank may hold no element of a small parameter.
    gradients = [gradient for gradient in (*partial, *replicated) if gradient.numel()]
    if tp.size == 1 or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if tp.rank != 0:
        own = flat[sum(gradient.numel() for gradient in partial) :]
        # The first rank's value plus -0.0 is its value, bit for bit. 0 x inf is nan, so an
        # infinity on this rank is not lost.
        own.mul_(0.0).abs_().neg_()
    with tp.comm_timer():
        dist.all_reduce(flat, group=tp.group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, summed in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(summed.view_as(gradient))
