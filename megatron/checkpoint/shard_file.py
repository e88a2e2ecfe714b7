"""The tensor file that one rank writes: its shards, and where each of them lies in the file.

`copy_to_host` makes the shards independent of the training, and `write_shard_file` writes them.
The result, `WrittenFile`, is what the other ranks must know of the file. Rank 0 makes the index and
the manifest of these.

A `HostBuffer` is the host memory of an asynchronous save: one buffer for all shards of a rank. A
GPU copies to pinned memory without making the host wait. torch's allocator of pinned memory rounds
each size up to a power of two
(https://docs.pytorch.org/docs/main/generated/torch.cuda.memory.host_memory_stats.html). It would do
so for each shard, and also for one buffer of their sum. So this buffer is ordinary memory that is
pinned afterwards (`cudaHostRegister`).
"""

import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.host_limits import read_available_memory
from megatron.base.plain_text import format_bytes
from megatron.checkpoint.digest import FileDigest
from megatron.checkpoint.tensor_file import name_dtype, write_tensors
from megatron.parallel.shard import TensorShard

_ALIGNMENT = 64
"""Each shard begins at a multiple of this many bytes, which is a line of the CPU's cache."""
_REGISTER_DEFAULT = 0
"""cudaHostRegisterDefault. All CUDA contexts of the process see that the memory is pinned."""


class HostBuffer:
    """Memory for the copies of a rank's shards, which is kept from save to save.

    Only one save may use it at a time.
    """

    def __init__(self) -> None:
        """Create a buffer without memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostBuffer] | None = None
        """Unpins the memory. None if it is not pinned."""
        self.refusal: str | None = None
        """Why memory that a GPU copies to could not be pinned. Such copies make the host wait."""

    def divide(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a part of the buffer for each tensor, with its shape and dtype.

        The parts are valid until the next call. The buffer becomes larger if it is too small.

        Args:
            tensors: Key -> a tensor of any device. If one is on a GPU, new memory is pinned.

        Raises:
            MemoryError: The host has not enough memory.
        """
        needed = sum(_align(tensor.nbytes) for tensor in tensors.values())
        if needed > self._memory.numel():
            self._free()
            self._memory = _allocate(needed)
            if any(tensor.is_cuda for tensor in tensors.values()):
                self._pin()
        parts = {}
        begin = 0
        for key, tensor in tensors.items():
            part = self._memory[begin : begin + tensor.nbytes]
            parts[key] = part.view(tensor.dtype).view(tensor.shape)
            begin += _align(tensor.nbytes)
        return parts

    def _free(self) -> None:
        """Give the memory back, so that old and new memory are never held at the same time."""
        # Memory that is freed while it is pinned stays in use.
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        """Pin the memory, or note why that fails. Copies to memory that is not pinned work too."""
        # The driver holds a lock while it pins, and the kernels of the training wait for that lock.
        # Pinning takes less time if the pages have physical memory already.
        self._memory[:: mmap.PAGESIZE] = 0
        address = self._memory.data_ptr()
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(address, self._memory.numel(), _REGISTER_DEFAULT)
        if int(code) != 0:
            # CUDA keeps the error for this thread, and raises it when the thread next starts a
            # kernel. The copies that follow start none, and the thread ends after them.
            self.refusal = str(cudart.cudaGetErrorString(code))
            return
        self.refusal = None
        # A process may run several trainings, as tests do. Their savers are not closed.
        self._unpin = weakref.finalize(self, _unregister, address)
        # The end of the process unpins all memory. A call at that time may fail and hide the error
        # that has ended the run.
        self._unpin.atexit = False


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _allocate(size: int) -> Tensor:
    """Return uint8[size] on memory pages of its own."""
    # Linux allocates more memory than the host has, and ends the run when the pages are written.
    # Each rank checks its own part only, and a limit of the job's cgroup is not seen.
    available = read_available_memory()
    if available is not None and size > available:
        raise MemoryError(
            f"{format_bytes(size)} for the copy of the shards, and the host has "
            f"{format_bytes(available)} left; leave out --async-save, or use more hosts"
        )
    try:
        # Without these flags, Python asks for memory that child processes share.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{format_bytes(size)} for the copy of the shards: {error}") from error
    # A child process must not share these pages. A write to a shared page may move it, and the GPU
    # would go on to write to the old place.
    if hasattr(mmap, "MADV_DONTFORK"):
        # Only Linux has it. The trainer uses GPUs on Linux only.
        pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unregister(address: int) -> None:
    """Unpin memory.

    Raises:
        RuntimeError: CUDA refuses it, after an error of the GPU.
    """
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostUnregister(address)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostUnregister failed: {cudart.cudaGetErrorString(code)}")


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
