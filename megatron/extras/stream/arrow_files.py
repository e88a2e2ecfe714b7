"""Arrow IPC files as rows. A group has as many record batches as hold about 1024 rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.extras.stream.arrow_columns import (
    check_values,
    convert_column,
    find_kind,
    import_pyarrow,
    report_damage,
)
from megatron.extras.stream.remote import RemoteDataFile
from megatron.extras.stream.row_format import GROUP_ROWS, FileGroups, FilePath, Kind, Row


class ArrowFormat:
    """Arrow IPC files: the file format, and the stream format that Hugging Face datasets writes."""

    suffixes: tuple[str, ...] = (".arrow",)

    def list_groups(self, path: FilePath, column: str) -> FileGroups:
        """Return groups of record batches. A record batch may hold one row or a million."""
        kind: Kind
        with _open_arrow(path) as file:
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
        with _open_arrow(path) as file:
            return {field.name: str(field.type) for field in file.schema}

    def read_rows(
        self, path: FilePath, column: str, begin: int, end: int, first_row: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one group. The file is memory-mapped."""
        with _open_arrow(path) as file:
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


class _ArrowFile:
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


@contextmanager
def _open_arrow(path: FilePath) -> Iterator[_ArrowFile]:
    """Open an Arrow file, with a memory map if it is local."""
    pa = import_pyarrow()
    with report_damage(path, pa, "Arrow"):
        if isinstance(path, RemoteDataFile):
            opened = pa.PythonFile(path.open(), "r")
        else:
            opened = pa.memory_map(path)
        with opened as source:
            yield _ArrowFile(pa, source)
