"""Shards of global tensors as views of DeepSpeed's flat partitions.

DeepSpeed flattens the parameters of a group and divides the result evenly over the data-parallel
ranks. The boundaries ignore rows. A rank holds a contiguous run of a parameter's elements, which is
in general no rectangular slice. `split_run` divides such a run into rectangular slices.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.shard import Kind, TensorShard


@dataclass(frozen=True)
class Fragment:
    """The elements of a parameter that this rank's flat partition holds.

    They are a contiguous run of the elements of the rank's tensor-parallel shard.
    """

    name: str
    spec: ParameterSpec
    offset: tuple[int, ...]
    """Offset of the tensor-parallel shard in the global parameter. It is 0 for one in pieces."""
    shape: tuple[int, ...]
    """Shape of the tensor-parallel shard, vocabulary padding included."""
    start: int
    """Index of the run's first element in the flattened tensor-parallel shard."""
    size: int
    """Number of elements in the run."""
    flat: int
    """Index of the flat partition of this rank that holds the run."""
    at: int
    """Index of the run's first element in that flat partition."""

    def shards(self, flats: Mapping[Kind, Tensor], *, owner: bool) -> Iterator[TensorShard]:
        """Return views of the flat partition, one for each rectangular slice of the run and kind.

        Args:
            flats: The flat partition's tensor for each kind.
            owner: Whether this rank stores the shards in a checkpoint.
        """
        for inner, shape, first in split_run(self.start, self.start + self.size, self.shape):
            offset = tuple(a + b for a, b in zip(self.offset, inner, strict=True))
            # Rows of the vocabulary padding are no part of the global tensor, so they must not get
            # into a checkpoint.
            for piece in self.spec.locate_rows(offset[0], shape[0]):
                rows = slice(piece.local, piece.local + piece.rows)
                for kind, flat in flats.items():
                    run = flat.narrow(0, self.at + first - self.start, math.prod(shape)).view(shape)
                    yield TensorShard(
                        kind,
                        self.name,
                        self.spec.shape,
                        (piece.start, *offset[1:]),
                        run[rows],
                        owner,
                    )


def split_run(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Divide the elements start .. stop - 1 of a contiguous tensor into rectangular slices.

    The slices come in the order of the elements.

    Yields:
        The offset of a slice, its shape, and the index of its first element.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    # A run consists of the end of a row, some complete rows, and the beginning of a row. Complete
    # rows form one slice. An incomplete row is divided by the same rule in one dimension less.
    row = math.prod(shape[1:])
    while start < stop:
        index, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:]), start
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for offset, size, first in split_run(inside, end - index * row, shape[1:]):
            yield (index, *offset), (1, *size), index * row + first
        start = end
