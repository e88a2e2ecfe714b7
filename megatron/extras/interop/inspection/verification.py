"""Check that a checkpoint is complete and intact, and that all its numbers are finite.

The checks do not stop at the first damage. They compare the digests of the files and their blocks.
They check that slices cover each tensor exactly once, and that no weight or moment is missing. They
also compare the index with what the safetensors library finds. Nothing is written, and only a few
blocks are in memory. If the manifest is damaged, nothing else can be checked.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from megatron.base.errors import CheckpointError, DamagedError
from megatron.base.outside_file import check_regular, open_regular, parse_json
from megatron.base.plain_text import format_some
from megatron.checkpoint.digest import BLOCK, Digester, FileDigest
from megatron.checkpoint.finite import values_not_finite
from megatron.checkpoint.folder import parse_iteration
from megatron.checkpoint.manifest import (
    CONFIG,
    INDEX,
    MANIFEST,
    Manifest,
    TensorIndex,
    read_checked_text,
    read_index,
    read_manifest,
)
from megatron.checkpoint.tensor_file import TensorSlice, find_dtype, intersect
from megatron.config.optimizer import find_updater
from megatron.config.yaml_file import read_text
from megatron.extras.object_store.mirror import MARKER
from megatron.model.experts.routing import BALANCE

_SHOWN_TENSORS = 4
"""Number of tensors that a message names."""
StoredTensor = tuple[int, str, str, tuple[int, ...]]
"""(First byte in the file, name, dtype, shape)."""


@dataclass(frozen=True)
class Damage:
    """One fault of a checkpoint."""

    file: str
    what: str
    """Description for people."""


@dataclass(frozen=True)
class NotFinite:
    """A tensor, or a number in the manifest, that is not finite although its file is intact.

    A run that loads it ends with an error (`finite.refuse_not_finite`).
    """

    tensor: str
    """kind/name, or the dotted name of a number in the manifest."""
    nan: int
    """Number of elements that are NaN."""
    inf: int
    """Number of elements that are infinite."""
    numbers: int
    """Number of all elements."""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    iteration: int | None
    """None if the manifest is damaged."""
    bytes: int
    """Total size of the files that the manifest names."""
    files: int
    """Number of files, with the manifest."""
    tensors: int
    damage: tuple[Damage, ...]
    """Empty if the checkpoint is complete and intact."""
    notes: tuple[str, ...]
    """Remarks that are not damage: checks that were not possible, and unknown files."""
    not_finite: tuple[NotFinite, ...] = ()
    """Numbers that are not finite, in intact files."""


def verify(folder: Path) -> Verification:
    """Read every file of a checkpoint, and list all damage.

    At a terminal, a progress bar is shown on stderr.

    Raises:
        CheckpointError: If this version cannot read its format, or cannot read its manifest.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedError as error:
        damaged = Damage(error.file, f"{error}; nothing else can be checked without it")
        return Verification(None, 0, 0, 0, (damaged,), ())
    damage = []
    notes = []
    # A folder of another name is accepted, because a copy of a checkpoint may have any.
    if parse_iteration(folder.name) not in (None, manifest.iteration):
        damage.append(
            Damage(MANIFEST, f"it is the checkpoint of iteration {manifest.iteration}, renamed")
        )
    if INDEX not in manifest.files:
        damage.append(Damage(INDEX, f"{MANIFEST} does not name it"))
    index = _read_index_if_valid(folder, manifest)
    optimizer = None
    if manifest.optimizer is not None and index is not None:
        optimizer = _find_optimizer(folder, manifest)
        if optimizer is None:
            notes.append(f"{CONFIG} cannot be read, so it is not known which states must exist")
    # The digest and the count of NaN use the same bytes, so that no file is read twice.
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
                # Damage can turn any number into NaN, so NaN in a damaged file are not counted.
                counter.forget(name)
    if index is None:
        notes.append(
            f"without {INDEX}, it is not known which tensors are affected and whether all exist"
        )
    else:
        # Right digests prove only that the files are what was written. These checks would find a
        # mistake of the writer.
        damage += [
            *check_tiling(index),
            *check_kinds(index, optimizer),
            *check_headers(folder, index, manifest),
        ]
    unknown = sorted(
        {entry.name for entry in folder.iterdir()} - manifest.files.keys() - {MANIFEST, MARKER}
    )
    if unknown:
        notes.append(f"not part of it: {', '.join(unknown)}")
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
    """Counts numbers that are not finite, while the files are read for their digests."""

    def __init__(self, index: TensorIndex | None) -> None:
        """Create a counter for the tensors of an index. Without an index, it counts nothing."""
        self._spans: dict[str, list[tuple[int, int, str, torch.dtype]]] = {}
        """File -> (first byte, byte after the last, kind/name, dtype) of each stored slice."""
        self._counts: dict[str, dict[str, tuple[int, int]]] = {}
        """File -> kind/name -> (NaN, infinities)."""
        self._index = index
        for key, tensor in ({} if index is None else index.tensors).items():
            dtype = find_dtype(tensor)
            for stored in tensor["boxes"]:
                begin = stored["begin"]
                end = begin + dtype.itemsize * math.prod(stored["shape"])
                self._spans.setdefault(stored["file"], []).append((begin, end, key, dtype))

    def look_at(self, file: str, position: int, data: bytes) -> None:
        """Count the numbers in a part of a file that are not finite.

        `data` has the bytes of `file` from `position` on. `position` and, in a valid index, the
        bounds of slices are multiples of the size of an element.
        """
        end = position + len(data)
        for first, last, key, dtype in self._spans.get(file, ()):
            low = max(first, position)
            high = min(last, end)
            # A slice that is not aligned has a wrong position in the index. `check_headers` reports
            # that. Its bytes cannot be read as numbers here.
            item = dtype.itemsize
            if low >= high or (low - position) % item or (high - low) % item:
                continue
            if dtype == torch.bfloat16:
                # NumPy has no bf16. These are the upper 16 bits of an fp32.
                bits = np.frombuffer(data, "<u2", (high - low) // item, low - position)
                values = (bits.astype("<u4") << 16).view("<f4")
            else:
                values = np.frombuffer(data, "<f4", (high - low) // item, low - position)
            finite = int(np.count_nonzero(np.isfinite(values)))
            if finite < len(values):
                counts = self._counts.setdefault(file, {})
                nan = int(np.count_nonzero(np.isnan(values)))
                nan_before, inf_before = counts.get(key, (0, 0))
                counts[key] = nan_before + nan, inf_before + len(values) - finite - nan

    def forget(self, file: str) -> None:
        """Discard the counts of a file."""
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
def ensure_undisturbed(folder: Path, *, errors_only: bool = False) -> Iterator[None]:
    """Return a context in which a folder must stay the same checkpoint.

    A run that is alive may remove or replace the checkpoint while it is read. This looks like
    damage and is not.

    Args:
        folder: The folder.
        errors_only: Accept that the folder changes if there is no error. It is for readers that
            compare everything with the digests of one manifest.

    Raises:
        CheckpointError: If that has happened. It replaces any other error.
    """
    before = _read_identity(folder)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        accepted = errors_only and succeeded
        if not accepted and (before is None or _read_identity(folder) != before):
            raise CheckpointError(
                f"{folder} was removed, renamed or replaced while it was read. Its run is probably "
                "alive. Try again"
            )


def _read_identity(folder: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a folder, or None if it does not exist.

    The inode alone is not enough, because a later folder may get the same one. The modification
    time changes when a file is added or removed.
    """
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_index_if_valid(folder: Path, manifest: Manifest) -> TensorIndex | None:
    """Return the index, or None if it is damaged. `check_file` reports the damage."""
    try:
        if INDEX in manifest.files:
            return read_index(folder, manifest)
        return None
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
    """Compare one file with its digests. Yield which bytes differ, and which tensors they hold.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the file.
        manifest: The manifest of the checkpoint.
        index: The index, which has the digests of blocks. None if it is damaged.
        progress: Called with the number of bytes of each block.
        look_at: Called with (name, position, bytes) of each block.
    """
    size = manifest.files[name]["bytes"]
    xxh128 = manifest.files[name]["xxh128"]
    digester = Digester()
    missing = False
    try:
        # Buffered, because an unbuffered read may return less than a block before the end. The
        # positions might then not be multiples of 4 bytes.
        with open_regular(folder / name) as file:
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
    # A missing file is treated like an empty one, so that the message below names the tensors that
    # are lost.
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
        # Rounded up, because the last block is usually shorter. A block after the end of a file
        # that was cut off has an empty digest, so it differs.
        differing = [
            number
            for number in range(-(-size // BLOCK))
            if found.block(number) != expected.block(number)
        ]
        # For a missing or empty file, the range would be the complete file.
        what += f"; {_format_ranges(differing, size)} differ" if differing and found.bytes else ""
        what += _describe_affected_tensors(index, name, set(differing))
    yield Damage(name, what)


def _format_ranges(blocks: list[int], size: int) -> str:
    """Return the byte ranges of blocks as "bytes 0-4194303, ...". Neighbours are joined."""
    # Block number minus position in the list is constant within a run of neighbours.
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0])
    ]
    return "bytes " + ", ".join(
        f"{run[0] * BLOCK}-{min(size, (run[-1] + 1) * BLOCK) - 1}" for run in runs
    )


def _describe_affected_tensors(index: TensorIndex, file: str, blocks: set[int]) -> str:
    """Return the end of a message, which names the tensors that have bytes in these blocks."""
    keys = []
    for key, tensor in index.tensors.items():
        spans = [
            (stored["begin"], find_dtype(tensor).itemsize * math.prod(stored["shape"]))
            for stored in tensor["boxes"]
            if stored["file"] == file
        ]
        if any(
            size and not blocks.isdisjoint(range(begin // BLOCK, -(-(begin + size) // BLOCK)))
            for begin, size in spans
        ):
            keys.append(key)
    if keys:
        return f"; affects {format_some(keys, _SHOWN_TENSORS)}"
    return ""


def check_tiling(index: TensorIndex) -> Iterator[Damage]:
    """Check that every element of every tensor is in exactly one stored slice."""
    for key, tensor in index.tensors.items():
        shape = tuple(tensor["shape"])
        # A slice without elements covers nothing, and its edges would make empty grid cells.
        slices: list[TensorSlice] = [
            (tuple(stored["offset"]), tuple(stored["shape"]))
            for stored in tensor["boxes"]
            if math.prod(stored["shape"])
        ]
        # Slices that are not within the tensor are reported and not counted. Their edges would
        # extend the grid beyond the tensor.
        complete = ((0,) * len(shape), shape)
        inside = [part for part in slices if intersect(part, complete) == part]
        for offset, size in slices:
            if (offset, size) not in inside:
                what = (
                    f"{key} is {format_shape(shape)}, and a slice of {format_shape(size)} "
                    f"at {list(offset)} is not within it"
                )
                yield Damage(INDEX, what)
        missing, double = _count_uneven_elements(inside, shape)
        if missing or double:
            what = (
                f"{missing} of the {math.prod(shape)} elements of {key} are in no slice, and "
                f"{double} are in more than one"
            )
            yield Damage(INDEX, what)


def _count_uneven_elements(slices: list[TensorSlice], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many elements are in no slice, and how many in more than one.

    The edges of all slices divide the tensor into a grid. All elements of one grid cell are in the
    same slices, so the cells are counted and weighted with their volume. This needs little memory,
    where a counter for each element would need as much as the tensor.

    Args:
        slices: The slices. Each is within the tensor.
        shape: The global shape.
    """
    edges = [
        sorted({0, n, *(o[d] for o, _ in slices), *(o[d] + s[d] for o, s in slices)})
        for d, n in enumerate(shape)
    ]
    # One counter for each cell. A slice covers a block of cells, because its edges are grid lines.
    times = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int64)
    for offset, size in slices:
        cells = zip(edges, offset, size, strict=True)
        times[tuple(slice(edge.index(o), edge.index(o + n)) for edge, o, n in cells)] += 1
    # Volume of each cell: the outer product of the lengths along the dimensions.
    volume = np.ones((), dtype=np.int64)
    for edge in edges:
        volume = np.multiply.outer(volume, np.diff(edge))
    return int(volume[times == 0].sum()), int(volume[times > 1].sum())


def _find_optimizer(folder: Path, manifest: Manifest) -> str | None:
    """Return the optimizer of the run that wrote a checkpoint, or None if it is not known."""
    try:
        settings = read_text(read_checked_text(folder, CONFIG, manifest), CONFIG)
    except CheckpointError:
        return None
    if settings.errors:
        return None
    given = settings.given.get("optimizer.optimizer")
    # The first versions had no other optimizer.
    return "adam" if given is None else str(given.value)


def check_kinds(index: TensorIndex, optimizer: str | None) -> Iterator[Damage]:
    """Check that each parameter has its weight and its states, all with the same shape.

    Args:
        index: The index.
        optimizer: The optimizer whose states were saved. None: no states are needed.
    """
    shapes: dict[str, dict[str, list[int]]] = {}
    for key, tensor in index.tensors.items():
        kind, _, name = key.partition("/")
        shapes.setdefault(name, {})[kind] = tensor["shape"]
    for name, kinds in shapes.items():
        wanted = {"weight"}
        # No optimizer updates the bias that balances experts.
        if optimizer is not None and not name.endswith(BALANCE):
            dimensions = len(next(iter(kinds.values())))
            states = find_updater(optimizer, name, dimensions).states
            wanted |= {state.kind for state in states}
        for kind in sorted(wanted - kinds.keys()):
            yield Damage(INDEX, f"{kind}/{name} is not in the checkpoint")
        if len(set(map(tuple, kinds.values()))) > 1:
            yield Damage(INDEX, f"weight and moments of {name} differ in shape: {kinds}")


def check_headers(folder: Path, index: TensorIndex, manifest: Manifest) -> Iterator[Damage]:
    """Check that the safetensors library finds the tensors of each file where the index has them.

    Our reader uses the index, and other programs use the header of each file. Both must agree.
    """
    # Every file that has digests of blocks is opened, even if the index has no tensor in it.
    expected: dict[str, set[StoredTensor]] = {name: set() for name in index.blocks}
    for key, tensor in index.tensors.items():
        for stored in tensor["boxes"]:
            name = f"{key}@{','.join(map(str, stored['offset']))}"
            dtype = tensor.get("dtype", "F32")
            entry = (stored["begin"], name, dtype, tuple(stored["shape"]))
            expected.setdefault(stored["file"], set()).add(entry)
    for file in sorted(expected.keys() - manifest.files.keys()):
        yield Damage(INDEX, f"it has tensors in {file}, which {MANIFEST} does not name")
    for file in sorted(expected.keys() & manifest.files.keys()):
        try:
            found = list_stored_tensors(folder / file)
        except FileNotFoundError:
            # `check_file` has reported it.
            continue
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            yield Damage(file, f"safetensors cannot open {file}: {error}")
            continue
        for begin, name, dtype, shape in sorted(expected[file] - found):
            what = (
                f"{INDEX} has {name}, {dtype} {format_shape(shape)}, at byte {begin} of {file}, "
                "and safetensors does not find it there"
            )
            yield Damage(file, what)
        for begin, name, dtype, shape in sorted(found - expected[file]):
            what = (
                f"safetensors finds {name}, {dtype} {format_shape(shape)}, at byte {begin} of "
                f"{file}, and {INDEX} does not have it there"
            )
            yield Damage(file, what)


def list_stored_tensors(path: Path) -> set[StoredTensor]:
    """Return the tensors that the safetensors library finds in a file, and their positions.

    The library checks that the header fits the file. It does not report positions, so these are
    read from the header.

    Raises:
        SafetensorError: If it is not a complete safetensors file.
        OSError: If it cannot be read.
    """
    check_regular(path)
    with safe_open(path, framework="pt") as opened:
        # `opened` is not a dict and cannot be iterated without `keys`.
        names = list(opened.keys())
        slices = {name: opened.get_slice(name) for name in names}
        found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length))
    # The offsets of a header count from its end. It starts after the 8 bytes of its length.
    return {
        (8 + length + header[name]["data_offsets"][0], name, dtype, shape)
        for name, (dtype, shape) in found.items()
    }


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as text, such as "3 x 4"."""
    return " x ".join(map(str, shape)) or "one number"
