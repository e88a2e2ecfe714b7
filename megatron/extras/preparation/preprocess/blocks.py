"""Blocks of complete records and their positions, which the readers of all formats yield."""

from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Position:
    """The place at which the next block begins.

    Attributes:
        file: Number of the input file.
        offset: Offset in this file, in bytes of the decompressed text or in rows of a table.
        line: Number of lines, rows or records before this place.
    """

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class PlainText:
    """The content of a file that is one document."""

    content: bytes


@dataclass(frozen=True)
class InputBlock:
    """Complete lines or rows of one file.

    Attributes:
        path: The file.
        first_line: Number of the first line, from 1.
        content: JSON records as bytes, one per line. Or rows as a pyarrow RecordBatch. Or a
            `PlainText`.
        end: Where the next block begins.
        disk_bytes: How far into the file on disk the block reaches.
    """

    path: str
    first_line: int
    content: Any
    end: Position
    disk_bytes: int

    @property
    def lines(self) -> int:
        """Number of lines or rows."""
        return self.end.line - self.first_line + 1
