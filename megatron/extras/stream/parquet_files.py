"""Parquet files as rows. The row groups are the format's own."""

from collections.abc import Iterator
from typing import Any

from megatron.extras.stream.arrow_columns import (
    convert_column,
    find_kind,
    open_parquet,
)
from megatron.extras.stream.row_format import GROUP_ROWS, FileGroups, FilePath, Row

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
