"""Digests of files: one of the whole, which `xxh128sum` prints too, and one of each block, so that a part can be checked alone.

xxHash (https://xxhash.com) finds decay and cuts at memory speed. It is no defence against an attacker, and none is needed: nothing
in a checkpoint can run code.
"""

from dataclasses import dataclass
from pathlib import Path

import xxhash

BLOCK = 4 << 20
"""Bytes of a block. A rank that needs a part of a tensor reads the blocks that it lies in."""
_HEX = 16


@dataclass(frozen=True)
class FileDigest:
    """What a file must be."""

    bytes: int
    xxh128: str
    blocks: str
    """xxh3_64 of each block, 16 hexadecimal digits each, joined."""

    def block(self, number: int) -> str:
        """The digest of one block; empty behind the end."""
        return self.blocks[_HEX * number : _HEX * (number + 1)]


class Digester:
    """Takes a file's bytes in order."""

    def __init__(self) -> None:
        self._whole, self._block = xxhash.xxh3_128(), xxhash.xxh3_64()
        self._bytes, self._in_block = 0, 0
        self._blocks: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes, any number of them."""
        view = memoryview(data).cast("B")
        self._whole.update(view)
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
        """Of everything so far; the last call."""
        if self._in_block:
            self._end_block()
        return FileDigest(self._bytes, self._whole.hexdigest(), "".join(self._blocks))


def digest_of_block(data: bytes | memoryview) -> str:
    """As in `FileDigest.blocks`."""
    return str(xxhash.xxh3_64_hexdigest(data))


def digest_of_text(text: str) -> str:
    """As `FileDigest.xxh128` of a file that holds the text."""
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def digest_of_file(path: Path) -> FileDigest:
    """Reads all of it. OSError where it cannot be read."""
    digester = Digester()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(BLOCK):
            digester.update(data)
    return digester.digest()
