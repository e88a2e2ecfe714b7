"""Reads inputs with rows and columns: Parquet, and the Arrow files of Hugging Face datasets.

Invariant: memory holds one block. Rows that an earlier run has read are not decoded again.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import DataError
from megatron.extras.preparation.preprocess.blocks import InputBlock, Position
from megatron.extras.preparation.preprocess.input_files import InputFormat, find_format
from megatron.extras.samples.stream.table_files import check_values, open_arrow, open_parquet


def count_rows(path: str) -> int:
    """Return the number of rows of a table."""
    if find_format(path) is InputFormat.PARQUET:
        with open_parquet(path) as file:
            return int(file.metadata.num_rows)
    with open_arrow(path) as file:
        return sum(batch.num_rows for _, _, batch in file.read_batches())


def read_parquet_blocks(
    path: str, keys: Sequence[str], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the rows of a Parquet file from a position on, in blocks."""
    with open_parquet(path) as file:
        _check_columns(path, file.schema_arrow, keys)
        disk = Path(path).stat().st_size
        first_row = 0
        for group in range(file.metadata.num_row_groups):
            # Rows have no fixed size. The average size in the row group gives the number of rows in
            # a block.
            row_group = file.metadata.row_group(group)
            rows = max(1, row_group.num_rows * block_bytes // max(1, row_group.total_byte_size))
            next_row = first_row
            first_row += row_group.num_rows
            # Row groups that an earlier run has read are not decoded again.
            if first_row <= begin.offset:
                continue
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=list(keys)):
                begin_row = next_row
                next_row = next_row + batch.num_rows
                # Batches may begin at other rows than in the earlier run. Leave out the rows that
                # it has read.
                passed = max(0, begin.offset - begin_row)
                if passed < batch.num_rows:
                    _check_values(path, batch, begin_row)
                    end = Position(begin.file, next_row, next_row)
                    yield InputBlock(
                        path,
                        begin_row + passed + 1,
                        batch.slice(passed),
                        end,
                        disk * next_row // file.metadata.num_rows,
                    )


def read_arrow_blocks(
    path: str, keys: Sequence[str], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the rows of an Arrow file from a position on, in blocks."""
    with open_arrow(path) as file:
        _check_columns(path, file.schema, keys)
        first_row = 0
        for _, place, complete in file.read_batches():
            batch = complete.select(list(keys))
            # The writer chose the size of the batch, which may be far larger than a block.
            rows = max(1, batch.num_rows * block_bytes // max(1, batch.nbytes))
            start = max(0, begin.offset - first_row)
            while start < batch.num_rows:
                part = batch.slice(start, rows)
                _check_values(path, part, first_row + start)
                end = first_row + start + part.num_rows
                yield InputBlock(
                    path,
                    first_row + start + 1,
                    part,
                    Position(begin.file, end, end),
                    file.measure(place),
                )
                start += part.num_rows
            first_row += batch.num_rows


def _check_values(path: str, batch: Any, first_row: int) -> None:
    """Check a record batch whose first row has this number in the file, from 0."""
    for column in batch.columns:
        check_values(path, column, first_row + 1, "of the file")


def _check_columns(path: str, schema: Any, keys: Sequence[str]) -> None:
    """Check that a table has a column of strings, or only of nulls, for each key."""
    for key in keys:
        if key not in schema.names:
            raise DataError(
                f"{path} has no column {key!r}, only {', '.join(schema.names)}; name others with "
                "--json-keys."
            )
        kind = schema.field(key).type
        # A dictionary-encoded column holds texts. A list has a value type as well, and holds none.
        if str(kind).startswith("dictionary"):
            kind = kind.value_type
        # A column whose values are all null has a type of its own. Each of its rows is a bad line.
        if str(kind) not in ("string", "large_string", "string_view", "null"):
            raise DataError(
                f"{path}: column {key!r} holds {kind}, not strings; name others with --json-keys."
            )
