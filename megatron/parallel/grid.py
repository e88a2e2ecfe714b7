"""The mapping between a rank and its coordinate (pipeline, data, context, tensor) in the grid.

It is pure arithmetic and needs no process group. The tensor axis is innermost, then context, data
and pipeline: rank = ((pipeline * data_size + data) * context_size + context) * tensor_size +
tensor. So the ranks of one tensor-parallel group are neighbours on a node, where communication is
fastest (https://arxiv.org/abs/2104.04473, section 3). Those of a context-parallel group come next.
"""

from dataclasses import dataclass

from megatron.base.errors import LayoutError


@dataclass(frozen=True)
class GridCoordinate:
    """The coordinate of a rank in the grid."""

    pipeline: int
    data: int
    tensor: int
    context: int = 0

    def __str__(self) -> str:
        """Return the coordinate as text for messages."""
        context = f", context {self.context}" if self.context else ""
        return f"pipeline {self.pipeline}, data {self.data}{context}, tensor {self.tensor}"


@dataclass(frozen=True)
class Grid:
    """The sizes of the grid's axes.

    Raises:
        LayoutError: A size is below one.
    """

    pipeline: int
    data: int
    tensor: int
    context: int = 1

    def __str__(self) -> str:
        """Return the sizes as text for messages."""
        context = f" x context {self.context}" if self.context > 1 else ""
        return f"pipeline {self.pipeline} x data {self.data}{context} x tensor {self.tensor}"

    def __post_init__(self) -> None:
        """Check the sizes."""
        for axis in ("pipeline", "data", "context", "tensor"):
            if getattr(self, axis) < 1:
                raise LayoutError(
                    f"{axis}-parallel size {getattr(self, axis)}: "
                    "each axis of the grid needs at least one rank"
                )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.weight_ranks * self.tensor

    @property
    def weight_ranks(self) -> int:
        """The number of ranks that compute with the same weights, data x context.

        Each has other tokens. They average their gradients, and may share the weights (FSDP).
        """
        return self.data * self.context

    def get_coordinate(self, rank: int) -> GridCoordinate:
        """Return the coordinate of a global rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return GridCoordinate(pipeline, data, tensor, context)

    def get_rank(self, coordinate: GridCoordinate) -> int:
        """Return the global rank at a coordinate."""
        # A row has the ranks of all contexts and tensor shards.
        row = coordinate.pipeline * self.data + coordinate.data
        return (row * self.context + coordinate.context) * self.tensor + coordinate.tensor
