"""The tensor file that one rank writes: its shards, and where each of them lies in the file.

`copy_to_host` makes the shards independent of the training, and `write_shard_file` writes them.
The result, `WrittenFile`, is what the other ranks must know of the file. Rank 0 makes the index and
the manifest of these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.digest import FileDigest
from megatron.checkpoint.host_buffer import HostBuffer
from megatron.checkpoint.tensor_file import name_dtype, write_tensors
from megatron.parallel.shard import TensorShard

ShardsByKey = Mapping[str, TensorShard]
"""Name in the file -> a shard that this rank owns, as `select_own_shards` returns it."""


@dataclass(frozen=True)
class StoredSlice:
    """A shard that was written to a file."""

    tensor: str
    """Kind and name of the tensor, such as `weight/blocks.3.mlp.up.weight`."""
    global_shape: tuple[int, ...]
    begin: int
    """The byte of the file at which the shard begins."""
    offset: tuple[int, ...]
    """Offset of the shard in the global tensor."""
    shape: tuple[int, ...]
    dtype: str
    """A key of `tensor_file.DTYPES`."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "StoredSlice":
        """Return the slice that `WrittenFile.to_json` described on another rank."""
        return cls(
            record["tensor"],
            tuple(record["global_shape"]),
            record["begin"],
            tuple(record["offset"]),
            tuple(record["shape"]),
            record["dtype"],
        )


@dataclass(frozen=True)
class WrittenFile:
    """The tensor file that one rank wrote and synced."""

    file: str
    """Its name in the folder of the checkpoint."""
    digest: FileDigest
    slices: tuple[StoredSlice, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the file as JSON, for the other ranks."""
        return asdict(self)

    def summarise(self) -> "WrittenFile":
        """Return what the other ranks need to verify the file: its name, size and digest.

        The digests of blocks and the list of slices are long. Only rank 0 needs them.
        """
        return WrittenFile(self.file, replace(self.digest, blocks=""), ())

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "WrittenFile":
        """Return the file that `to_json` described on another rank."""
        return cls(
            record["file"],
            FileDigest(**record["digest"]),
            tuple(StoredSlice.from_json(stored) for stored in record["slices"]),
        )


def select_own_shards(shards: Sequence[TensorShard]) -> dict[str, TensorShard]:
    """Return the shards that this rank stores, each under its name in the file.

    The name is such as `weight/blocks.3.mlp.up.weight@0,512`.
    """
    return {
        f"{shard.kind}/{shard.name}@{','.join(map(str, shard.offset))}": shard
        for shard in shards
        if shard.owner
    }


def record_event(shards: ShardsByKey) -> "torch.cuda.Event | None":
    """Return an event that completes after the work that the device has queued so far.

    None if no shard is on a device.
    """
    if not any(shard.tensor.is_cuda for shard in shards.values()):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def copy_to_host(
    tensors: dict[str, Tensor], buffer: HostBuffer, ready: "torch.cuda.Event | None"
) -> dict[str, Tensor]:
    """Copy tensors to a host buffer, which is kept for the next save.

    Args:
        tensors: Key -> a tensor on the host or the device.
        buffer: The buffer. Its contents are overwritten.
        ready: CUDA event that was recorded when the save started. None if no tensor is on a GPU.

    Raises:
        MemoryError: The host has not enough memory.
    """
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    # The current device of a new thread is GPU 0. Without this, pinned memory would create a CUDA
    # context on GPU 0 for every rank.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    copies = buffer.divide(tensors)
    if ready is None:
        for key, tensor in tensors.items():
            copies[key].copy_(tensor.detach())
        return copies
    # A separate stream overlaps the copy with the next forward and backward pass. It waits for
    # `ready`, because the optimizer's step before the save may still be running on the device.
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        for key, tensor in tensors.items():
            copies[key].copy_(tensor.detach(), non_blocking=True)
    # Without this, the file would be written from buffers that are not filled yet.
    stream.synchronize()
    return copies


def write_shard_file(
    folder: Path, rank: int, shards: ShardsByKey, tensors: dict[str, Tensor]
) -> WrittenFile:
    """Write the shards of a rank to its file, and sync it to the disk.

    Args:
        folder: The folder to write into.
        rank: This rank, which gives the file its name.
        shards: The shards, which give each tensor its place in the model.
        tensors: The same keys -> the values to write, which may be copies on the host.

    Raises:
        OSError: If the file cannot be written.
    """
    name = f"rank_{rank:05d}.safetensors"
    written = write_tensors(folder / name, tensors)
    slices = tuple(
        StoredSlice(
            f"{shard.kind}/{shard.name}",
            shard.global_shape,
            written.begins[key],
            shard.offset,
            tuple(shard.tensor.shape),
            name_dtype(tensors[key]),
        )
        for key, shard in shards.items()
    )
    return WrittenFile(name, written.digest, slices)
