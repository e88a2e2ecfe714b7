"""The mapping between a rank and its coordinate (pipeline, data, tensor) in the grid.

It is pure arithmetic and needs no process group. The tensor axis is innermost, then data, then
pipeline: rank = (pipeline * data_size + data) * tensor_size + tensor. So the ranks of one
tensor-parallel group are neighbours on a node, where communication is fastest
(https://arxiv.org/abs/2104.04473, section 3).
"""

from dataclasses import dataclass

from megatron.base.errors import LayoutError


@dataclass(frozen=True)
class GridCoordinate:
    """The coordinate of a rank in the grid."""

    pipeline: int
    data: int
    tensor: int

    def __str__(self) -> str:
        """Return the coordinate as text for messages."""
        return f"pipeline {self.pipeline}, data {self.data}, tensor {self.tensor}"


@dataclass(frozen=True)
class Grid:
    """The sizes of the grid's three axes.

    Raises:
        LayoutError: A size is below one.
    """

    pipeline: int
    data: int
    tensor: int

    def __str__(self) -> str:
        """Return the sizes as text for messages."""
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"

    def __post_init__(self) -> None:
        """Check the sizes."""
        for axis in ("pipeline", "data", "tensor"):
            if getattr(self, axis) < 1:
                raise LayoutError(
                    f"{axis}-parallel size {getattr(self, axis)}: "
                    "each axis of the grid needs at least one rank"
                )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data * self.tensor

    def get_coordinate(self, rank: int) -> GridCoordinate:
        """Return the coordinate of a global rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return GridCoordinate(pipeline, data, tensor)

    def get_rank(self, coordinate: GridCoordinate) -> int:
        """Return the global rank at a coordinate."""
        return (coordinate.pipeline * self.data + coordinate.data) * self.tensor + coordinate.tensor
