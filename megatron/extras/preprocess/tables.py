"""Reads inputs with rows and columns: Parquet, and the Arrow files of Hugging Face datasets.

Invariant: memory holds one block. Rows that an earlier run has read are not decoded again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.base.errors import DataError
from megatron.base.outside_file import check_regular
from megatron.extras.preprocess.blocks import InputBlock, Position
from megatron.extras.preprocess.input_files import InputFormat, find_format
from megatron.extras.stream.arrow_columns import check_values


def count_rows(path: str) -> int:
    """Return the number of rows of a table."""
    if find_format(path) is InputFormat.PARQUET:
        with _open_parquet_file(path) as file:
            return file.metadata.num_rows
    with _open_arrow_stream(path) as (stream, _):
        return sum(batch.num_rows for batch in stream)


def read_parquet_blocks(
    path: str, keys: Sequence[str], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the rows of a Parquet file from a position on, in blocks."""
    with _open_parquet_file(path) as file:
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
    """Yield the rows of an Arrow stream from a position on, in blocks."""
    with _open_arrow_stream(path) as (stream, source):
        _check_columns(path, stream.schema, keys)
        first_row = 0
        for complete in stream:
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
                    source.tell(),
                )
                start += part.num_rows
            first_row += batch.num_rows


@contextmanager
def _open_parquet_file(path: str) -> Iterator[Any]:
    """Open a Parquet file. pyarrow is imported here, because it is an optional package."""
    pa = _import_pyarrow(path, "Parquet")
    import pyarrow.parquet as parquet

    try:
        check_regular(path)
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, pa.ArrowException, ValueError, SystemError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}. Fix or leave out the file."
        ) from error


@contextmanager
def _open_arrow_stream(path: str) -> Iterator[tuple[Any, Any]]:
    """Open an Arrow file in stream format, and yield the stream and the file."""
    pa = _import_pyarrow(path, "Arrow")
    try:
        check_regular(path)
        # With a memory map, columns that are not used are not read.
        with pa.memory_map(path) as source, pa.ipc.open_stream(source) as stream:
            yield stream, source
    except (OSError, pa.ArrowException, ValueError, SystemError) as error:
        raise DataError(
            f"{path} cannot be read as an Arrow stream: {error}. Fix or leave out the file."
        ) from error


def _check_values(path: str, batch: Any, first_row: int) -> None:
    """Check a record batch whose first row has this number in the file, from 0."""
    for column in batch.columns:
        check_values(path, column, first_row + 1, "of the file")


def _import_pyarrow(path: str, format: str) -> Any:
    """Return the package pyarrow. `format` is for the message if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path}: reading {format} needs the package pyarrow: pip install pyarrow."
        ) from error
    return pyarrow


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
