"""The largest absolute values of all float8 weights, which ranks exchange once a step.

Each rank reads them from its shards, before any weight is gathered. Rounding to 16 bits keeps the
order of numbers. So the largest rounded weight is the largest weight, rounded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.optimizer import MasterParameter
from megatron.extras.step.float8.rounding import (
    FORWARD,
    Rounded,
    find_all_largest,
    round_to_float8,
)
from megatron.parallel.mesh import CommTimer
from megatron.parallel.parameter_spec import Piece


@dataclass(frozen=True)
class WeightScale:
    """The largest values of a layer's weight, from which its scales are computed."""

    values: Tensor
    """[1], or [rows] of the complete weight, in fp32. It changes at the start of each step."""
    pieces: tuple[Piece, ...]
    """The rows of the complete weight that this rank multiplies with."""
    whole: Tensor | None = None
    """The largest of the values, a scalar, if it is kept."""

    def get_largest(self) -> Tensor:
        """Return the largest values for the forward pass, a scalar or [out/t, 1]."""
        if len(self.values) == 1:
            return self.get_largest_of_all()
        if len(self.pieces) == 1:
            (piece,) = self.pieces
            return self.values[piece.start : piece.start + piece.rows].unsqueeze(1)
        parts = [self.values[piece.start : piece.start + piece.rows] for piece in self.pieces]
        return torch.cat(parts).unsqueeze(1)

    def get_largest_of_all(self) -> Tensor:
        """Return the largest value of the complete weight, a scalar."""
        if self.whole is not None:
            return self.whole
        return self.values.max()


class WeightMaxima:
    """Computes the largest values of the weights of this rank's stages."""

    def __init__(
        self,
        rows: dict[str, int],
        masters: Sequence[MasterParameter],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        comm_timer: CommTimer,
    ) -> None:
        """Reserve the memory.

        Args:
            rows: Global name of a weight -> its rows if each has a scale, otherwise 1. The order is
                the same on all ranks of the group.
            masters: This rank's shards of the weights.
            dtype: The dtype that the weights are rounded to before float8.
            device: The device of the shards.
            group: The ranks that share one copy of the stages, or None for this rank alone.
            comm_timer: The timer of communication.
        """
        self._count = sum(rows.values())
        self._by_row = any(number > 1 for number in rows.values())
        # With a value for each row, the last ones are those of complete weights.
        size = self._count + len(rows) * self._by_row
        self._values = torch.zeros(size, dtype=torch.float32, device=device)
        parts = self._values[: self._count].split(list(rows.values()))
        self._parts = dict(zip(rows, parts, strict=True))
        self._wholes = {name: self._count + number for number, name in enumerate(rows)}
        # FSDP2 gives some ranks no row of a weight.
        self._masters = [m for m in masters if m.name in rows and m.weight.numel()]
        self._dtype = dtype
        self._group = group
        self._comm_timer = comm_timer

    def make_scale(self, name: str, pieces: tuple[Piece, ...]) -> WeightScale:
        """Return the values of a weight, which `refresh` writes into."""
        values = self._parts[name]
        whole = values[0]
        if self._by_row:
            whole = self._values[self._wholes[name]]
        return WeightScale(values, pieces, whole)

    @torch.no_grad()
    def round_shards(
        self, masters: Sequence[MasterParameter]
    ) -> Iterator[tuple[str, Tensor, Rounded]]:
        """Yield the name of each weight, and rows of this rank before and after rounding.

        Args:
            masters: The shards that this rank counts.
        """
        for master in masters:
            if master.name not in self._parts:
                continue
            values = self._parts[master.name]
            shard = master.weight.data.to(self._dtype)
            for piece in master.spec.locate_rows(master.offset[0], len(shard)):
                rows = shard[piece.local : piece.local + piece.rows]
                largest = values.max()
                if len(values) > 1:
                    largest = values[piece.start : piece.start + piece.rows].unsqueeze(1)
                yield master.name, rows, round_to_float8(rows, largest, FORWARD)

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the values from the weights. All ranks of the group call it together."""
        self._values.zero_()
        matrices, starts, wholes = [], [], []
        for master in self._masters:
            values = self._parts[master.name]
            shard = master.weight.data
            # The order of rows matters only if each has a value.
            pieces = [Piece(0, 0, len(shard))]
            if self._by_row:
                pieces = list(master.spec.locate_rows(master.offset[0], len(shard)))
            for piece in pieces:
                matrices.append(shard[piece.local : piece.local + piece.rows])
                starts.append(values.storage_offset() + piece.start)
                wholes.append(self._wholes[master.name])
        if matrices:
            find_all_largest(matrices, starts, wholes, self._values, by_row=self._by_row)
        self._values.copy_(self._values.to(self._dtype))
        if self._group is not None:
            shared = self._values[: self._count]
            with self._comm_timer():
                dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
            # The rows of other ranks may be larger.
            if self._by_row:
                for name, values in self._parts.items():
                    self._values[self._wholes[name]] = values.max()
