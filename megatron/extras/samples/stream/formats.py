"""The file formats that can be read without a preparation step: JSONL, Arrow and Parquet.

A file is divided into row groups, which can be read without what comes before them. A group of
JSONL has 1024 lines. A group of an Arrow file has as many record batches as hold about 1024 rows.
The row groups of Parquet are the format's own.

Invariant: what a format returns for a row depends on the file's bytes only.
"""

import dataclasses
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.outside_file import open_regular, parse_json
from megatron.extras.samples.stream.remote import RemoteDataFile
from megatron.extras.samples.stream.table_files import (
    FilePath,
    check_values,
    open_arrow,
    open_parquet,
)

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


def _convert_column(path: FilePath, column: Any, first_row: int, place: str) -> list[Row]:
    """Return the rows of a pyarrow array. See `check_values` for the arguments and errors."""
    import pyarrow as pa
    import pyarrow.compute

    check_values(path, column, first_row, place)
    if not _is_list(column.type):
        return [NO_IDS if text is None else text for text in column.to_pylist()]
    lengths = pa.compute.list_value_length(column)
    sizes = np.asarray(lengths.fill_null(0), np.int64)
    # `flatten` leaves out values of missing rows and values outside of the slice.
    values = column.flatten()
    if values.null_count:
        raise DataError(f"{path} has a missing value inside a list of token ids. Repair the file.")
    ids = np.asarray(values)
    if ids.dtype == np.uint64 and ids.max(initial=0) > np.iinfo(np.int64).max:
        raise DataError(f"{path} has a token id beyond 64 bits. Repair the file.")
    ids = ids.astype(np.int64)
    return list[Row](np.split(ids, np.cumsum(sizes)[:-1]))


def _is_list(kind: Any) -> bool:
    """Return whether an Arrow type is one of the list types."""
    import pyarrow as pa

    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _find_kind(path: FilePath, schema: Any, column: str) -> Kind:
    """Return what a column holds.

    Raises:
        DataError: there is no such column, or it holds something else.
    """
    import pyarrow as pa

    if column not in schema.names:
        raise DataError(
            f"{path} has no column {column!r}, only {', '.join(schema.names)}. Name the column "
            "with --col-name."
        )
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    # A column whose values are all null has a type of its own.
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return "text"
    if _is_list(kind) and pa.types.is_integer(kind.value_type):
        return "tokens"
    raise DataError(
        f"{path}: column {column!r} holds {kind}, neither texts nor lists of integers. Name "
        "another column with --col-name."
    )


class ArrowFormat:
    """Arrow IPC files: the file format, and the stream format that Hugging Face datasets writes."""

    suffixes: tuple[str, ...] = (".arrow",)

    def list_groups(self, path: FilePath, column: str) -> FileGroups:
        """Return groups of record batches. A record batch may hold one row or a million."""
        kind: Kind
        with open_arrow(path) as table:
            kind = "tokens"
            if not _has_document_batches(table.schema, column):
                kind = _find_kind(path, table.schema, column)
            groups: list[tuple[int, int, int, int]] = []
            begin = -1
            rows = 0
            tokens = 0
            for place, next_place, batch in table.read_batches():
                if rows == 0:
                    begin = place
                    tokens = 0 if kind == "tokens" else -1
                values = _get_rows(batch, column)
                if kind == "tokens":
                    check_values(path, values, rows, f"of the group at {begin}")
                rows += len(values)
                if kind == "tokens":
                    # Only the sizes in the batch's header are read, not the ids.
                    tokens += len(values.flatten())
                end = next_place
                if rows >= GROUP_ROWS:
                    groups.append((begin, end, rows, tokens))
                    rows = 0
            if rows:
                groups.append((begin, end, rows, tokens))
        return FileGroups.of(kind, groups)

    def describe_columns(self, path: FilePath) -> dict[str, str]:
        """Return the types of the columns."""
        with open_arrow(path) as table:
            return {field.name: str(field.type) for field in table.schema}

    def read_rows(
        self, path: FilePath, column: str, begin: int, end: int, first_row: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one group. The file is memory-mapped."""
        with open_arrow(path) as table:
            row = 0
            for _, _, batch in table.read_batches(begin, end):
                values = _get_rows(batch, column)
                left_out = min(max(0, first_row - row), len(values))
                row += len(values)
                # A record batch may be far larger than a group of the other formats.
                for start in range(left_out, len(values), GROUP_ROWS):
                    part = values.slice(start, GROUP_ROWS)
                    first = row - len(values) + start
                    yield _convert_column(path, part, first, f"of the group at {begin}")


def _has_document_batches(schema: Any, column: str) -> bool:
    """Return whether each record batch is a document, and its rows are the token ids.

    These are the files of fms-fsdp (`ArrowHandler` in its dataset_utils.py). They have no other
    column. Beside other columns, integers are more likely lengths or numbers of documents.
    """
    import pyarrow as pa

    return schema.names == [column] and bool(pa.types.is_integer(schema.field(column).type))


def _get_rows(batch: Any, column: str) -> Any:
    """Return a column of a record batch with one element for each document."""
    import pyarrow as pa

    values = batch.column(column)
    if not _has_document_batches(batch.schema, column):
        return values
    # One list around the values, which are not copied.
    return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)


# The part of a column that is in memory at once. Without a limit, pyarrow reads the whole column of
# a row group, which may be hundreds of MB for each logical shard.
_COLUMN_BUFFER_BYTES = 1 << 20


class ParquetFormat:
    """Parquet files."""

    suffixes: tuple[str, ...] = (".parquet",)

    def list_groups(self, path: FilePath, column: str) -> FileGroups:
        """Return the row groups, from the footer alone."""
        with open_parquet(path) as table:
            kind = _find_kind(path, table.schema, column)
            groups = []
            for number in range(table.file.metadata.num_row_groups):
                group = table.file.metadata.row_group(number)
                tokens = _count_parquet_tokens(group, column) if kind == "tokens" else -1
                groups.append((number, number + 1, group.num_rows, tokens))
        return FileGroups.of(kind, groups)

    def describe_columns(self, path: FilePath) -> dict[str, str]:
        """Return the types that Arrow uses for the columns."""
        with open_parquet(path) as table:
            return {field.name: str(field.type) for field in table.schema}

    def read_rows(
        self, path: FilePath, column: str, begin: int, end: int, first_row: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one row group. Rows that are left out are decoded, too."""
        options = {"buffer_size": _COLUMN_BUFFER_BYTES, "pre_buffer": False}
        with open_parquet(path, **options) as table:
            row = 0
            for batch in table.file.iter_batches(
                batch_size=GROUP_ROWS, row_groups=[begin], columns=[column], use_threads=False
            ):
                left_out = min(max(0, first_row - row), batch.num_rows)
                row += batch.num_rows
                if left_out < batch.num_rows:
                    first = row - batch.num_rows + left_out
                    values = batch.column(0).slice(left_out)
                    yield _convert_column(path, values, first, f"of row group {begin}")


def _count_parquet_tokens(group: Any, column: str) -> int:
    """Return the number of token ids of a row group from the footer, or -1.

    The footer counts a missing or empty list as one missing value.
    """
    for number in range(group.num_columns):
        chunk = group.column(number)
        if chunk.path_in_schema.split(".")[0] == column:
            statistics = chunk.statistics
            if statistics is None or not statistics.has_null_count:
                return -1
            return int(chunk.num_values - statistics.null_count)
    return -1


FORMATS: dict[str, FileFormat] = {
    "parquet": ParquetFormat(),
    "arrow": ArrowFormat(),
    "jsonl": JsonlFormat(),
}
