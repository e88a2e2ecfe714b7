"""A run of a parameter's elements as boxes of the global tensor: how DeepSpeed's flat partitions become shards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.parallel.layers import ParameterSpec
from megatron.parallel.shard import Kind, TensorShard


@dataclass(frozen=True)
class Fragment:
    """What this rank keeps of a parameter: a run of the elements of its tensor-parallel part."""

    name: str
    spec: ParameterSpec
    offset: tuple[int, ...]
    """Of the tensor-parallel part in the whole parameter."""
    shape: tuple[int, ...]
    """Of the tensor-parallel part."""
    start: int
    """The run's first element in it."""
    size: int
    flat: int
    """Which of this rank's flat partitions holds the run."""
    at: int
    """The run's first element in that."""

    def shards(self, flats: Mapping[Kind, Tensor], *, owner: bool) -> Iterator[TensorShard]:
        """Views of this fragment's flat partition, of its weights or moments; without vocabulary padding."""
        for inner, shape, first in split_run(self.start, self.start + self.size, self.shape):
            offset = tuple(a + b for a, b in zip(self.offset, inner, strict=True))
            rows = min(shape[0], self.spec.shape[0] - offset[0])
            if rows <= 0:
                continue
            for kind, flat in flats.items():
                view = flat.narrow(0, self.at + first - self.start, math.prod(shape)).view(shape)[
                    :rows
                ]
                yield TensorShard(kind, self.name, self.spec.shape, offset, view, owner)


def split_run(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut the elements start .. stop - 1 of a contiguous tensor into boxes, in order: (offset, shape, first element) of each."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:  # whole rows at once
            rows = (stop - start) // row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:]), start
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for offset, box, first in split_run(inside, end - index * row, shape[1:]):
            yield (index, *offset), (1, *box), index * row + first
        start = end
