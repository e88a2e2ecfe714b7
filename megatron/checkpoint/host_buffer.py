"""Host memory of an asynchronous save: one buffer for all shards of a rank.

A GPU copies to pinned memory without making the host wait. torch's allocator of pinned memory
rounds each size up to a power of two
(https://docs.pytorch.org/docs/main/generated/torch.cuda.memory.host_memory_stats.html). It would do
so for each shard, and also for one buffer of their sum. So this buffer is ordinary memory that is
pinned afterwards (`cudaHostRegister`).
"""

import mmap
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.base.host_limits import read_available_memory
from megatron.base.plain_text import format_bytes

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
