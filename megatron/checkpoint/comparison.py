"""Statistics of a checkpoint's tensors, and where two checkpoints differ. Layouts play no part: tensors are read whole.

Every byte is checked against its digest. One tensor is in memory, or two in a comparison, and never a whole checkpoint.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.manifest import collect_digests
from megatron.checkpoint.tensor_file import TensorReader
from megatron.config.compare import list_config_differences
from megatron.errors import DamagedError

_ITEM = 4  # bytes of an fp32
_PIECE = 1 << 20
"""Elements that are worked on at a time: all is computed in float64."""
_KINDS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TensorStatistics:
    """Of a tensor's finite numbers; `min`, `max` and `mean` are None where there are none."""

    name: str
    kind: str
    shape: tuple[int, ...]
    norm: float
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    """How many are NaN."""
    inf: int


@dataclass(frozen=True)
class ShapeDifference:
    """A tensor that two checkpoints have in different shapes."""

    tensor: str
    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True)
class TensorDifference:
    """Between two tensors of one shape."""

    tensor: str
    bit_equal: bool
    different: int
    """Elements with other bits: 0.0 and -0.0 differ, a NaN equals itself."""
    max_absolute: float
    """NaN, as `relative`, where one has a number that is not finite and the other has not the same bits there."""
    relative: float
    """The norm of the difference over the larger norm of the two's finite numbers, so at most 2."""


@dataclass(frozen=True)
class CheckpointComparison:
    """Of two checkpoints; tensors are called kind/name."""

    config: list[str]
    """A line for each field that differs; so `state`."""
    state: list[str]
    only_in_first: list[str]
    only_in_second: list[str]
    shapes: list[ShapeDifference]
    tensors: list[TensorDifference]
    """Of all that both have in one shape, the equal ones too."""

    @property
    def equal(self) -> bool:
        """Every tensor of one is in the other, and equal to it bit by bit; configuration and state play no part."""
        return not (self.only_in_first or self.only_in_second or self.shapes) and all(
            row.bit_equal for row in self.tensors
        )


@contextmanager
def add_folder_to_errors(folder: Path) -> Iterator[None]:
    """Damage that is found inside names the folder: there may be two."""
    try:
        yield
    except DamagedError as damage:
        raise DamagedError(f"{folder} is damaged: {damage}", damage.file) from damage


@contextmanager
def _open_tensors(
    checkpoint: Checkpoint,
) -> Iterator[tuple[dict[str, Any], Callable[[str], Tensor]]]:
    """(the index's tensors, a function that reads the one kind/name whole). Both raise DamagedError, which names the folder."""
    with add_folder_to_errors(checkpoint.folder):
        index = checkpoint.read_index()
    with TensorReader(checkpoint.folder, collect_digests(checkpoint.manifest, index)) as reader:

        def read(key: str) -> Tensor:
            tensor, stored = torch.empty(index.tensors[key]["shape"]), index.tensors[key]["boxes"]
            with add_folder_to_errors(checkpoint.folder):
                reader.read_into(tensor, ((0,) * tensor.dim(), tuple(tensor.shape)), stored, key)
            return tensor

        yield index.tensors, read


def _show_progress(keys: list[str], tensors: Mapping[str, Any], what: str) -> Iterator[str]:
    """The keys, while a bar on stderr tells people at a terminal how many bytes are through."""
    sizes = [_ITEM * math.prod(tensors[key]["shape"]) for key in keys]
    with tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc=what, disable=None, dynamic_ncols=True
    ) as bar:
        for key, size in zip(keys, sizes, strict=True):
            yield key
            bar.update(size)


def sort_by_parameter(keys: Iterable[str]) -> list[str]:
    """In order: a parameter's kinds together, weight first; layers by number."""

    def sort_key(key: str) -> tuple[list[str | int], int]:
        kind, _, name = key.partition("/")
        words = [int(word) if at % 2 else word for at, word in enumerate(re.split(r"(\d+)", name))]
        return words, _KINDS.index(kind) if kind in _KINDS else len(_KINDS)

    return sorted(keys, key=sort_key)


def compute_statistics(checkpoint: Checkpoint) -> list[TensorStatistics]:
    """Of every tensor, by parameter.

    Raises:
        DamagedError: a tensor cannot be read as it was written.
    """
    with _open_tensors(checkpoint) as (tensors, read):
        return [
            compute_tensor_statistics(key, read(key))
            for key in _show_progress(sort_by_parameter(tensors), tensors, "read")
        ]


def compute_tensor_statistics(key: str, tensor: Tensor) -> TensorStatistics:
    """Of the tensor kind/name."""
    kind, _, name = key.partition("/")
    squares = total = 0.0
    low, high, count, nans = math.inf, -math.inf, 0, 0
    for piece in tensor.reshape(-1).split(_PIECE):
        nans += int(piece.isnan().sum())
        finite = piece[piece.isfinite()].double()
        if finite.numel():
            squares += float(finite.square().sum())
            total += float(finite.sum())
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            count += finite.numel()
    least, most, mean = (low, high, total / count) if count else (None, None, None)
    infinite = tensor.numel() - count - nans
    return TensorStatistics(
        name, kind, tuple(tensor.shape), math.sqrt(squares), least, most, mean, nans, infinite
    )


def compare(a: Checkpoint, b: Checkpoint) -> CheckpointComparison:
    """Configurations, states, and tensors bit by bit.

    Raises:
        DamagedError: a tensor cannot be read as it was written. CheckpointError: a configuration is not this version's.
    """
    config, state = list_config_differences(a.read_config(), b.read_config()), _compare_states(a, b)
    with _open_tensors(a) as (here, read), _open_tensors(b) as (there, read_other):
        both = sort_by_parameter(here.keys() & there.keys())
        other = [key for key in both if here[key]["shape"] != there[key]["shape"]]
        same = [key for key in both if here[key]["shape"] == there[key]["shape"]]
        tensors = [
            compute_difference(key, read(key), read_other(key))
            for key in _show_progress(same, here, "compare")
        ]
    shapes = [
        ShapeDifference(key, tuple(here[key]["shape"]), tuple(there[key]["shape"])) for key in other
    ]
    only = (
        sort_by_parameter(here.keys() - there.keys()),
        sort_by_parameter(there.keys() - here.keys()),
    )
    return CheckpointComparison(config, state, *only, shapes, tensors)


def compute_difference(key: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Between two tensors kind/name of one shape."""
    different, largest, squares, of_a, of_b = 0, 0.0, 0.0, 0.0, 0.0
    for x, y in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        unequal = x.view(torch.int32) != y.view(torch.int32)
        different += int(unequal.sum())
        x, y = x.double(), y.double()
        of_a += float(x.nan_to_num(0.0, 0.0, 0.0).square().sum())
        of_b += float(y.nan_to_num(0.0, 0.0, 0.0).square().sum())
        if unequal.any():
            distance = (x - y)[unequal].abs()
            largest = max(largest, float(distance.max())) if distance.isfinite().all() else math.nan
            squares += float(distance.square().sum())
    norm = math.sqrt(max(of_a, of_b))
    relative = math.nan if math.isnan(largest) else math.sqrt(squares) / norm if squares else 0.0
    return TensorDifference(key, different == 0, different, largest, relative)


def _compare_states(a: Checkpoint, b: Checkpoint) -> list[str]:
    x, y = (
        _flatten({"state": checkpoint.state, "optimizer": checkpoint.optimizer})
        for checkpoint in (a, b)
    )
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
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {
        k: v
        for key, item in value.items()
        for k, v in _flatten(item, f"{name}.{key}" if name else key).items()
    }
