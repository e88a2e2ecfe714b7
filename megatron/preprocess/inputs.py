"""The input files: which ones are meant, and their content as blocks of complete lines or rows.

Invariant: memory holds one block, or one line if a line is longer than a block. A later run can
continue where a block ends.

The suffix gives the format. .parquet is Parquet. Everything else has a JSON record in each line,
and may be compressed as .gz or .zst.
"""

import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import ConfigError, DataError

BLOCK_BYTES = 4 << 20
# Read at once from a .zst. It bounds how much text one step of decompression can give.
_COMPRESSED_BYTES = 1 << 16


@dataclass(frozen=True)
class Position:
    """The place at which the next block begins.

    Attributes:
        file: Number of the input file.
        offset: Offset in it, in bytes of its decompressed text, or in rows of a Parquet file.
        line: Number of lines or rows before it.
    """

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class InputBlock:
    """Complete lines or rows of one file.

    Attributes:
        path: The file.
        first_line: Number of the first line, from 1.
        content: Lines as bytes, or rows as a pyarrow RecordBatch.
        end: Where the next block begins.
        disk_bytes: How far into the file on disk the block reaches.
    """

    path: str
    first_line: int
    content: Any
    end: Position
    disk_bytes: int

    @property
    def lines(self) -> int:
        """Number of lines or rows."""
        return self.end.line - self.first_line + 1


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the files that --input means. The files of a glob are sorted by name.

    Raises:
        ConfigError: a pattern matches no file, or matches a folder.
    """
    files: list[str] = []
    for pattern in patterns:
        # A file whose name has characters of a glob is meant literally.
        if Path(pattern).exists():
            found = [pattern]
        else:
            found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            if glob.has_magic(pattern):
                what = "matches no file"
            else:
                what = "does not exist"
            raise ConfigError(f"--input {pattern} {what}.")
        folders = [path for path in found if Path(path).is_dir()]
        if folders:
            raise ConfigError(
                f"--input {folders[0]} is a folder; give its files, as in '{folders[0]}/*.jsonl'."
            )
        files += found
    if not files:
        raise ConfigError("--input needs at least one file.")
    return files


def read_blocks(
    paths: Sequence[str],
    keys: Sequence[str],
    start: Position = Position(),
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[InputBlock]:
    """Yield all blocks from `start` on.

    Args:
        paths: The input files.
        keys: The columns that are read of Parquet files.
        start: Where to begin.
        block_bytes: The approximate size of a block.

    Raises:
        DataError: a file cannot be read, is truncated, or has no column for a key.
    """
    # Files before the start are not opened at all.
    for number in range(start.file, len(paths)):
        if number == start.file:
            begin = start
        else:
            begin = Position(number)
        if paths[number].endswith(".parquet"):
            yield from _read_parquet_blocks(paths[number], keys, begin, block_bytes)
        else:
            yield from _read_line_blocks(paths[number], begin, block_bytes)


def open_lines(
    path: str, start: int = 0, piece_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[bytes, int]]:
    """Yield the text of a file from byte `start` on, in pieces.

    A compressed file is decompressed from its beginning, since it cannot be entered in the middle.

    Args:
        path: The file.
        start: First byte of the decompressed text.
        piece_bytes: The approximate size of a piece.

    Yields:
        A piece, and how far into the file on disk it reaches.

    Raises:
        DataError: the file cannot be read or is truncated.
    """
    try:
        with open(path, "rb") as raw:
            if path.endswith((".gz", ".zst")):
                if path.endswith(".gz"):
                    pieces = _read_gzip_pieces(raw, piece_bytes)
                else:
                    pieces = _read_zstd_pieces(raw, path)
                for piece in _skip_to(pieces, start):
                    yield piece, raw.tell()
            else:
                # Files that are not compressed can be entered at any byte.
                raw.seek(start)
                while piece := raw.read(piece_bytes):
                    yield piece, raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Fix or leave out the file.") from error


def _read_line_blocks(path: str, begin: Position, block_bytes: int) -> Iterator[InputBlock]:
    """Yield the complete lines of a file from a position on, in blocks."""
    position = begin
    parts = list[bytes]()
    size = 0
    disk_bytes = 0

    def make_block(content: bytes) -> InputBlock:
        # The last line of a file may have no newline.
        lines = content.count(b"\n") + (not content.endswith(b"\n"))
        return InputBlock(
            path,
            position.line + 1,
            content,
            Position(begin.file, position.offset + len(content), position.line + lines),
            disk_bytes,
        )

    # B007 is wrong here, since make_block reads disk_bytes.
    for piece, disk_bytes in open_lines(path, begin.offset, block_bytes):  # noqa: B007
        cut = piece.rfind(b"\n") + 1
        size += len(piece)
        # Join the parts once. Joining at each piece costs quadratic time for very long lines.
        if cut == 0 or size < block_bytes:
            parts.append(piece)
            continue
        made = make_block(b"".join((*parts, piece[:cut])))
        parts = [piece[cut:]]
        size = len(piece) - cut
        position = made.end
        yield made
    if size:
        yield make_block(b"".join(parts))


def _skip_to(pieces: Iterable[bytes], start: int) -> Iterator[bytes]:
    """Yield the pieces without their first `start` bytes."""
    for piece in pieces:
        if start < len(piece):
            yield piece[start:]
        start = max(0, start - len(piece))


def _read_gzip_pieces(raw: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
    """Yield the text of a .gz file in pieces."""
    with gzip.GzipFile(fileobj=raw, mode="rb") as file:
        while piece := file.read(piece_bytes):
            yield piece


def _read_zstd_pieces(raw: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield the text of a .zst file in pieces.

    It is read frame by frame. Only then can a file that is truncated be distinguished from one that
    ends.
    """
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path}: reading .zst needs the package zstandard: pip install zstandard."
        ) from error
    frame = zstandard.ZstdDecompressor().decompressobj()
    fresh = True
    try:
        while data := raw.read(_COMPRESSED_BYTES):
            while data:
                # A file may have several frames. What follows the end of one belongs to the next.
                piece = frame.decompress(data)
                data = frame.unused_data
                fresh = False
                if piece:
                    yield piece
                # The frame continues in the next bytes of the file.
                if not frame.eof:
                    break
                frame = zstandard.ZstdDecompressor().decompressobj()
                fresh = True
    except zstandard.ZstdError as error:
        raise DataError(f"{path} cannot be read: {error}. Fix or leave out the file.") from error
    if not fresh:
        raise DataError(f"{path} is truncated: it ends inside a zstd frame. Copy the file again.")


def count_parquet_rows(path: str) -> int:
    """Return the number of rows of a Parquet file."""
    with _open_parquet_file(path) as file:
        return file.metadata.num_rows


@contextmanager
def _open_parquet_file(path: str) -> Iterator[Any]:
    """Open a Parquet file. pyarrow is imported here, because it is an optional package."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs the package pyarrow: pip install pyarrow."
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}. Fix or leave out the file."
        ) from error


def _read_parquet_blocks(
    path: str, keys: Sequence[str], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the rows of a Parquet file from a position on, in blocks."""
    with _open_parquet_file(path) as file:
        _check_columns(path, file.schema_arrow, keys)
        disk = Path(path).stat().st_size
        first_row = 0
        for group in range(file.metadata.num_row_groups):
            # Rows have no fixed size. The row group's average gives the rows of a block.
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
                # Batches may begin elsewhere than in the earlier run. Leave out the rows it read.
                passed = max(0, begin.offset - begin_row)
                if passed < batch.num_rows:
                    end = Position(begin.file, next_row, next_row)
                    yield InputBlock(
                        path,
                        begin_row + passed + 1,
                        batch.slice(passed),
                        end,
                        disk * next_row // file.metadata.num_rows,
                    )


def _check_columns(path: str, schema: Any, keys: Sequence[str]) -> None:
    """Check that a Parquet file has a column of strings for each key."""
    for key in keys:
        if key not in schema.names:
            raise DataError(
                f"{path} has no column {key!r}, only {', '.join(schema.names)}; name others with "
                "--json-keys."
            )
        kind = schema.field(key).type
        # A dictionary-encoded column holds the type of its values.
        kind = getattr(kind, "value_type", kind)
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DataError(
                f"{path}: column {key!r} holds {kind}, not strings; name others with --json-keys."
            )
