"""Arrays in .npy files: created under new names, opened memory-mapped, checked and digested.

Invariant: something else may have the file's name, such as a pipe, an archive or a pickle. Opening
it is then an error. The process does not wait for the file, and executes nothing from it. Links are
followed when a file is read, since the files of a cache may be links. They are never followed when
one is written.
"""

import hashlib
import io
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.base.outside_file import open_regular
from megatron.data.background import BLOCK, Background

WHOLE_BYTES = 16 << 20
"""A larger array is checked by samples when it is opened, which must not read gigabytes."""
SAMPLE_BYTES = 256 << 10
"""Bytes of each sample."""
_SAMPLES = 64
# NumPy writes headers of 128 bytes for plain arrays. A longer one is no header of ours.
_HEADER_BYTES = 4096


class MappedArray:
    """A read-only array of a .npy file, and the open file.

    The open file lets a background check read the same bytes after another process has replaced the
    file.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError, ValueError, EOFError: it cannot be read, or is not exactly one plain array of
                format 1.0.
        """
        self.path = path
        self.expected = ""
        """The digest of all bytes that were built, as the manifest has it."""
        self._file: BinaryIO = open_regular(path)
        try:
            dtype, shape, self._begin = _read_header(self._file)
            # Python integers cannot overflow, whatever shape a damaged header has.
            self._size = dtype.itemsize * int(np.prod(shape, dtype=object))
            found = os.fstat(self._file.fileno()).st_size
            # Reading past the end of a mapped file would end the process with SIGBUS.
            if found != self._begin + self._size:
                raise ValueError(
                    f"{path.name} has {found} bytes instead of {self._begin + self._size}"
                )
            # Read-only, so that no code of this process can change an index by mistake.
            mapped = mmap.mmap(self._file.fileno(), found, access=mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise
        self.array: NDArray = np.ndarray(shape, dtype, mapped, self._begin)

    @property
    def is_sampled(self) -> bool:
        """Whether `sampled_digest` leaves bytes out."""
        return self._size > WHOLE_BYTES

    def whole_digest(self, background: Background) -> str:
        """Return the digest of all bytes, and close the file.

        The file is read at the pace of a background check.
        """
        digest = xxhash.xxh3_128()
        with self._file:
            for block in background.read(self._file.fileno(), self._begin, self._size):
                digest.update(block)
        return digest.hexdigest()

    def close_file(self) -> None:
        """Close the file. The array stays mapped."""
        self._file.close()


def create_array(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray:
    """Turn an empty file that exists into an array file.

    Returns:
        The array, memory-mapped and writable.

    Raises:
        OSError: the disk has not enough space.
    """
    header = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(header, described)
    begin = len(header.getvalue())
    size = begin + np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(descriptor, header.getvalue())
        # Allocate the space now. SIGBUS ends a process that writes a mapping to a full disk.
        os.posix_fallocate(descriptor, 0, size)
        mapped = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return np.ndarray(shape, dtype, mapped, begin)


def sampled_digest(array: NDArray) -> str:
    """Return blake2b of the bytes of an array, or of 64 blocks of a large one.

    The blocks are spread evenly from the first byte to the last.
    """
    raw = array.reshape(-1).view(np.uint8)
    digest = hashlib.blake2b(digest_size=16)
    if raw.size <= WHOLE_BYTES:
        digest.update(raw.data)
    else:
        for place in range(_SAMPLES):
            start = (raw.size - SAMPLE_BYTES) * place // (_SAMPLES - 1)
            digest.update(raw[start : start + SAMPLE_BYTES].data)
    return digest.hexdigest()


def whole_digest(array: NDArray) -> str:
    """Return xxh3_128 of all bytes, as `MappedArray.whole_digest` does."""
    raw = array.reshape(-1).view(np.uint8)
    digest = xxhash.xxh3_128()
    for start in range(0, raw.size, BLOCK):
        digest.update(raw[start : start + BLOCK].data)
    return digest.hexdigest()


def _read_header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...], int]:
    """Return the dtype, the shape, and the byte at which the values begin."""
    head = io.BytesIO(file.read(_HEADER_BYTES) or b"")
    if not head.getvalue():
        raise EOFError("the file is empty")
    version = np.lib.format.read_magic(head)
    if version != (1, 0):
        raise ValueError(f"its format is {version}, not (1, 0)")
    # NumPy evaluates the header as a Python literal. Damaged text can exhaust the parser.
    try:
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(
            head, max_header_size=_HEADER_BYTES
        )
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    # Values of object arrays are pickles, which must not be loaded. We never write Fortran order.
    if dtype.hasobject or fortran or not all(length >= 0 for length in shape):
        raise ValueError(f"it holds {dtype}{list(shape)}, which is not a plain array")
    return dtype, shape, head.tell()
