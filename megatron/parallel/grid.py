"""rank <-> (pipeline, data, tensor): pure arithmetic, no process group.

The tensor axis is innermost, so that the ranks of one tensor-parallel group are neighbours on a node; then data, then pipeline:
rank = (pipeline * data_size + data) * tensor_size + tensor (https://arxiv.org/abs/2104.04473, section 3).
"""

from dataclasses import dataclass

from megatron.errors import LayoutError


@dataclass(frozen=True)
class GridCoordinate:
    """Where a rank sits in the grid."""

    pipeline: int
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"pipeline {self.pipeline}, data {self.data}, tensor {self.tensor}"


@dataclass(frozen=True)
class Grid:
    """Sizes of the three axes.

    Raises:
        LayoutError: a size is below one.
    """

    pipeline: int
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"

    def __post_init__(self) -> None:
        for axis in ("pipeline", "data", "tensor"):
            if getattr(self, axis) < 1:
                raise LayoutError(
                    f"{axis}-parallel size {getattr(self, axis)}: each axis of the grid needs at least one rank"
                )

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def get_coordinate(self, rank: int) -> GridCoordinate:
        """The coordinates of a global rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return GridCoordinate(pipeline, data, tensor)

    def get_rank(self, coordinate: GridCoordinate) -> int:
        """The global rank at these coordinates."""
        return (coordinate.pipeline * self.data + coordinate.data) * self.tensor + coordinate.tensor
