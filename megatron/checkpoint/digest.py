"""Digests of files.

A file has one digest of all its bytes, which `xxh128sum` prints as well. It also has one digest of
each block, so that a part of the file can be checked alone.

xxHash (https://xxhash.com) detects flipped bits and truncation at the speed of memory. It is no
protection against an attacker. None is needed, because nothing in a checkpoint can run code.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron.base.outside_file import open_regular

BLOCK = 4 << 20
"""Size of a block in bytes. A rank that needs a part of a tensor reads the blocks that hold it."""
_HEX = 16
"""Hexadecimal digits of a block's digest."""


@dataclass(frozen=True)
class FileDigest:
    """Size and digests that a file must have."""

    bytes: int
    xxh128: str
    blocks: str
    """The xxh3_64 of each block, 16 hexadecimal digits each, joined."""

    def block(self, number: int) -> str:
        """Return the digest of one block, or an empty text after the end of the file."""
        return self.blocks[_HEX * number : _HEX * (number + 1)]


class Digester:
    """Computes the digests of a file from its bytes, which are given in order."""

    def __init__(self) -> None:
        """Create the digester of an empty file."""
        self._file = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._bytes = 0
        self._in_block = 0
        self._blocks: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes. Their number need not be that of a block."""
        # As bytes, whatever the type of the elements was, so that `len` is the number of bytes.
        view = memoryview(data).cast("B")
        self._file.update(view)
        self._bytes += len(view)
        while len(view) > 0:
            part = view[: BLOCK - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()
        self._in_block = 0

    def digest(self) -> FileDigest:
        """Return the digests of all bytes so far. No other method may be called after it."""
        # The last block is usually shorter than BLOCK.
        if self._in_block:
            self._end_block()
        return FileDigest(self._bytes, self._file.hexdigest(), "".join(self._blocks))


def digest_of_block(data: bytes | memoryview) -> str:
    """Return the digest of a block, as it is in `FileDigest.blocks`."""
    return str(xxhash.xxh3_64_hexdigest(data))


def digest_of_text(text: str) -> str:
    """Return `FileDigest.xxh128` of a file that holds the text in UTF-8."""
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def digest_of_file(path: Path, *, from_disk: bool = False) -> FileDigest:
    """Read a file completely, and return its digests.

    Args:
        path: The file.
        from_disk: Drop its pages from the page cache first, so that the bytes come from the disk. A
            file that was just written would otherwise be compared with the copy in memory. The
            kernel keeps pages that are not written yet, so the file must have been synced.

    Raises:
        OSError: If it cannot be read.
    """
    digester = Digester()
    with open_regular(path) as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while data := file.read(BLOCK):
            digester.update(data)
    return digester.digest()
