"""Slices of global tensors in safetensors files.

The format is that of safetensors: 8 bytes of header length, a JSON header, and the buffers
(https://huggingface.co/docs/safetensors). Writer and reader are our own. The library's writer would
hold a second copy of everything that it writes. Its reader cannot check a part of a file against a
digest.

Invariants: in addition to the tensors, only a few blocks are in memory. No value is returned unless
its block has the digest that the index gives.
"""

import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, DamagedError
from megatron.base.outside_file import open_regular
from megatron.checkpoint.digest import BLOCK, Digester, FileDigest, digest_of_block

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
"""Name in a file's header and in the index -> dtype. Weights are always F32."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST = 4
"""Bytes of an fp32 value."""
_KEPT_BLOCKS = 8
"""Number of blocks that a reader caches. Neighbouring slices of a file often share a block."""
_SLICE = 512 << 10
"""Bytes that are written at a time. They fit into the cache of a core."""
TensorSlice = tuple[tuple[int, ...], tuple[int, ...]]
"""(Offset, shape) in a global tensor."""


@dataclass(frozen=True)
class WrittenTensors:
    """A file that was written and synced."""

    digest: FileDigest
    begins: dict[str, int]
    """Name -> the byte of the file at which the tensor begins."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenTensors:
    """Write fp32 and bf16 tensors of any device to a new file, and sync it to the disk.

    Args:
        path: The file. It must not exist.
        tensors: Name in the file -> tensor.

    Raises:
        OSError: If the file cannot be written.
    """
    header: dict[str, Any] = {}
    position = 0
    # The larger values come first. Behind an odd number of bf16 values, no fp32 value is aligned.
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].itemsize)
    for key, tensor in ordered:
        header[key] = {
            "dtype": name_dtype(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header).encode()
    # With this padding, each value is aligned, and none lies in two blocks. See `_read_run`.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    digester = Digester()
    with open(path, "xb", buffering=0) as file:

        def write(data: bytes | memoryview) -> None:
            digester.update(data)
            view = memoryview(data)
            # An unbuffered write may take a part only, for example when the disk becomes full. The
            # next write then raises.
            while len(view) > 0:
                view = view[file.write(view) :]

        write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for part in _read_bytes(tensor):
                write(part)
        os.fsync(file.fileno())
    return WrittenTensors(
        digester.digest(), {key: start + entry["data_offsets"][0] for key, entry in header.items()}
    )


def name_dtype(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, a key of `DTYPES`."""
    assert tensor.dtype in _NAMES, f"checkpoints have no {tensor.dtype}"
    return _NAMES[tensor.dtype]


def find_dtype(tensor: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor of the index. Before format 4, all of them are fp32.

    Raises:
        DamagedError: The index has another name.
    """
    name = tensor.get("dtype", "F32")
    if name not in DTYPES:
        raise DamagedError(f"index.json has a tensor of the unknown dtype {name!a}", "index.json")
    return DTYPES[name]


def count_bytes(tensor: Mapping[str, Any]) -> int:
    """Return the bytes of a tensor of the index, or those of a stored slice with its dtype.

    Raises:
        DamagedError: See `find_dtype`.
    """
    return find_dtype(tensor).itemsize * math.prod(tensor["shape"])


def _read_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in small pieces.

    A piece is digested twice, for its block and for the file, and then written. It stays in the
    cache of the core meanwhile, so that main memory is read only once.
    """
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    for part in flat.split(_SLICE // flat.itemsize):
        # `view` and `numpy` share the tensor's memory, so nothing is copied here.
        if part.numel():
            yield memoryview(part.view(torch.uint8).numpy())


def intersect(a: TensorSlice, b: TensorSlice) -> TensorSlice | None:
    """Return the slice that two slices of one tensor share, or None if they do not overlap."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    shape = tuple(h - w for w, h in zip(low, high, strict=True))
    if all(n > 0 for n in shape):
        return (low, shape)
    return None


def compute_slices(part: TensorSlice, of: TensorSlice) -> tuple[slice, ...]:
    """Return the index of `part` in a tensor that holds the slice `of`."""
    return tuple(slice(p - o, p - o + n) for p, n, o in zip(part[0], part[1], of[0], strict=True))


class TensorReader:
    """Reads slices of tensors from the files of one checkpoint, and checks each block's digest."""

    def __init__(self, folder: Path, digests: Mapping[str, FileDigest]) -> None:
        """Create a reader without open files.

        Args:
            folder: Folder of the checkpoint.
            digests: File -> its digest.
        """
        self._folder = folder
        self._digests = digests
        self._opened: dict[str, BinaryIO] = {}
        self._blocks: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        """(File, number of the block) -> its bytes. The least recently used block is first."""

    def __enter__(self) -> "TensorReader":
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all files and discard the cached blocks."""
        for file in self._opened.values():
            file.close()
        self._opened.clear()
        self._blocks.clear()

    def read_into(
        self, target: Tensor, needed: TensorSlice, stored: Mapping[str, Any], what: str
    ) -> None:
        """Fill a slice of a global tensor from the stored slices that overlap it.

        Args:
            target: Tensor to fill, of any device. If it has another dtype than the stored tensor,
                the values are converted.
            needed: The slice of the global tensor that `target` holds.
            stored: The tensor in the index.
            what: Name of the tensor, for messages.

        Raises:
            DamagedError: If a file is missing, cut off or altered, or the stored slices do not
                cover `target`.
            CheckpointError: If a file cannot be read.
        """
        # Stored slices are disjoint, so comparing the sum of the overlaps shows whether any element
        # is missing.
        covered = 0
        dtype = find_dtype(stored)
        for entry in stored["boxes"]:
            source: TensorSlice = (tuple(entry["offset"]), tuple(entry["shape"]))
            part = intersect(needed, source)
            if part is None:
                continue
            into = target[compute_slices(part, needed)]
            wanted = compute_slices(part, source)
            # If complete rows are needed, they are one run of bytes in the file and in memory. The
            # bytes then go into `target` without an intermediate tensor.
            if part[1][1:] == source[1][1:] and into.is_contiguous():
                first = wanted[0].start * math.prod(source[1][1:])
                begin = entry["begin"] + dtype.itemsize * first
                self._read_run(into.view(-1), dtype, entry["file"], begin)
            else:
                for element, shape, inner, outer in iterate_runs(source[1], wanted):
                    run = torch.empty(math.prod(shape), dtype=dtype)
                    begin = entry["begin"] + dtype.itemsize * element
                    self._read_run(run, dtype, entry["file"], begin)
                    into[outer].copy_(run.view(shape)[inner])
            covered += math.prod(part[1])
        if covered != target.numel():
            raise DamagedError(
                f"{target.numel()} elements of {what} are needed and {covered} are stored",
                "index.json",
            )

    def _read_run(self, target: Tensor, dtype: torch.dtype, file: str, begin: int) -> None:
        """Fill a flat tensor with the values of a dtype from byte `begin` of the file on.

        Each value begins at a multiple of its size, and so does each block. So no value lies in two
        blocks.
        """
        end = begin + dtype.itemsize * target.numel()
        at = 0
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            low = max(begin - number * BLOCK, 0)
            high = min(end - number * BLOCK, BLOCK)
            values = torch.frombuffer(self._read_block(file, number)[low:high], dtype=dtype)
            target[at : at + len(values)].copy_(values)
            at += len(values)

    def _read_block(self, file: str, number: int) -> memoryview:
        """Return a block of a file, after comparing it with its digest.

        The view is valid until its buffer is used for another block.
        """
        key = file, number
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return memoryview(self._blocks[key])
        path = self._folder / file
        digest = self._digests[file]
        size = min(BLOCK, digest.bytes - number * BLOCK)
        # The buffer of the oldest block is used again. A new allocation of 4 MiB for each block
        # would have to be cleared each time.
        if len(self._blocks) >= _KEPT_BLOCKS:
            buffer = self._blocks.popitem(last=False)[1]
        else:
            buffer = bytearray(BLOCK)
        view = memoryview(buffer)[: max(size, 0)]
        try:
            if file not in self._opened:
                self._opened[file] = open_regular(path)
            got = _read_at(self._opened[file].fileno(), view, number * BLOCK)
        except FileNotFoundError as missing:
            raise DamagedError(f"{file} is missing", file) from missing
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}; fix the file system, or load from another one"
            ) from error
        if got != size or size <= 0:
            needed = number * BLOCK + max(size, 1)
            raise DamagedError(f"{file} is cut off: it has fewer than {needed} bytes", file)
        if digest_of_block(view) != digest.block(number):
            raise DamagedError(
                f"{file} is not what was written: the {size} bytes at {number * BLOCK} differ", file
            )
        # Only now, so that a block with a wrong digest is never served from the cache.
        self._blocks[key] = buffer
        return view


def _read_at(descriptor: int, view: memoryview, position: int) -> int:
    """Fill the view, or as much of it as the file has. Return the number of bytes."""
    got = 0
    # A read may return less than asked for before the end of the file.
    while got < len(view):
        count = os.preadv(descriptor, [view[got:]], position + got)
        if count == 0:
            break
        got += count
    return got


def iterate_runs(
    shape: tuple[int, ...], part: tuple[slice, ...], begin: int = 0
) -> Iterator[tuple[int, tuple[int, ...], tuple[slice | int, ...], tuple[slice | int, ...]]]:
    """Walk over a part of a stored slice in runs of consecutive elements.

    A run has at most the size of a block, or is one row of the last dimension if that is larger.
    This limits the memory of a run. The sizes are those of fp32, the largest values.

    Args:
        shape: Shape of the stored slice.
        part: The part that is needed, as an index into the stored slice.
        begin: First element of the stored slice, used in the recursion.

    Yields:
        Tuples of four values. The first element of the run in the stored slice. The shape of the
        run. The index of the needed part in the run. The index of the run in the needed part.
    """
    if not shape:
        yield 0, (), (), ()
        return
    row = math.prod(shape[1:])
    rows = part[0]
    # One row does not fit into a block, so each row is divided along the next dimension.
    if row * _LARGEST > BLOCK and len(shape) > 1:
        for index in range(rows.start, rows.stop):
            for at, run, inner, outer in iterate_runs(shape[1:], part[1:], begin + index * row):
                yield at, run, inner, (index - rows.start, *outer)
        return
    step = max(1, BLOCK // (_LARGEST * row))
    for low in range(rows.start, rows.stop, step):
        high = min(rows.stop, low + step)
        outer = (slice(low - rows.start, high - rows.start), *(slice(None) for _ in part[1:]))
        yield begin + low * row, (high - low, *shape[1:]), (slice(None), *part[1:]), outer
