"""Is a checkpoint whole, and are all its numbers finite?

All damage, not the first: digests of files and their blocks, boxes, kinds, what safetensors finds.
Writes nothing, and needs some blocks of memory. Where the manifest is damaged, nothing else can be
checked.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from megatron.checkpoint.digest import BLOCK, Digester, FileDigest
from megatron.checkpoint.finite import values_not_finite
from megatron.checkpoint.folder import parse_iteration
from megatron.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    Manifest,
    TensorIndex,
    read_index,
    read_manifest,
)
from megatron.checkpoint.tensor_file import TensorSlice, intersect
from megatron.errors import CheckpointError, DamagedError

_ITEM = 4  # bytes of an fp32
_SHOWN_TENSORS = 4
StoredTensor = tuple[int, str, tuple[int, ...]]
"""(first byte in the file, name, shape)."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong."""

    file: str
    what: str


@dataclass(frozen=True)
class NotFinite:
    """A tensor with NaN or infinities: it is what was written, and a run cannot be trained from
    it."""

    tensor: str
    """kind/name; or the dotted name of a number in the manifest."""
    nan: int
    """How many numbers are NaN."""
    inf: int
    numbers: int
    """How many it has."""


@dataclass(frozen=True)
class Verification:
    """What was looked at, and what is wrong with it."""

    iteration: int | None
    """None: the manifest, which says it, is damaged."""
    bytes: int
    files: int
    tensors: int
    damage: tuple[Damage, ...]
    """Empty: the checkpoint is whole."""
    notes: tuple[str, ...]
    """What is no damage: what could not be checked, and files that are not the checkpoint's."""
    not_finite: tuple[NotFinite, ...] = ()
    """In files that are what was written."""


def verify(folder: Path) -> Verification:
    """Read every file of a checkpoint, and list all damage. Shows its progress at a terminal, on stderr.

    Raises:
        CheckpointError: it has another format, or a small file cannot be read.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        damaged = Damage(error.file, f"{error}; nothing else can be checked without it")
        return Verification(None, 0, 0, 0, (damaged,), ())
    damage, notes = [], []
    if parse_iteration(folder.name) not in (None, manifest.iteration):
        damage.append(
            Damage(MANIFEST, f"it is the checkpoint of iteration {manifest.iteration}, renamed")
        )
    if INDEX not in manifest.files:
        damage.append(Damage(INDEX, f"{MANIFEST} does not name it"))
    index = _read_index_if_valid(folder, manifest)
    counter = FiniteCounter(index)
    with tqdm(
        total=manifest.bytes,
        unit="B",
        unit_scale=True,
        desc="verify",
        disable=None,
        dynamic_ncols=True,
    ) as bar:
        for name in manifest.files:
            wrong = list(check_file(folder, name, manifest, index, bar.update, counter.look_at))
            damage += wrong
            if wrong:
                counter.forget(name)  # numbers that were never written
    if index is None:
        notes.append(
            f"which tensors are concerned cannot be told, nor whether all are there: that stands in {INDEX}"
        )
    else:
        damage += [
            *check_tiling(index),
            *check_kinds(index, manifest),
            *check_headers(folder, index, manifest),
        ]
    strangers = sorted(
        {entry.name for entry in folder.iterdir()} - manifest.files.keys() - {MANIFEST}
    )
    if strangers:
        notes.append(f"not part of it: {', '.join(strangers)}")
    return Verification(
        manifest.iteration,
        manifest.bytes,
        len(manifest.files) + 1,
        0 if index is None else len(index.tensors),
        tuple(damage),
        tuple(notes),
        (*counter.found(), *_values_not_finite(manifest)),
    )


def _values_not_finite(manifest: Manifest) -> Iterator[NotFinite]:
    for name, record in (("optimizer", manifest.optimizer), ("state", manifest.state)):
        for key, value in values_not_finite(record, name):
            yield NotFinite(key, int(math.isnan(value)), int(math.isinf(value)), 1)


class FiniteCounter:
    """Counts numbers that are not finite while a file is read for its digest, so that no byte is
    read twice."""

    def __init__(self, index: TensorIndex | None) -> None:
        self._spans: dict[str, list[tuple[int, int, str]]] = {}
        """file -> (first byte, byte after the last, kind/name) of each box."""
        self._counts: dict[str, dict[str, tuple[int, int]]] = {}
        """file -> kind/name -> (NaN, infinities)."""
        self._index = index
        for key, tensor in ({} if index is None else index.tensors).items():
            for box in tensor["boxes"]:
                end = box["begin"] + _ITEM * math.prod(box["shape"])
                self._spans.setdefault(box["file"], []).append((box["begin"], end, key))

    def look_at(self, file: str, position: int, data: bytes) -> None:
        """Count in the bytes of `file` from `position` on. Positions and boxes are multiples of 4
        bytes."""
        end = position + len(data)
        for first, last, key in self._spans.get(file, ()):
            low = max(first, position)
            high = min(last, end)
            if low >= high or (low - position) % _ITEM or (high - low) % _ITEM:
                continue  # a box that is not aligned is reported as damage of the index
            values = np.frombuffer(data, "<f4", (high - low) // _ITEM, low - position)
            finite = int(np.count_nonzero(np.isfinite(values)))
            if finite < len(values):
                counts = self._counts.setdefault(file, {})
                nan = int(np.count_nonzero(np.isnan(values)))
                nan_before, inf_before = counts.get(key, (0, 0))
                counts[key] = nan_before + nan, inf_before + len(values) - finite - nan

    def forget(self, file: str) -> None:
        """Drop what was counted in a file."""
        self._counts.pop(file, None)

    def found(self) -> Iterator[NotFinite]:
        """Yield each tensor that holds numbers that are not finite, in the order of the index."""
        for key, tensor in ({} if self._index is None else self._index.tensors).items():
            counts = [counts[key] for counts in self._counts.values() if key in counts]
            if counts:
                nan = sum(count for count, _ in counts)
                inf = sum(count for _, count in counts)
                yield NotFinite(key, nan, inf, math.prod(tensor["shape"]))


@contextmanager
def ensure_undisturbed(folder: Path) -> Iterator[None]:
    """What is read inside is read of one checkpoint: a run that is alive may remove or replace it meanwhile, which is no damage.

    Raises:
        CheckpointError: that has happened; raised instead of any other error.
    """
    before = _read_identity(folder)
    try:
        yield
    finally:
        if before is None or _read_identity(folder) != before:
            raise CheckpointError(
                f"{folder} was removed, renamed or replaced while it was read: is its run alive? Ask again"
            )


def _read_identity(folder: Path) -> tuple[int, int] | None:
    """Its number, which a later folder may get again, and when the last file was put into it; None: it is not there."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_index_if_valid(folder: Path, manifest: Manifest) -> TensorIndex | None:
    """None where it cannot be believed; its damage is told by `check_file`, as every file's."""
    try:
        return read_index(folder, manifest) if INDEX in manifest.files else None
    except CheckpointError:
        return None


def check_file(
    folder: Path,
    name: str,
    manifest: Manifest,
    index: TensorIndex | None,
    progress: Callable[[int], object],
    look_at: Callable[[str, int, bytes], object],
) -> Iterator[Damage]:
    """One file against its digests: which bytes differ, and which tensors lie in them.

    Args:
        progress: Called with the number of bytes of each block.
        look_at: Called with (name, position, bytes) of each block.
    """
    size, xxh128 = manifest.files[name]["bytes"], manifest.files[name]["xxh128"]
    digester, missing = Digester(), False
    try:
        with open(
            folder / name, "rb"
        ) as file:  # buffered: only the last block is shorter than asked for
            position = 0
            while data := file.read(BLOCK):
                digester.update(data)
                look_at(name, position, data)
                position += len(data)
                progress(len(data))
    except FileNotFoundError:
        missing = True
    except OSError as error:
        yield Damage(name, f"{name} cannot be read: {error}")
        return
    found = digester.digest()
    if missing:
        what = f"{name} is missing"
    elif found.bytes != size:
        what = f"{name} has {found.bytes} bytes instead of {size}"
    elif found.xxh128 != xxh128:
        what = f"{name} is not what was written: its digest is {found.xxh128}, not {xxh128}"
    else:
        return
    if index is not None and name in index.blocks:
        expected = FileDigest(size, xxh128, index.blocks[name])
        differing = [
            number
            for number in range(-(-size // BLOCK))
            if found.block(number) != expected.block(number)
        ]
        what += f"; {_format_ranges(differing, size)} differ" if differing and found.bytes else ""
        what += _describe_affected_tensors(index, name, set(differing))
    yield Damage(name, what)


def _format_ranges(blocks: list[int], size: int) -> str:
    """bytes 0-4194303, ...: where the blocks are, neighbours together."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0])
    ]
    return "bytes " + ", ".join(
        f"{run[0] * BLOCK}-{min(size, (run[-1] + 1) * BLOCK) - 1}" for run in runs
    )


def _describe_affected_tensors(index: TensorIndex, file: str, blocks: set[int]) -> str:
    keys = []
    for key, tensor in index.tensors.items():
        spans = [
            (box["begin"], _ITEM * math.prod(box["shape"]))
            for box in tensor["boxes"]
            if box["file"] == file
        ]
        if any(
            size and not blocks.isdisjoint(range(begin // BLOCK, -(-(begin + size) // BLOCK)))
            for begin, size in spans
        ):
            keys.append(key)
    more = f" and {len(keys) - _SHOWN_TENSORS} more" if len(keys) > _SHOWN_TENSORS else ""
    return f"; concerns {', '.join(keys[:_SHOWN_TENSORS])}{more}" if keys else ""


def check_tiling(index: TensorIndex) -> Iterator[Damage]:
    """Every element of every tensor must be in exactly one box."""
    for key, tensor in index.tensors.items():
        shape = tuple(tensor["shape"])
        boxes: list[TensorSlice] = [
            (tuple(box["offset"]), tuple(box["shape"]))
            for box in tensor["boxes"]
            if math.prod(box["shape"])
        ]
        inside = [box for box in boxes if intersect(box, ((0,) * len(shape), shape)) == box]
        for offset, size in boxes:
            if (offset, size) not in inside:
                what = f"{key} is {format_shape(shape)}, and a box of {format_shape(size)} at {list(offset)} is not within it"
                yield Damage(INDEX, what)
        missing, double = _count_uneven_elements(inside, shape)
        if missing or double:
            what = f"of {key}'s {math.prod(shape)} elements {missing} are in no box, {double} in more than one"
            yield Damage(INDEX, what)


def _count_uneven_elements(boxes: list[TensorSlice], shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements in no box, and in more than one: counted on the grid that the boxes' edges make."""
    edges = [
        sorted({0, n, *(o[d] for o, _ in boxes), *(o[d] + s[d] for o, s in boxes)})
        for d, n in enumerate(shape)
    ]
    times = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int64)
    for offset, size in boxes:
        cells = zip(edges, offset, size, strict=True)
        times[tuple(slice(edge.index(o), edge.index(o + n)) for edge, o, n in cells)] += 1
    volume = np.ones((), dtype=np.int64)
    for edge in edges:
        volume = np.multiply.outer(volume, np.diff(edge))
    return int(volume[times == 0].sum()), int(volume[times > 1].sum())


def check_kinds(index: TensorIndex, manifest: Manifest) -> Iterator[Damage]:
    """Each moment has its weight's shape, and none is missing where the optimizer is in the checkpoint."""
    shapes: dict[str, dict[str, list[int]]] = {}
    for key, tensor in index.tensors.items():
        kind, _, name = key.partition("/")
        shapes.setdefault(name, {})[kind] = tensor["shape"]
    wanted = {"weight"} if manifest.optimizer is None else {"weight", "exp_avg", "exp_avg_sq"}
    for name, kinds in shapes.items():
        for kind in sorted(wanted - kinds.keys()):
            yield Damage(INDEX, f"{kind}/{name} is not in it")
        if len(set(map(tuple, kinds.values()))) > 1:
            yield Damage(INDEX, f"the kinds of {name} have different shapes: {kinds}")


def check_headers(folder: Path, index: TensorIndex, manifest: Manifest) -> Iterator[Damage]:
    """The safetensors library must open each file and find in it what the index says, where the index says."""
    expected: dict[str, set[StoredTensor]] = {name: set() for name in index.blocks}
    for key, tensor in index.tensors.items():
        for box in tensor["boxes"]:
            name = f"{key}@{','.join(map(str, box['offset']))}"
            expected.setdefault(box["file"], set()).add((box["begin"], name, tuple(box["shape"])))
    for file in sorted(expected.keys() - manifest.files.keys()):
        yield Damage(INDEX, f"it has tensors in {file}, which {MANIFEST} does not name")
    for file in sorted(expected.keys() & manifest.files.keys()):
        try:
            found = list_stored_tensors(folder / file)
        except FileNotFoundError:
            continue  # told already
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            yield Damage(file, f"safetensors cannot open {file}: {error}")
            continue
        for begin, name, shape in sorted(expected[file] - found):
            what = f"{INDEX} has {name}, {format_shape(shape)}, at byte {begin} of {file}, and safetensors does not find it there"
            yield Damage(file, what)
        for begin, name, shape in sorted(found - expected[file]):
            what = f"safetensors finds {name}, {format_shape(shape)}, at byte {begin} of {file}, and {INDEX} does not have it there"
            yield Damage(file, what)


def list_stored_tensors(path: Path) -> set[StoredTensor]:
    """What the library finds, and where. It checks that the header fits the file but does not tell positions: the header does.

    Raises:
        SafetensorError: it is not a whole safetensors file. OSError: it cannot be read.
    """
    with safe_open(path, framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118, it is no dict
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        (8 + length + header[name]["data_offsets"][0], name, shape)
        for name, shape in shapes.items()
    }


def format_shape(shape: tuple[int, ...]) -> str:
    """3 x 4."""
    return " x ".join(map(str, shape)) or "one number"
