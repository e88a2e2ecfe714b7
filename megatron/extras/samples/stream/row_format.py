"""What a file format provides: the row groups of a file, and the rows of a group.

A file is divided into row groups, which can be read without what comes before them.

Invariant: what a format returns for a row depends on the file's bytes only.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.extras.samples.stream.remote import RemoteDataFile

FilePath = str | RemoteDataFile
"""A local path, or a remote file."""
Kind = Literal["text", "tokens"]
Row = str | NDArray[np.int64]
"""A text, or the token ids of a document [n]. A null, and a blank line, have no ids."""
NO_IDS: NDArray[np.int64] = np.empty(0, np.int64)
GROUP_ROWS = 1024
"""Approximate number of rows in a group, for formats without row groups."""


@dataclasses.dataclass(frozen=True)
class FileGroups:
    """The row groups of one file. All arrays have one element for each group."""

    kind: Kind
    begin: NDArray[np.int64]
    """Where the group begins: its number in Parquet, a record batch or a byte in Arrow, a byte in
    JSONL."""
    end: NDArray[np.int64]
    """Where the group ends, in the same unit."""
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    """Token ids of all rows of the group, or -1 if the file does not have it."""

    @classmethod
    def of(cls, kind: Kind, groups: Sequence[tuple[int, int, int, int]]) -> "FileGroups":
        """Return the groups of (begin, end, rows, tokens) for each group."""
        columns = np.array(groups, np.int64).reshape(-1, 4).T
        return cls(kind, *(np.ascontiguousarray(column) for column in columns))


class FileFormat(Protocol):
    """A file format."""

    suffixes: tuple[str, ...]

    def list_groups(self, path: FilePath, column: str) -> FileGroups:
        """Return the row groups of a file.

        Raises:
            DataError: the file is damaged, has no such column, or the column holds neither texts
                nor lists of integers.
        """
        ...

    def describe_columns(self, path: FilePath) -> dict[str, str]:
        """Return the type of each column as text, for messages.

        Raises:
            DataError: the file is damaged.
        """
        ...

    def read_rows(
        self, path: FilePath, column: str, begin: int, end: int, first_row: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one group from a row on, in lists of any length.

        Args:
            path: The file.
            column: The column with the texts or token ids.
            begin: Where the group begins, see `FileGroups`.
            end: Where the group ends.
            first_row: Number of rows of the group that are left out.

        Raises:
            DataError: the file is damaged.
        """
        ...
