"""Opens Parquet and Arrow files, and checks their columns.

pyarrow is imported in the functions, because it is an optional package.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron.base.errors import DataError
from megatron.base.outside_file import check_regular
from megatron.extras.stream.remote import RemoteDataFile
from megatron.extras.stream.row_format import NO_IDS, FilePath, Kind, Row


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
