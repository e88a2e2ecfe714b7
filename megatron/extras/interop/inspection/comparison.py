"""Statistics of a checkpoint's tensors, and the differences between two checkpoints.

Global tensors are read, so the parallel layouts do not matter. Every byte is checked against its
digest. Only one tensor is in memory, or two in a comparison.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.base.errors import DamagedError
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import collect_digests
from megatron.checkpoint.tensor_file import TensorReader, count_bytes
from megatron.config.compare import list_config_differences
from megatron.parallel.shard import Kind

_PIECE = 1 << 20
"""Elements that are processed at a time. Their conversion to float64 needs twice their memory."""


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor's finite numbers.

    `min`, `max` and `mean` are None if the tensor has no finite number.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    norm: float
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    """Number of elements that are NaN."""
    inf: int
    """Number of elements that are infinite."""


@dataclass(frozen=True)
class ShapeDifference:
    """A tensor that has different shapes in two checkpoints."""

    tensor: str
    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True)
class TensorDifference:
    """The difference between two tensors of the same shape."""

    tensor: str
    bit_equal: bool
    different: int
    """Number of elements with different bits. 0.0 and -0.0 differ, and a NaN equals itself."""
    max_absolute: float
    """Largest absolute difference.

    NaN, as `relative`, if an element is not finite in one tensor and has other bits in the other.
    """
    relative: float
    """Norm of the difference, divided by the larger of both norms of finite numbers. At most 2."""


@dataclass(frozen=True)
class CheckpointComparison:
    """The differences between two checkpoints. Tensors are named kind/name."""

    config: list[str]
    """One line for each field of the configuration that differs."""
    state: list[str]
    """One line for each value of state and optimizer that differs."""
    only_in_first: list[str]
    only_in_second: list[str]
    shapes: list[ShapeDifference]
    tensors: list[TensorDifference]
    """One entry for each tensor that has the same shape in both, even if it is equal."""

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors, bit by bit. Configuration and state do not matter."""
        return not (self.only_in_first or self.only_in_second or self.shapes) and all(
            row.bit_equal for row in self.tensors
        )


@contextmanager
def add_folder_to_errors(folder: Path) -> Iterator[None]:
    """Return a context that adds the folder to the message of a DamagedError.

    In a comparison, the message would otherwise not show which checkpoint is damaged.
    """
    try:
        yield
    except DamagedError as damage:
        raise DamagedError(f"{folder} is damaged: {damage}", damage.file) from damage


@contextmanager
def _open_tensors(
    checkpoint: Checkpoint,
) -> Iterator[tuple[dict[str, Any], Callable[[str], Tensor]]]:
    """Return a context with (tensors of the index, function that reads the tensor kind/name).

    Both may raise a DamagedError, which names the folder.
    """
    with add_folder_to_errors(checkpoint.folder):
        index = checkpoint.read_index()
    with TensorReader(checkpoint.folder, collect_digests(checkpoint.manifest, index)) as reader:

        def read(key: str) -> Tensor:
            tensor = torch.empty(index.tensors[key]["shape"])
            stored = index.tensors[key]
            # The slice is the complete tensor, whatever slices are stored.
            with add_folder_to_errors(checkpoint.folder):
                reader.read_into(tensor, ((0,) * tensor.dim(), tuple(tensor.shape)), stored, key)
            return tensor

        yield index.tensors, read


def _show_progress(keys: list[str], tensors: Mapping[str, Any], what: str) -> Iterator[str]:
    """Yield the keys and show a progress bar in bytes on stderr, if it is a terminal."""
    sizes = [count_bytes(tensors[key]) for key in keys]
    with tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc=what, disable=None, dynamic_ncols=True
    ) as bar:
        for key, size in zip(keys, sizes, strict=True):
            yield key
            bar.update(size)


def sort_by_parameter(keys: Iterable[str]) -> list[str]:
    """Return tensor names in a readable order.

    The kinds of one parameter are together, with the weight first. Layers are sorted by number.
    """
    kinds = get_args(Kind)

    def sort_key(key: str) -> tuple[list[str | int], int]:
        kind, _, name = key.partition("/")
        # Splitting at a group puts the numbers at the odd positions. As integers, 2 precedes 10.
        words = [int(word) if at % 2 else word for at, word in enumerate(re.split(r"(\d+)", name))]
        return words, kinds.index(kind) if kind in kinds else len(kinds)

    return sorted(keys, key=sort_key)


def compute_statistics(checkpoint: Checkpoint) -> list[TensorStatistics]:
    """Return the statistics of every tensor, sorted by parameter.

    Raises:
        DamagedError: If a tensor is damaged.
    """
    with _open_tensors(checkpoint) as (tensors, read):
        return [
            compute_tensor_statistics(key, read(key))
            for key in _show_progress(sort_by_parameter(tensors), tensors, "read")
        ]


def compute_tensor_statistics(key: str, tensor: Tensor) -> TensorStatistics:
    """Return the statistics of one tensor.

    Args:
        key: Its name as kind/name.
        tensor: The tensor, of any shape.
    """
    kind, _, name = key.partition("/")
    squares = total = 0.0
    low = math.inf
    high = -math.inf
    count = 0
    nans = 0
    for piece in tensor.reshape(-1).split(_PIECE):
        nans += int(piece.isnan().sum())
        # In fp32, the sum of the squares of a large tensor loses small elements or overflows.
        finite = piece[piece.isfinite()].double()
        if finite.numel():
            squares += float(finite.square().sum())
            total += float(finite.sum())
            low = min(low, float(finite.min()))
            high = max(high, float(finite.max()))
            count += finite.numel()
    least, most, mean = (low, high, total / count) if count else (None, None, None)
    # Each element is finite, NaN or infinite, so the third count follows from the others.
    infinite = tensor.numel() - count - nans
    return TensorStatistics(
        name, kind, tuple(tensor.shape), math.sqrt(squares), least, most, mean, nans, infinite
    )


def compare(a: Checkpoint, b: Checkpoint) -> CheckpointComparison:
    """Compare configurations and states by value, and tensors bit by bit.

    Raises:
        DamagedError: If a tensor is damaged.
        CheckpointError: If a configuration has fields that this version does not know.
    """
    config = list_config_differences(a.read_config(), b.read_config())
    state = _compare_states(a, b)
    # Tensors are compared one by one, so that two checkpoints larger than the memory can be
    # compared.
    with _open_tensors(a) as (of_a, read_a), _open_tensors(b) as (of_b, read_b):
        both = sort_by_parameter(of_a.keys() & of_b.keys())
        reshaped = [key for key in both if of_a[key]["shape"] != of_b[key]["shape"]]
        same = [key for key in both if of_a[key]["shape"] == of_b[key]["shape"]]
        tensors = [
            compute_difference(key, read_a(key), read_b(key))
            for key in _show_progress(same, of_a, "compare")
        ]
    shapes = [
        ShapeDifference(key, tuple(of_a[key]["shape"]), tuple(of_b[key]["shape"]))
        for key in reshaped
    ]
    return CheckpointComparison(
        config,
        state,
        only_in_first=sort_by_parameter(of_a.keys() - of_b.keys()),
        only_in_second=sort_by_parameter(of_b.keys() - of_a.keys()),
        shapes=shapes,
        tensors=tensors,
    )


def compute_difference(key: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Return the difference between two fp32 tensors of the same shape.

    Args:
        key: Their name as kind/name.
        a: The first tensor.
        b: The second tensor.
    """
    different = 0
    largest = 0.0
    squares = 0.0
    of_a = 0.0
    of_b = 0.0
    for x, y in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        # As integers, a NaN equals itself and -0.0 differs from 0.0.
        unequal = x.view(torch.int32) != y.view(torch.int32)
        different += int(unequal.sum())
        # After the comparison of the bits, which needs the fp32 values.
        x = x.double()
        y = y.double()
        of_a += float(x.nan_to_num(0.0, 0.0, 0.0).square().sum())
        of_b += float(y.nan_to_num(0.0, 0.0, 0.0).square().sum())
        if unequal.any():
            # Only elements with different bits. Two equal infinities would give NaN.
            distance = (x - y)[unequal].abs()
            if distance.isfinite().all():
                largest = max(largest, float(distance.max()))
            else:
                largest = math.nan
            squares += float(distance.square().sum())
    # The larger norm, so that the result does not depend on the order of the two. If `squares` is
    # 0, both norms may be 0 as well.
    norm = math.sqrt(max(of_a, of_b))
    if math.isnan(largest):
        relative = math.nan
    else:
        relative = math.sqrt(squares) / norm if squares else 0.0
    return TensorDifference(key, different == 0, different, largest, relative)


def _compare_states(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Return a line for each number or text of state and optimizer that differs."""
    x, y = (
        _flatten({"state": checkpoint.state, "optimizer": checkpoint.optimizer})
        for checkpoint in (a, b)
    )
    # As JSON text, so that 1 and 1.0, or 0 and false, are different.
    shown = {
        name: tuple(json.dumps(side[name]) if name in side else "nothing" for side in (x, y))
        for name in [*x, *y]
    }
    return [
        f"{name}: {first} and {second}"
        for name, (first, second) in shown.items()
        if first != second
    ]


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested JSON as dotted name -> value. An empty mapping stays a value."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {
        k: v
        for key, item in value.items()
        for k, v in _flatten(item, f"{name}.{key}" if name else key).items()
    }
