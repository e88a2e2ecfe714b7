"""Arrow IPC files as rows. A group has as many record batches as hold about 1024 rows."""

from collections.abc import Iterator
from typing import Any

from megatron.extras.stream.arrow_columns import (
    check_values,
    convert_column,
    find_kind,
    open_arrow,
)
from megatron.extras.stream.row_format import GROUP_ROWS, FileGroups, FilePath, Kind, Row


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
