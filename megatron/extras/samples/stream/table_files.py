"""Parquet and Arrow files as rows.

The row groups of Parquet are the format's own. A group of an Arrow file has as many record batches
as hold about 1024 rows. pyarrow is imported in the functions, because it is an optional package.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron.base.errors import DataError
from megatron.base.outside_file import check_regular
from megatron.extras.samples.stream.remote import RemoteDataFile
from megatron.extras.samples.stream.row_format import (
    GROUP_ROWS,
    NO_IDS,
    FileGroups,
    FilePath,
    Kind,
    Row,
)


def convert_column(path: FilePath, column: Any, first_row: int, place: str) -> list[Row]:
    """Return the rows of a pyarrow array. See `check_values` for the arguments and errors."""
    import pyarrow as pa
    import pyarrow.compute

    check_values(path, column, first_row, place)
    if not is_list(column.type):
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


def check_values(path: FilePath, values: Any, first_row: int, place: str) -> None:
    """Check offsets, lengths and texts of a pyarrow array, before anything else reads it.

    pyarrow does not check them itself. A wrong offset lets it read any address, which ends the
    process.

    Args:
        path: The file.
        values: The array.
        first_row: Number of its first row.
        place: Where the rows are counted from, for messages: "of row group 3".

    Raises:
        DataError: a value is damaged.
    """
    try:
        values.validate(full=True)
    except ValueError as error:
        row = next(
            (row for row in range(len(values)) if not _is_valid(values.slice(row, 1))),
            0,
        )
        reason = str(error).rstrip(".\n")
        raise DataError(
            f"{path} is damaged: row {first_row + row} {place}: {reason}. Restore or leave out the "
            "file."
        ) from error


def _is_valid(values: Any) -> bool:
    try:
        values.validate(full=True)
    except ValueError:
        return False
    return True


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is one of the list types."""
    import pyarrow as pa

    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def find_kind(path: FilePath, schema: Any, column: str) -> Kind:
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
    if is_list(kind) and pa.types.is_integer(kind.value_type):
        return "tokens"
    raise DataError(
        f"{path}: column {column!r} holds {kind}, neither texts nor lists of integers. Name "
        "another column with --col-name."
    )


@contextmanager
def report_damage(path: FilePath, pa: Any, name: str) -> Iterator[None]:
    """Turn errors of pyarrow into a DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing. Restore the file.") from error
    # Names of columns may be no UTF-8, and sizes may be negative.
    except (OSError, pa.ArrowException, ValueError, SystemError) as error:
        if getattr(error, "errno", None) == errno.EMFILE:
            raise DataError(
                f"{path} cannot be opened, because this process has too many open files. Each "
                "logical shard has one. Raise the limit (ulimit -n), or lower --logical-shards."
            ) from error
        # Some messages of pyarrow end with a full stop or a line.
        reason = str(error).rstrip(".\n")
        raise DataError(
            f"{path} cannot be read as {name}: {reason}. If the file is still being written, wait "
            "for its end. If not, repair or leave out the file."
        ) from error


def import_pyarrow(path: FilePath) -> Any:
    """Return the package pyarrow, which is optional."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet and Arrow needs the package pyarrow: pip install pyarrow."
        ) from error
    return pyarrow


@contextmanager
def open_parquet(path: FilePath, **options: Any) -> Iterator[Any]:
    """Open a Parquet file. `options` are passed on to pyarrow."""
    pa = import_pyarrow(path)
    import pyarrow.parquet as parquet

    with report_damage(path, pa, "Parquet"):
        if not isinstance(path, RemoteDataFile):
            check_regular(path)
        source = path.open() if isinstance(path, RemoteDataFile) else path
        # Only pages for which the writer has stored a checksum are verified.
        with parquet.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file


@contextmanager
def open_arrow(path: FilePath) -> Iterator["ArrowFile"]:
    """Open an Arrow file, with a memory map if it is local."""
    pa = import_pyarrow(path)
    with report_damage(path, pa, "Arrow"):
        if isinstance(path, RemoteDataFile):
            opened = pa.PythonFile(path.open(), "r")
        else:
            check_regular(path)
            opened = pa.memory_map(path)
        with opened as source:
            yield ArrowFile(pa, source)


class ArrowFile:
    """An open Arrow file in one of both formats."""

    def __init__(self, pa: Any, source: Any) -> None:
        """Find the format from the first bytes, and read the schema."""
        self._pa = pa
        self._source = source
        self._file = None
        if source.read(6) == b"ARROW1":
            self._file = pa.ipc.open_file(source)
            self.schema = self._file.schema
            return
        source.seek(0)
        self.schema = pa.ipc.read_schema(source)
        self._first = source.tell()

    def measure(self, place: int) -> int:
        """Return how many bytes of the file are before a place that `read_batches` gives."""
        if self._file is None:
            return place
        return int(self._source.size()) * place // max(1, self._file.num_record_batches)

    def read_batches(
        self, begin: int | None = None, end: int | None = None
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield the begin and the end of each record batch, see `FileGroups`, and the batch."""
        if self._file is not None:
            last = self._file.num_record_batches if end is None else end
            for number in range(begin or 0, last):
                yield number, number + 1, self._file.get_batch(number)
            return
        source = self._source
        source.seek(self._first if begin is None else begin)
        while end is None or source.tell() < end:
            place = source.tell()
            try:
                message = self._pa.ipc.read_message(source)
            except EOFError:
                # The stream ends here.
                return
            if message.type != "record batch":
                raise self._pa.ArrowInvalid(f"a {message.type} message is not supported")
            batch = self._pa.ipc.read_record_batch(message, self.schema)
            yield place, source.tell(), batch


class ArrowFormat:
    """Arrow IPC files: the file format, and the stream format that Hugging Face datasets writes."""

    suffixes: tuple[str, ...] = (".arrow",)

    def list_groups(self, path: FilePath, column: str) -> FileGroups:
        """Return groups of record batches. A record batch may hold one row or a million."""
        kind: Kind
        with open_arrow(path) as file:
            kind = "tokens"
            if not _has_document_batches(file.schema, column):
                kind = find_kind(path, file.schema, column)
            groups: list[tuple[int, int, int, int]] = []
            begin = -1
            rows = 0
            tokens = 0
            for place, next_place, batch in file.read_batches():
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
        with open_arrow(path) as file:
            return {field.name: str(field.type) for field in file.schema}

    def read_rows(
        self, path: FilePath, column: str, begin: int, end: int, first_row: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one group. The file is memory-mapped."""
        with open_arrow(path) as file:
            row = 0
            for _, _, batch in file.read_batches(begin, end):
                values = _get_rows(batch, column)
                left_out = min(max(0, first_row - row), len(values))
                row += len(values)
                # A record batch may be far larger than a group of the other formats.
                for start in range(left_out, len(values), GROUP_ROWS):
                    part = values.slice(start, GROUP_ROWS)
                    first = row - len(values) + start
                    yield convert_column(path, part, first, f"of the group at {begin}")


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
        with open_parquet(path) as file:
            kind = find_kind(path, file.schema_arrow, column)
            groups = []
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                tokens = _count_parquet_tokens(group, column) if kind == "tokens" else -1
                groups.append((number, number + 1, group.num_rows, tokens))
        return FileGroups.of(kind, groups)

    def describe_columns(self, path: FilePath) -> dict[str, str]:
        """Return the types that Arrow uses for the columns."""
        with open_parquet(path) as file:
            return {field.name: str(field.type) for field in file.schema_arrow}

    def read_rows(
        self, path: FilePath, column: str, begin: int, end: int, first_row: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one row group. Rows that are left out are decoded, too."""
        options = {"buffer_size": _COLUMN_BUFFER_BYTES, "pre_buffer": False}
        with open_parquet(path, **options) as file:
            row = 0
            for batch in file.iter_batches(
                batch_size=GROUP_ROWS, row_groups=[begin], columns=[column], use_threads=False
            ):
                left_out = min(max(0, first_row - row), batch.num_rows)
                row += batch.num_rows
                if left_out < batch.num_rows:
                    first = row - batch.num_rows + left_out
                    values = batch.column(0).slice(left_out)
                    yield convert_column(path, values, first, f"of row group {begin}")


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
