"""The axes of the grid that tensors of a stage have types over."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from spmd_types import I, MeshAxis, R, V, set_current_mesh

from megatron.parallel.grid import Grid

LETTERS = {"I": I, "R": R, "V": V}
Offsets = frozenset[int]
"""The ranks of a group, as differences to its first one."""


@dataclass(frozen=True)
class Axis:
    """An axis with several ranks."""

    name: str
    mesh: MeshAxis
    offsets: Offsets

    def is_in(self, group: Offsets) -> bool:
        """Return whether a group has all ranks of the axis."""
        return self.offsets <= group

    def shares(self, group: Offsets) -> bool:
        """Return whether a group has several ranks of the axis."""
        return len(self.offsets & group) > 1


def list_axes(grid: Grid) -> list[Axis]:
    """Return the axes of a stage that have several ranks. A pipeline has no common tensors."""
    sizes = {"tensor": grid.tensor, "context": grid.context, "data": grid.data}
    axes = []
    # Tensor is the innermost axis, then context and data (`Grid`).
    stride = 1
    for name, size in sizes.items():
        if size > 1:
            ranks = frozenset(range(0, size * stride, stride))
            axes.append(Axis(name, MeshAxis.of(size, stride), ranks))
        stride *= size
    return axes


@cache
def list_offsets(group: dist.ProcessGroup | None) -> Offsets:
    """Return the offsets of a group. None: that of one rank."""
    if group is None:
        return frozenset((0,))
    ranks = dist.get_process_group_ranks(group)
    # All groups of a kind have the same offsets, on each rank.
    return frozenset(rank - ranks[0] for rank in ranks)


@contextmanager
def use_axes(axes: list[Axis]) -> Iterator[None]:
    """Let spmd_types require a type over each of the axes."""
    with set_current_mesh({axis.name: axis.mesh for axis in axes}):
        yield
