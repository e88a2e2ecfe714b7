"""JSONL files as rows. A group has 1024 lines."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.outside_file import open_regular, parse_json
from megatron.extras.samples.stream.remote import RemoteDataFile
from megatron.extras.samples.stream.row_format import (
    GROUP_ROWS,
    NO_IDS,
    FileGroups,
    FilePath,
    Kind,
    Row,
)

_SCAN_BYTES = 16 << 20
_GROUP_BYTES = 4 << 30


class JsonlFormat:
    """JSONL files: one JSON object in each line."""

    suffixes: tuple[str, ...] = (".jsonl", ".json")

    def list_groups(self, path: FilePath, column: str) -> FileGroups:
        """Return groups of 1024 lines. The complete file is scanned for ends of lines."""
        groups: list[tuple[int, int, int, int]] = []
        begin = 0
        lines = 0
        position = 0
        end_of_last_line = 0
        with _open_bytes(path) as file:
            while block := file.read(_SCAN_BYTES):
                ends = position + 1 + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                first = GROUP_ROWS - 1 - lines % GROUP_ROWS
                for end in ends[first::GROUP_ROWS].tolist():
                    groups.append((begin, end, GROUP_ROWS, -1))
                    begin = end
                lines += len(ends)
                position += len(block)
                if len(ends):
                    end_of_last_line = int(ends[-1])
                if position - end_of_last_line > _GROUP_BYTES:
                    raise _make_size_error(path, "a line", end_of_last_line)
        rest = lines % GROUP_ROWS
        # The last line may have no end of line. A writer that was killed leaves such a line, too.
        if end_of_last_line < position:
            rest += 1
            next(self.read_rows(path, column, end_of_last_line, position, 0))
        if rest:
            groups.append((begin, position, rest, -1))
        kind: Kind = "text"
        if groups:
            first_rows = next(self.read_rows(path, column, *groups[0][:2], 0))
            # The first line may be blank or null, so the kind is that of the first rows.
            has_text = any(isinstance(row, str) for row in first_rows)
            if not has_text and any(row is not NO_IDS for row in first_rows):
                kind = "tokens"
        return FileGroups.of(kind, groups)

    def describe_columns(self, path: FilePath) -> dict[str, str]:
        """Return the keys of the first line, with their Python types."""
        with _open_bytes(path) as file:
            line = file.readline(_GROUP_BYTES)
        if not line.strip():
            return {}
        record = _parse_object(path, 0, line)
        return {key: type(value).__name__ for key, value in record.items()}

    def read_rows(
        self, path: FilePath, column: str, begin: int, end: int, first_row: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one group in one list."""
        if end - begin > _GROUP_BYTES:
            raise _make_size_error(path, f"{GROUP_ROWS} lines", begin)
        with _open_bytes(path) as file:
            file.seek(begin)
            block = file.read(end - begin)
        # Lines are split as in `list_groups`. `splitlines` would also split at a carriage return.
        lines = block.removesuffix(b"\n").split(b"\n")
        rows = []
        offset = begin
        for number, line in enumerate(lines):
            if number >= first_row:
                rows.append(_parse_line(path, offset, line, column))
            offset += len(line) + 1
        yield rows


def _make_size_error(path: FilePath, what: str, begin: int) -> DataError:
    """Return the error for lines that are too long to be read at once."""
    return DataError(
        f"{path}: {what} from byte {begin} on, with more than {_GROUP_BYTES:,} bytes. It may be no "
        "JSONL. Use shorter documents, or leave out the file."
    )


def _parse_line(path: FilePath, offset: int, line: bytes, column: str) -> Row:
    """Return the text or the ids of a line of a JSONL file. A blank line is an empty document."""
    if not line.strip():
        return NO_IDS
    record = _parse_object(path, offset, line)
    value = record.get(column)
    # As in the other formats, a null is an empty document.
    if value is None and column in record:
        return NO_IDS
    if isinstance(value, str):
        # Only an escape can give half a surrogate pair, which no tokenizer accepts.
        if b"\\u" in line and value.encode(errors="ignore").decode() != value:
            raise DataError(
                f"{path}: the text in the line at byte {offset} has half a surrogate pair, which "
                "is not a character. Repair or leave out the line."
            )
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return _convert_ids(path, np.array(value, np.object_))
    raise DataError(
        f"{path}: the line at byte {offset} has neither a text nor a list of integers under "
        f"{column!r}. Name the key with --col-name, or repair the file."
    )


def _parse_object(path: FilePath, offset: int, line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Any other value gives an empty object."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError(
            f"{path}: the line at byte {offset} is not JSON ({error}). If the file is still being "
            "written, wait for its end. If not, repair or leave out the file."
        ) from error
    if not isinstance(record, dict):
        return {}
    return record


def _convert_ids(path: FilePath, values: NDArray) -> NDArray[np.int64]:
    """Return token ids as int64."""
    try:
        return values.astype(np.int64)
    except OverflowError as error:
        raise DataError(f"{path} has a token id beyond 64 bits. Repair the file.") from error


@contextmanager
def _open_bytes(path: FilePath) -> Iterator[IO[bytes] | io.RawIOBase]:
    """Open a file for reading bytes."""
    if isinstance(path, RemoteDataFile):
        with path.open() as remote:
            yield remote
        return
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}). Restore the file, or correct its "
            "permissions."
        ) from error
