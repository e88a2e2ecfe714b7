"""What happens to gradients and sums between the backward pass and the update.

`spmd_types` does not follow these operators. Here each tensor that matters has labels: which
parameter, or which sum, its elements belong to, what it was multiplied by, and over which ranks it
was added up. Every operator that copies, scales or adds up labelled elements changes their labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.extras.planner.types.forward import Offsets

_PRODUCTS = ("mul", "mul_", "_foreach_mul_")
_DIVISIONS = ("div", "div_", "_foreach_div_")
_COPIES = ("_to_copy", "clone", "clamp")


@dataclass(frozen=True)
class Label:
    """What some neighbouring elements of a storage are."""

    start: int
    count: int
    name: str
    factor: float = 1.0
    """The product of all factors since the backward pass, also those of means over ranks."""
    sums: tuple[Offsets, ...] = ()
    """The groups over which it was added up, in order."""
    zeroed: bool = False
    """Whether it was multiplied by 0, so that the sum is another rank's value."""


class GradientFlow:
    """Labels of tensors."""

    def __init__(self) -> None:
        """Label nothing."""
        self._labels: dict[int, tuple[Any, list[Label]]] = {}
        self.read: list[Label] = []
        """The labels of what the host has read."""

    def clear(self) -> None:
        """Forget all labels."""
        self._labels.clear()
        self.read.clear()

    def mark(self, tensor: Tensor, name: str, **state: Any) -> None:
        """Label all elements of a contiguous tensor."""
        label = Label(int(tensor.storage_offset()), tensor.numel(), name, **state)
        self._replace(tensor, [label])

    def find(self, tensor: Tensor) -> list[Label]:
        """Return the labels of a tensor's elements. Their start counts from the tensor's."""
        # Views share a storage, so labels belong to places in it.
        storage = tensor.untyped_storage()
        _, labels = self._labels.get(storage._cdata, (None, []))
        begin, end = _find_extent(tensor)
        found = []
        for label in labels:
            first = max(begin, label.start)
            last = min(end, label.start + label.count)
            if first < last:
                found.append(replace(label, start=first - begin, count=last - first))
        return found

    def _replace(self, tensor: Tensor, labels: Sequence[Label]) -> None:
        """Replace the labels of a tensor's elements. Their start counts in the storage."""
        storage = tensor.untyped_storage()
        _, others = self._labels.get(storage._cdata, (None, []))
        begin, end = _find_extent(tensor)
        kept: list[Label] = []
        for label in others:
            stop = label.start + label.count
            if label.start < begin:
                kept.append(replace(label, count=min(stop, begin) - label.start))
            if stop > end:
                first = max(label.start, end)
                kept.append(replace(label, start=first, count=stop - first))
        # The reference keeps the address from being used again.
        self._labels[storage._cdata] = (storage, [*kept, *labels])

    def _change(self, tensor: Tensor, **changes: Any) -> None:
        offset = int(tensor.storage_offset())
        labels = self.find(tensor)
        if labels:
            moved = [replace(each, start=each.start + offset) for each in labels]
            self._replace(tensor, [_apply(each, **changes) for each in moved])

    def _copy(self, source: Tensor, into: Tensor, **changes: Any) -> None:
        offset = int(into.storage_offset())
        labels = self.find(source)
        if len(labels) == 0 and not self.find(into):
            return
        same = source.numel() == into.numel() and source.is_contiguous() and into.is_contiguous()
        if not same:
            # Which element goes where is not followed. All may have each label.
            labels = [replace(each, start=0, count=into.numel()) for each in labels]
        moved = [replace(each, start=each.start + offset) for each in labels]
        self._replace(into, [_apply(each, **changes) for each in moved])

    def send(self, kind: str, tensors: Sequence[Tensor], ranks: Offsets, operation: str) -> None:
        """Follow a message."""
        if not self._labels or kind != "all_reduce":
            return
        for tensor in tensors:
            self._change(tensor, ranks=ranks, operation=operation)

    def follow(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Follow an operator."""
        if not self._labels:
            return
        name = func._schema.name.split("::")[1]
        if name in ("cat", "stack"):
            self._join(args[0], out)
            return
        if name == "copy_":
            # This also clears labels, if the source has none.
            self._copy(args[1], args[0])
            return
        tensors = [each for each in tree_leaves(args[:1]) if isinstance(each, Tensor)]
        if not any(map(self.find, tensors)):
            return
        if name == "_local_scalar_dense" or _is_on_host(out):
            self.read += self.find(tensors[0])
        elif name in (*_PRODUCTS, *_DIVISIONS) and isinstance(args[1], int | float):
            scale = args[1]
            if name in _DIVISIONS:
                scale = 1 / scale
            self._scale(name, tensors, scale, out)
        elif name in _COPIES:
            self._copy(tensors[0], out)

    def _scale(self, name: str, tensors: Sequence[Tensor], scale: float, out: Any) -> None:
        if not name.endswith("_"):
            self._copy(tensors[0], out, scale=scale)
            return
        for tensor in tensors:
            self._change(tensor, scale=scale)

    def _join(self, parts: Sequence[Tensor], out: Tensor) -> None:
        place = 0
        labels = []
        for part in parts:
            labels += [replace(each, start=each.start + place) for each in self.find(part)]
            place += part.numel()
        if labels:
            self._replace(out, labels)


def _is_on_host(out: Any) -> bool:
    """Return whether a result of a labelled tensor, which is on the GPU, is in host memory."""
    return isinstance(out, Tensor) and out.device.type == "cpu"


def _find_extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first element of a storage that a tensor may have, and the one after the last."""
    begin = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    # The last element of a view with strides is not after the product of its sizes.
    return begin, begin + 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def _apply(
    label: Label,
    *,
    scale: float = 1.0,
    ranks: Offsets | None = None,
    operation: str = "",
) -> Label:
    """Return a label after a factor or a sum over ranks."""
    if scale == 0:
        return replace(label, zeroed=True)
    if ranks is not None and len(ranks) > 1:
        # A mean is a sum and a factor.
        if operation == "AVG":
            scale /= len(ranks)
        label = replace(label, sums=(*label.sums, ranks))
    return replace(label, factor=label.factor * scale)
