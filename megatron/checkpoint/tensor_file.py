"""Boxes of global tensors in safetensors files: written tensor by tensor, read slice by slice.

The format is safetensors' (8 bytes of header length, a JSON header, the buffers; https://huggingface.co/docs/safetensors), and so
is the reader. The writer is ours because the library's holds a second copy of everything it writes; this one needs one tensor's.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import CheckpointError

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) in a global tensor."""


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> int:
    """Write and fsync; returns the file's size in bytes. OSError where the disk refuses."""
    header: dict[str, Any] = {}
    position = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # buffers begin aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if tensor.numel():
                flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
                file.write(flat.numpy().data)  # no copy
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + position


def intersect(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, or None."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    shape = tuple(h - w for w, h in zip(low, high, strict=True))
    return (low, shape) if all(n > 0 for n in shape) else None


def slices(part: Box, of: Box) -> tuple[slice, ...]:
    """Index `part` inside a tensor that holds `of`."""
    return tuple(slice(p - o, p - o + n) for p, n, o in zip(part[0], part[1], of[0], strict=True))


class TensorReader:
    """Reads boxes out of the files of one checkpoint; keeps files open (mapped, not read) until closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def read_into(self, target: Tensor, box: Box, stored: Sequence[dict[str, Any]], what: str) -> None:
        """Fill `target`, which is the box `box` of a global tensor, from the stored boxes that overlap it.

        Raises:
            CheckpointError: a file is missing or damaged, or the stored boxes do not cover the target.
        """
        covered = 0
        for entry in stored:
            source: Box = (tuple(entry["offset"]), tuple(entry["shape"]))
            part = intersect(box, source)
            if part is None:
                continue
            values = self._slice(entry["file"], entry["key"], slices(part, source), what)
            target[slices(part, box)].copy_(values)
            covered += math.prod(part[1])
        if covered != target.numel():
            raise CheckpointError(f"{self._folder}: of {what} {target.numel()} elements are needed and {covered} are stored")

    def _slice(self, file: str, key: str, index: tuple[slice, ...], what: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            if file not in self._open:
                self._open[file] = safe_open(self._folder / file, framework="pt", device="cpu")
            return self._open[file].get_slice(key)[index]
        except (OSError, SafetensorError) as damage:
            raise CheckpointError(f"{self._folder / file}: cannot read {what}: {damage}") from damage
