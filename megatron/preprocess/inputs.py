"""The input files: which ones are meant, and their content as blocks of whole lines (or rows), in order.

Invariant: memory is one block, or one line where a line is longer; a block ends where a later run can begin.
Formats, by suffix: Parquet (.parquet), and lines of JSON: .gz, .zst, and anything else as it is.
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
_COMPRESSED_BYTES = 1 << 16  # read at once from a .zst; bounds what one step can expand to


@dataclass(frozen=True)
class Position:
    """Before what the next block begins: file number, offset in it (bytes of its text; rows of a Parquet file), lines passed."""

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class InputBlock:
    """Whole lines (bytes) or rows (a pyarrow RecordBatch) of one file. `disk_bytes`: how far into that file they reach."""

    path: str
    first_line: int
    content: Any
    end: Position
    disk_bytes: int

    @property
    def lines(self) -> int:
        return self.end.line - self.first_line + 1


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that --input means, globs sorted by name. Raises ConfigError where one matches no file."""
    files: list[str] = []
    for pattern in patterns:
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not found:
            what = "matches no file" if glob.has_magic(pattern) else "does not exist"
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
    """All blocks from `start` on. Raises DataError where a file cannot be read, is cut off, or lacks the column of a key."""
    for number in range(start.file, len(paths)):
        begin = start if number == start.file else Position(number)
        if paths[number].endswith(".parquet"):
            yield from _read_parquet_blocks(paths[number], keys, begin, block_bytes)
        else:
            yield from _read_line_blocks(paths[number], begin, block_bytes)


def open_lines(
    path: str, start: int = 0, piece_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[bytes, int]]:
    """The text of a file from byte `start` on in pieces, each with the place in the file on disk that it reaches to.

    A compressed file is decompressed from its beginning, since it cannot be entered in the middle.
    """
    try:
        with open(path, "rb") as raw:
            if path.endswith((".gz", ".zst")):
                pieces = (
                    _read_gzip_pieces(raw, piece_bytes)
                    if path.endswith(".gz")
                    else _read_zstd_pieces(raw, path)
                )
                for piece in _skip_to(pieces, start):
                    yield piece, raw.tell()
            else:
                raw.seek(start)
                while piece := raw.read(piece_bytes):
                    yield piece, raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Mend or leave out the file.") from error


def _read_line_blocks(path: str, begin: Position, block_bytes: int) -> Iterator[InputBlock]:
    position, parts, size, disk_bytes = begin, list[bytes](), 0, 0

    def make_block(content: bytes) -> InputBlock:
        lines = content.count(b"\n") + (not content.endswith(b"\n"))
        return InputBlock(
            path,
            position.line + 1,
            content,
            Position(begin.file, position.offset + len(content), position.line + lines),
            disk_bytes,
        )

    for piece, disk_bytes in open_lines(path, begin.offset, block_bytes):  # noqa: B007 (make_block reads it)
        cut = piece.rfind(b"\n") + 1
        size += len(piece)
        if (
            cut == 0 or size < block_bytes
        ):  # parts are joined once, so that a line of gigabytes costs no more than its length
            parts.append(piece)
            continue
        made = make_block(b"".join((*parts, piece[:cut])))
        parts, size, position = [piece[cut:]], len(piece) - cut, made.end
        yield made
    if size:
        yield make_block(b"".join(parts))


def _skip_to(pieces: Iterable[bytes], start: int) -> Iterator[bytes]:
    for piece in pieces:
        if start < len(piece):
            yield piece[start:]
        start = max(0, start - len(piece))


def _read_gzip_pieces(raw: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw, mode="rb") as file:
        while piece := file.read(piece_bytes):
            yield piece


def _read_zstd_pieces(raw: BinaryIO, path: str) -> Iterator[bytes]:
    """Frame by frame, because only then a file that is cut off can be told from one that ends."""
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path}: reading .zst needs the package zstandard: pip install zstandard."
        ) from error
    frame, fresh = zstandard.ZstdDecompressor().decompressobj(), True
    try:
        while data := raw.read(_COMPRESSED_BYTES):
            while data:
                piece = frame.decompress(data)
                data, fresh = frame.unused_data, False
                if piece:
                    yield piece
                if not frame.eof:
                    break
                frame, fresh = zstandard.ZstdDecompressor().decompressobj(), True
    except zstandard.ZstdError as error:
        raise DataError(f"{path} cannot be read: {error}. Mend or leave out the file.") from error
    if not fresh:
        raise DataError(f"{path} is cut off: it ends inside a zstd frame. Copy the file again.")


def count_parquet_rows(path: str) -> int:
    with _open_parquet_file(path) as file:
        return file.metadata.num_rows


@contextmanager
def _open_parquet_file(path: str) -> Iterator[Any]:
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
            f"{path} cannot be read as Parquet: {error}. Mend or leave out the file."
        ) from error


def _read_parquet_blocks(
    path: str, keys: Sequence[str], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    with _open_parquet_file(path) as file:
        _check_columns(path, file.schema_arrow, keys)
        disk, first_row = Path(path).stat().st_size, 0
        for group in range(file.metadata.num_row_groups):
            row_group = file.metadata.row_group(group)
            rows, next_row = (
                max(1, row_group.num_rows * block_bytes // max(1, row_group.total_byte_size)),
                first_row,
            )
            first_row += row_group.num_rows
            if first_row <= begin.offset:
                continue
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=list(keys)):
                begin_row, next_row = next_row, next_row + batch.num_rows
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
    for key in keys:
        if key not in schema.names:
            raise DataError(
                f"{path} has no column {key!r}, only {', '.join(schema.names)}; name others with --json-keys."
            )
        kind = schema.field(key).type
        kind = getattr(kind, "value_type", kind)  # a dictionary-encoded column
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DataError(
                f"{path}: column {key!r} holds {kind}, not strings; name others with --json-keys."
            )
