"""Tensors of `transformers` whose rows hold several parameters of this trainer, group by group.

A group is a head, for example. It has all rows of the first parameter, then those of the next one.
A part that no file has by itself gets a name below that of the tensor.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.model.shape import ModelShape

Size = Callable[[ModelShape], int]


@dataclass(frozen=True)
class RowPart:
    """Some rows of each group of a tensor."""

    groups: int
    size: int
    """Rows of a group."""
    rows: slice
    """Those of the part."""

    def get_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of this shape."""
        # A wrong size is reported as that of the part.
        if not whole or whole[0] != self.groups * self.size:
            return whole
        return (self.groups * (self.rows.stop - self.rows.start), *whole[1:])

    def take(self, whole: Tensor) -> Tensor:
        """Return the part."""
        return whole.unflatten(0, (self.groups, self.size))[:, self.rows].flatten(0, 1)


@dataclass(frozen=True)
class Packed:
    """A tensor of a layer that holds several parameters. One with a single part is renamed."""

    module: str
    """Its module in a layer."""
    parts: Mapping[str, Size]
    """Module of each part, in files or only here -> its rows in a group."""
    groups: Size = lambda shape: 1
    linear: bool = True
    """Whether the layers with it are those with a gated delta net."""
    in_files: bool = True
    """Whether files that are written have it. False: they have its parts."""


def divide_packed(packed: Sequence[Packed], shape: ModelShape, name: str) -> dict[str, RowPart]:
    """Return the parts of a stored tensor by their names. There are none if it is not packed."""
    for each in packed:
        # The prefix of a model without its head is shorter, so only the layer's number is read.
        match = re.fullmatch(rf"(.*\.(\d+)\.){re.escape(each.module)}\.(\w+)", name)
        # The same name has another meaning in the other kind of layers.
        if match is None or (int(match[2]) in shape.linear_layers) != each.linear:
            continue
        rows = [size(shape) for size in each.parts.values()]
        return {
            f"{match[1]}{part}.{match[3]}": RowPart(
                each.groups(shape), sum(rows), slice(sum(rows[:at]), sum(rows[: at + 1]))
            )
            for at, part in enumerate(each.parts)
        }
    return {}


def join_packed(
    packed: Sequence[Packed], shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors as files have them. The parts of a tensor wait for its last one."""
    whole = {part: each for each in packed if each.in_files for part in each.parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        module, _, leaf = name.rpartition(".")
        part = next((part for part in whole if module.endswith(f".{part}")), None)
        if part is None:
            yield name, tensor
            continue
        each = whole[part]
        complete = f"{module.removesuffix(part)}{each.module}.{leaf}"
        found = waiting.setdefault(complete, {})
        found[part] = tensor
        # The parts of a layer are neighbours in our order, so only a few wait.
        if len(found) == len(each.parts):
            groups = each.groups(shape)
            rows = [found[own].unflatten(0, (groups, -1)) for own in each.parts]
            del waiting[complete]
            yield complete, torch.cat(rows, 1).flatten(0, 1)
    assert not waiting, f"parts of {', '.join(waiting)} are missing"
