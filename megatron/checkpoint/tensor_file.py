"""Boxes of global tensors in safetensors files: written tensor by tensor, read and checked block by block.

The format is safetensors' (8 bytes of header length, a JSON header, the buffers; https://huggingface.co/docs/safetensors). The
library's writer would hold a second copy of everything that it writes, and its reader cannot check what it reads against a digest
without reading it all: so both are ours. Neither holds more than some blocks beside the tensors.
"""

import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.digest import BLOCK, Digester, FileDigest, digest_of_block
from megatron.errors import CheckpointError, DamagedError

_ITEM = 4  # bytes of an fp32
_KEPT_BLOCKS = 8
_SLICE = 512 << 10
TensorSlice = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) in a global tensor."""


@dataclass(frozen=True)
class WrittenTensors:
    """A finished file."""

    digest: FileDigest
    begins: dict[str, int]
    """Where each tensor's bytes begin in the file."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenTensors:
    """Write fp32 tensors of any device to a new file and fsync it. OSError where the disk refuses."""
    header: dict[str, Any] = {}
    position = 0
    for key, tensor in tensors.items():
        assert tensor.dtype == torch.float32, f"{key} is {tensor.dtype}"
        size = _ITEM * tensor.numel()
        header[key] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # buffers begin aligned
    start = 8 + len(text)
    digester = Digester()
    with open(path, "xb", buffering=0) as file:

        def write(data: bytes | memoryview) -> None:
            digester.update(data)
            view = memoryview(data)
            while len(view) > 0:  # a full disk takes a part of it first
                view = view[file.write(view) :]

        write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for part in _read_bytes(tensor):
                write(part)
        os.fsync(file.fileno())
    return WrittenTensors(
        digester.digest(), {key: start + entry["data_offsets"][0] for key, entry in header.items()}
    )


def _read_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """In slices that stay in a core's cache while they are digested, twice, and written: the memory is read once."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    for part in flat.split(_SLICE // _ITEM):
        if part.numel():
            yield memoryview(part.view(torch.uint8).numpy())  # no copy


def intersect(a: TensorSlice, b: TensorSlice) -> TensorSlice | None:
    """The box that two boxes share, or None."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    shape = tuple(h - w for w, h in zip(low, high, strict=True))
    return (low, shape) if all(n > 0 for n in shape) else None


def compute_slices(part: TensorSlice, of: TensorSlice) -> tuple[slice, ...]:
    """Index `part` inside a tensor that holds `of`."""
    return tuple(slice(p - o, p - o + n) for p, n, o in zip(part[0], part[1], of[0], strict=True))


class TensorReader:
    """Reads boxes out of the files of one checkpoint, and believes no byte whose block does not have its digest."""

    def __init__(self, folder: Path, digests: Mapping[str, FileDigest]) -> None:
        self._folder, self._digests = folder, digests
        self._descriptors: dict[str, int] = {}
        self._blocks: OrderedDict[tuple[str, int], bytearray] = OrderedDict()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._blocks.clear()

    def read_into(
        self, target: Tensor, box: TensorSlice, stored: Sequence[Mapping[str, Any]], what: str
    ) -> None:
        """Fill `target`, which is the box `box` of a global tensor, from the stored boxes that overlap it.

        Raises:
            DamagedError: a file is missing, cut off or altered, or the stored boxes do not cover the target.
            CheckpointError: a file cannot be read.
        """
        covered = 0
        for entry in stored:
            source: TensorSlice = (tuple(entry["offset"]), tuple(entry["shape"]))
            part = intersect(box, source)
            if part is None:
                continue
            into, wanted = target[compute_slices(part, box)], compute_slices(part, source)
            if (
                part[1][1:] == source[1][1:] and into.is_contiguous()
            ):  # whole rows: one run of bytes, here and there
                first = wanted[0].start * math.prod(source[1][1:])
                self._read_run(into.view(-1), entry["file"], entry["begin"] + _ITEM * first)
            else:
                for begin, shape, inner, outer in _iterate_runs(source[1], wanted):
                    run = torch.empty(math.prod(shape))
                    self._read_run(run, entry["file"], entry["begin"] + _ITEM * begin)
                    into[outer].copy_(run.view(shape)[inner])
            covered += math.prod(part[1])
        if covered != target.numel():
            raise DamagedError(
                f"of {what} {target.numel()} elements are needed and {covered} are stored",
                "index.json",
            )

    def _read_run(self, target: Tensor, file: str, begin: int) -> None:
        """Fill a flat tensor with the values from byte `begin` on. No value lies in two blocks: all sizes are multiples of 8."""
        end, at = begin + _ITEM * target.numel(), 0
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            low, high = max(begin - number * BLOCK, 0), min(end - number * BLOCK, BLOCK)
            values = torch.frombuffer(self._read_block(file, number)[low:high], dtype=torch.float32)
            target[at : at + len(values)].copy_(values)
            at += len(values)

    def _read_block(self, file: str, number: int) -> memoryview:
        key = file, number
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return memoryview(self._blocks[key])
        path, digest = self._folder / file, self._digests[file]
        size = min(BLOCK, digest.bytes - number * BLOCK)
        buffer = (
            self._blocks.popitem(last=False)[1]
            if len(self._blocks) >= _KEPT_BLOCKS
            else bytearray(BLOCK)
        )
        view = memoryview(buffer)[: max(size, 0)]
        try:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(path, os.O_RDONLY)
            got = _read_at(self._descriptors[file], view, number * BLOCK)
        except FileNotFoundError as missing:
            raise DamagedError(f"{file} is missing", file) from missing
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}; mend the file system, or load from another one"
            ) from error
        if got != size or size <= 0:
            raise DamagedError(
                f"{file} is cut off: it ends in the {size} bytes at {number * BLOCK}", file
            )
        if digest_of_block(view) != digest.block(number):
            raise DamagedError(
                f"{file} is not what was written: the {size} bytes at {number * BLOCK} differ", file
            )
        self._blocks[key] = buffer
        return view


def _read_at(descriptor: int, view: memoryview, position: int) -> int:
    """Fill the view, or as much of it as the file has; returns how much."""
    got = 0
    while got < len(view):
        count = os.preadv(descriptor, [view[got:]], position + got)
        if count == 0:
            break
        got += count
    return got


def _iterate_runs(
    shape: tuple[int, ...], part: tuple[slice, ...], begin: int = 0
) -> Iterator[tuple[int, tuple[int, ...], tuple[slice | int, ...], tuple[slice | int, ...]]]:
    """Walk `part` of a stored tensor in runs of at most a block, or a single row of the last dimension where that is larger.

    Yields (first element of the run in the stored tensor, the run's shape, `part` in the run, the run in `part`).
    """
    if not shape:
        yield 0, (), (), ()
        return
    row, rows = math.prod(shape[1:]), part[0]
    if row * _ITEM > BLOCK and len(shape) > 1:
        for index in range(rows.start, rows.stop):
            for at, run, inner, outer in _iterate_runs(shape[1:], part[1:], begin + index * row):
                yield at, run, inner, (index - rows.start, *outer)
        return
    step = max(1, BLOCK // (_ITEM * row))
    for low in range(rows.start, rows.stop, step):
        high = min(rows.stop, low + step)
        outer = (slice(low - rows.start, high - rows.start), *(slice(None) for _ in part[1:]))
        yield begin + low * row, (high - low, *shape[1:]), (slice(None), *part[1:]), outer
