"""Memory through which two processes pass objects.

A pipe holds a few hundred KB. The sender of a larger object therefore waits until the receiver runs
and reads, several times for each object, and both copy the bytes in pieces. In shared memory each
side copies the bytes once, and does not wait for the other.

Invariant: one side stores an object, and tells the other its size. Until the other side has loaded
it, neither stores another one.
"""

import mmap
import os
import pickle
import tempfile
from typing import Any

# The buffer grows by multiples of this.
_STEP = 8 << 20


class SharedBuffer:
    """A file without a name, in memory where the system can do so, that two processes map."""

    def __init__(self, descriptor: int) -> None:
        """Use an open file, whose descriptor is closed by `close`."""
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._end = 0

    def store(self, value: object) -> int:
        """Replace the content by an object, and return its size in bytes.

        Raises:
            OSError: the system has not enough memory.
        """
        self._end = 0
        # With this protocol, pickle passes large arrays and bytes to `write` without a copy.
        pickle.Pickler(self, protocol=5).dump(value)
        return self._end

    def write(self, data: Any) -> None:
        """Append bytes. It is called by pickle only."""
        with memoryview(data).cast("B") as view:
            start = self._end
            self._end += len(view)
            self._get_map(self._end)[start : self._end] = view

    def load(self, size: int) -> Any:
        """Return a copy of the object that the other process has stored."""
        with memoryview(self._get_map(size)) as view, view[:size] as part:
            return pickle.loads(part)

    def close(self) -> None:
        """Release the memory. The other process keeps it until it closes the file as well."""
        if self._map is not None:
            self._map.close()
        os.close(self._descriptor)

    def _get_map(self, size: int) -> mmap.mmap:
        """Return a mapping of at least `size` bytes. The file grows if it is smaller."""
        if self._map is None or len(self._map) < size:
            length = -(-size // _STEP) * _STEP
            # The other process may have made it larger.
            if os.fstat(self._descriptor).st_size < length:
                os.ftruncate(self._descriptor, length)
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._descriptor, length)
        return self._map


def create_memory_file() -> int:
    """Return the descriptor of a new file without a name.

    It is in memory on Linux. Other systems have no such file, so a temporary file is used there.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("preprocess")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
