"""Parquet and Arrow files as tables, for training, preprocessing and conversations.

pyarrow is imported in the functions, because it is an optional package.

Invariant: no value is used before its offsets were checked, because pyarrow does not check them.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.base.errors import DataError
from megatron.base.outside_file import check_regular
from megatron.extras.samples.stream.remote import RemoteDataFile

FilePath = str | RemoteDataFile
"""A local path, or a remote file."""


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


class FileTable:
    """An open file of rows and columns."""

    def __init__(self, path: FilePath, schema: Any) -> None:
        """Remember the path, for messages, and the schema of pyarrow."""
        self.path = path
        self.schema = schema

    def count_rows(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    def read_rows(
        self, columns: Sequence[str], begin: int = 0, block_bytes: int | None = None
    ) -> Iterator[tuple[int, Any, int]]:
        """Yield record batches with the rows from `begin` on, counted from 0.

        Row groups before `begin` are not decoded.

        Args:
            columns: The columns to read.
            begin: The first row.
            block_bytes: The approximate size of a batch. The sizes in a file are those of encoded
                values, and a text that is stored once may be in each row. None gives single rows.

        Yields:
            The number of the first row, the batch, and how far into the file it reaches, in bytes.

        Raises:
            DataError: A value is damaged.
        """
        for first_row, batch, place in self._divide(list(columns), begin, block_bytes):
            for column in batch.columns:
                check_values(self.path, column, first_row + 1, "of the file")
            yield first_row, batch, place

    def _divide(
        self, columns: list[str], begin: int, block_bytes: int | None
    ) -> Iterator[tuple[int, Any, int]]:
        """Yield what `read_rows` does. The values are not checked."""
        raise NotImplementedError


def _count_rows_of_block(rows: int, size: int, block_bytes: int | None) -> int:
    """Return the rows of a block, from the average size of a row."""
    if block_bytes is None:
        return 1
    return max(1, rows * block_bytes // max(1, size))


class ParquetTable(FileTable):
    """An open Parquet file."""

    def __init__(self, path: FilePath, file: Any) -> None:
        """Use an open `ParquetFile` of pyarrow."""
        super().__init__(path, file.schema_arrow)
        self.file = file

    def count_rows(self) -> int:
        """See `FileTable`."""
        return int(self.file.metadata.num_rows)

    def _divide(
        self, columns: list[str], begin: int, block_bytes: int | None
    ) -> Iterator[tuple[int, Any, int]]:
        assert isinstance(self.path, str), "a remote file has no size here"
        disk_bytes = os.stat(self.path).st_size
        first_row = 0
        for group in range(self.file.metadata.num_row_groups):
            row_group = self.file.metadata.row_group(group)
            rows = _count_rows_of_block(row_group.num_rows, row_group.total_byte_size, block_bytes)
            next_row = first_row
            first_row += row_group.num_rows
            if first_row <= begin:
                continue
            for batch in self.file.iter_batches(
                batch_size=rows,
                row_groups=[group],
                columns=columns,
                use_threads=block_bytes is not None,
            ):
                begin_row = next_row
                next_row += batch.num_rows
                # Batches may begin at other rows than in an earlier run.
                passed = max(0, begin - begin_row)
                if passed < batch.num_rows:
                    place = disk_bytes * next_row // self.count_rows()
                    yield begin_row + passed, batch.slice(passed), place


class ArrowTable(FileTable):
    """An open Arrow file in one of both formats."""

    def __init__(self, path: FilePath, pa: Any, source: Any) -> None:
        """Find the format from the first bytes, and read the schema."""
        self._pa = pa
        self._source = source
        self._file = None
        if source.read(6) == b"ARROW1":
            self._file = pa.ipc.open_file(source)
            super().__init__(path, self._file.schema)
            return
        source.seek(0)
        super().__init__(path, pa.ipc.read_schema(source))
        self._first = source.tell()

    def _measure(self, place: int) -> int:
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

    def count_rows(self) -> int:
        """See `FileTable`."""
        return sum(batch.num_rows for _, _, batch in self.read_batches())

    def _divide(
        self, columns: list[str], begin: int, block_bytes: int | None
    ) -> Iterator[tuple[int, Any, int]]:
        first_row = 0
        for _, place, complete in self.read_batches():
            batch = complete.select(columns)
            # The writer chose the size of the batch, which may be far larger than a block.
            rows = _count_rows_of_block(batch.num_rows, batch.nbytes, block_bytes)
            for start in range(max(0, begin - first_row), batch.num_rows, rows):
                yield first_row + start, batch.slice(start, rows), self._measure(place)
            first_row += batch.num_rows


@contextmanager
def open_parquet(path: FilePath, **options: Any) -> Iterator[ParquetTable]:
    """Open a Parquet file. `options` are passed on to pyarrow."""
    pa = import_pyarrow(path)
    import pyarrow.parquet as parquet

    with report_damage(path, pa, "Parquet"):
        if not isinstance(path, RemoteDataFile):
            check_regular(path)
        source = path.open() if isinstance(path, RemoteDataFile) else path
        # Only pages for which the writer has stored a checksum are verified.
        with parquet.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield ParquetTable(path, file)


@contextmanager
def open_arrow(path: FilePath) -> Iterator[ArrowTable]:
    """Open an Arrow file, with a memory map if it is local."""
    pa = import_pyarrow(path)
    with report_damage(path, pa, "Arrow"):
        if isinstance(path, RemoteDataFile):
            opened = pa.PythonFile(path.open(), "r")
        else:
            check_regular(path)
            opened = pa.memory_map(path)
        with opened as source:
            yield ArrowTable(path, pa, source)
