"""The tensors in a folder of torch.distributed.checkpoint.

Each tensor is stored in one or several chunks. Invariant: nothing in the folder is run
(`unpickle.py`), and memory holds the tensors that are read.
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron.base.errors import CheckpointError
from megatron.base.outside_file import open_regular
from megatron.extras.interop.convert.unpickle import load_metadata, load_pickle_bytes

_WRONG_DESCRIPTION = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a description raises that has text in the place of a size, for example."""


class DistributedTensors:
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read the names and sizes of the tensors.

        Raises:
            CheckpointError: `.metadata` is missing or damaged, or contains what is not allowed.
        """
        metadata = load_metadata(folder / ".metadata")
        kinds = [getattr(metadata, part, None) for part in ("state_dict_metadata", "storage_data")]
        if not all(isinstance(kind, dict) for kind in kinds):
            raise CheckpointError(f"{folder / '.metadata'} does not describe a checkpoint")
        self._folder = folder
        self._storage = metadata.storage_data
        self._entries: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and isinstance(entry.size, torch.Size)
        }
        self.entries: frozenset[str] = frozenset(metadata.state_dict_metadata)
        """Names of all entries, those that are no tensors among them."""
        self.sizes: dict[str, torch.Size] = {
            name: entry.size for name, entry in self._entries.items()
        }
        """Name -> shape."""

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """Read a tensor, or one layer of a tensor that has all of them.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        try:
            return self._read(name, layer)
        except _WRONG_DESCRIPTION as error:
            raise CheckpointError(
                f"{self._folder / '.metadata'} does not describe {name} correctly "
                f"({type(error).__name__}: {error})"
            ) from error

    def _read(self, name: str, layer: int | None) -> Tensor:
        """Read a tensor. See `read`."""
        entry = self._entries[name]
        begins = [0] * len(entry.size)
        ends = list(entry.size)
        if layer is not None:
            begins[0] = layer
            ends[0] = layer + 1
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        tensor = torch.empty(sizes, dtype=entry.properties.dtype)
        if tensor.is_floating_point():
            # If chunks overlap, elements are missing although the count is right. The writer of
            # checkpoints refuses these numbers.
            tensor.fill_(math.nan)
        filled = 0
        for chunk in entry.chunks:
            inside = []
            outside = []
            for begin, end, offset, size in zip(
                begins, ends, chunk.offsets, chunk.sizes, strict=True
            ):
                low = max(begin, offset)
                high = max(low, min(end, offset + size))
                inside.append(slice(low - offset, high - offset))
                outside.append(slice(low - begin, high - begin))
            part = tensor[tuple(outside)]
            if part.numel() == 0:
                continue
            part.copy_(self._read_chunk(name, chunk.offsets).reshape(chunk.sizes)[tuple(inside)])
            filled += part.numel()
        if filled != tensor.numel():
            raise CheckpointError(f"{self._folder}: parts of {name} are missing")
        if layer is None:
            return tensor
        return tensor[0]

    def _read_chunk(self, name: str, offsets: torch.Size) -> Tensor:
        """Read one chunk of a tensor from its file.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        stored = self._storage.get(MetadataIndex(name, offsets))
        # A path with a folder in it could read files elsewhere.
        if stored is None or Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(f"{self._folder / '.metadata'} does not give the file of {name}")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f"{self._folder}: {name} is compressed, which is not supported")
        path = self._folder / stored.relative_path
        try:
            with open_regular(path) as file:
                file.seek(stored.offset)
                data = file.read(stored.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        found = load_pickle_bytes(path, data)
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{path} has no tensor for {name}")
        return found
