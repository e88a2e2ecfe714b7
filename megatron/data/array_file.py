"""Arrays in .npy files: created under fresh names, opened memory-mapped, described strictly,
digested.

Invariant: nothing that stands in a file's place (a link, a pipe, an archive, a pickle) is followed,
waited for or executed.
"""

import hashlib
import io
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.data.background import BLOCK, Background

WHOLE_BYTES = 16 << 20
"""A larger array is checked by samples when it is opened: opening must not read gigabytes."""
SAMPLE_BYTES = 256 << 10
_SAMPLES = 64
_HEADER_BYTES = 4096


class MappedArray:
    """A read-only array of a .npy file, and the open file, so that what is mapped can be verified
    after a rename."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError, ValueError, EOFError: it cannot be read, or is not one plain array of format
            1.0 and nothing else.
        """
        self.path = path
        self.expected = ""
        """The digest of all bytes that the array was built with, as the manifest has it."""
        self._file: BinaryIO = open_regular(path)
        try:
            dtype, shape, self._begin = _read_header(self._file)
            self._size = dtype.itemsize * int(np.prod(shape, dtype=object))
            found = os.fstat(self._file.fileno()).st_size
            if found != self._begin + self._size:
                raise ValueError(
                    f"{path.name} has {found} bytes instead of {self._begin + self._size}"
                )
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
        """Return the digest of all bytes, read from the file at the pace of a background check, and
        close the file."""
        digest = xxhash.xxh3_128()
        with self._file:
            for block in background.read(self._file.fileno(), self._begin, self._size):
                digest.update(block)
        return digest.hexdigest()

    def close_file(self) -> None:
        """Close the file; the array stays mapped."""
        self._file.close()


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be read, or is no regular file; a pipe would be waited for without end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def create_array(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray:
    """Make a file that exists and is empty an array file; return the array, memory-mapped and
    writable.

    The space is taken from the disk now: written through a mapping, a full disk would end the
    process by a signal.

    Raises:
        OSError: there is not enough space.
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
        os.posix_fallocate(descriptor, 0, size)
        mapped = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return np.ndarray(shape, dtype, mapped, begin)


def sampled_digest(array: NDArray) -> str:
    """Return blake2b of the bytes; of 64 evenly spread blocks of them where they are many."""
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
    """Return xxh3_128 of all bytes, as `MappedArray.whole_digest`."""
    raw = array.reshape(-1).view(np.uint8)
    digest = xxhash.xxh3_128()
    for start in range(0, raw.size, BLOCK):
        digest.update(raw[start : start + BLOCK].data)
    return digest.hexdigest()


def _read_header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...], int]:
    """Return dtype, shape, and the byte at which the values begin."""
    head = io.BytesIO(file.read(_HEADER_BYTES) or b"")
    if not head.getvalue():
        raise EOFError("the file is empty")
    version = np.lib.format.read_magic(head)
    if version != (1, 0):
        raise ValueError(f"its format is {version}, not (1, 0)")
    try:
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(
            head, max_header_size=_HEADER_BYTES
        )
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    if dtype.hasobject or fortran or not all(length >= 0 for length in shape):
        raise ValueError(f"it holds {dtype}{list(shape)}, which is not a plain array")
    return dtype, shape, head.tell()
