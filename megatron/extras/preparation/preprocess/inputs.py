"""Reads the input files in blocks of complete lines or rows, and the texts of a block.

Invariant: memory holds one block, or one line or record if it is longer than a block. A later run
can continue where a block ends. Rows that an earlier run has read are not decoded again.

A file of plain text is one document. All other files have records with keys. A record is a row of a
table, an item of a JSON array, or a line of any other file. Files may be compressed as .gz or .zst.
The text of an item is not changed, so an array gives the same texts as the same records in lines.

A line gives one text for each key, or it is bad for all keys. The outputs of several keys therefore
have the same documents. A blank line is neither a document nor bad.
"""

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import numpy as np

from megatron.base.errors import DataError
from megatron.base.outside_file import open_regular, parse_json
from megatron.base.plain_text import format_bytes, format_some
from megatron.extras.preparation.preprocess.input_files import (
    InputFormat,
    find_format,
    is_compressed,
)
from megatron.extras.samples.stream.table_files import FileTable, open_arrow, open_parquet

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Position:
    """The place at which the next block begins.

    Attributes:
        file: Number of the input file.
        offset: Offset in this file, in bytes of the decompressed text or in rows of a table.
        line: Number of lines, rows or records before this place.
    """

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class PlainText:
    """The content of a file that is one document."""

    content: bytes


@dataclass(frozen=True)
class InputBlock:
    """Complete lines or rows of one file.

    Attributes:
        path: The file.
        first_line: Number of the first line, from 1.
        content: JSON records as bytes, one per line. Or rows as a pyarrow RecordBatch. Or a
            `PlainText`.
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


_SPACE = r"[ \t\r\n]*"
# It may start with a byte order mark, here with one character for each byte.
_OPENING = re.compile(rf"(?:\xef\xbb\xbf)?{_SPACE}\[{_SPACE}")
_COMMA = re.compile(rf"{_SPACE},{_SPACE}")
_CLOSING = re.compile(rf"{_SPACE}\]{_SPACE}")
_EMPTY = re.compile(rf"{_OPENING.pattern}\]{_SPACE}")
# The decoder reports an error if the text ends inside a record. Except for strings, which have a
# message of their own, such an error is within this many characters of the end. The longest case is
# an escape with two surrogates.
_LONGEST_TOKEN = 16
# Decoding a record takes several times its memory. The limit is that of a file of plain text.
_LONGEST_RECORD_BYTES = 1 << 28
_DECODER = json.JSONDecoder()


def is_array(beginning: bytes) -> bool:
    """Return whether a file that begins with these bytes is a JSON array."""
    return beginning.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").startswith(b"[")


def read_array_blocks(
    path: str, pieces: Iterator[tuple[bytes, int]], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the records of an array in blocks, one record per line.

    Args:
        path: The file, for messages.
        pieces: The bytes of the file from `begin` on, and how far into the file on disk each piece
            reaches.
        begin: The beginning of the file, or the end of a record.
        block_bytes: The approximate size of a block.

    Raises:
        DataError: the file is not a JSON array.
    """
    position = begin
    records = list[bytes]()
    size = 0
    rest = b""
    # The offset of `rest` in the file.
    offset = begin.offset
    disk_bytes = 0
    more = True

    def make_block(end: int) -> InputBlock:
        line = position.line + len(records)
        content = b"\n".join(records)
        first = position.line + 1
        return InputBlock(path, first, content, Position(begin.file, end, line), disk_bytes)

    while more:
        # All complete records were taken out of it.
        if len(rest) > _LONGEST_RECORD_BYTES:
            longest = format_bytes(_LONGEST_RECORD_BYTES)
            _fail(path, position.line + len(records), f"a record has more than {longest}")
        added = list[bytes]()
        length = 0
        # A record may be longer than a piece. It is decoded again only when twice as much text was
        # read. Otherwise the time for a record would be quadratic in its length.
        while more and length <= len(rest):
            piece, disk_bytes = next(pieces, (b"", disk_bytes))
            more = bool(piece)
            added.append(piece)
            length += len(piece)
        rest = b"".join((rest, *added))
        # latin-1 gives one character for each byte, so that positions in the text are positions in
        # the file.
        text = rest.decode("latin-1")
        place = 0
        while True:
            at_start = offset + place == 0
            found = _find_record(path, text, place, at_start, more, position.line + len(records))
            if found is None:
                break
            start, place = found
            # JSON allows a line end outside of strings only, where it is white space.
            records.append(rest[start:place].replace(b"\n", b" "))
            size += place - start
            if size >= block_bytes:
                block = make_block(offset + place)
                position = block.end
                records = []
                size = 0
                yield block
        rest = rest[place:]
        offset += place
    if records:
        yield make_block(offset)
    text = rest.decode("latin-1")
    ending = _EMPTY if offset == 0 else _CLOSING
    if not ending.fullmatch(text):
        _fail(path, position.line + len(records), "the array is not closed, or text follows it")


def _find_record(
    path: str, text: str, place: int, at_start: bool, more: bool, records: int
) -> tuple[int, int] | None:
    """Return the start and the end of the next record, or None if the text has no complete one.

    Args:
        path: The file, for messages.
        text: A part of the file.
        place: The position in `text` where the last record ended.
        at_start: Whether `place` is the beginning of the file.
        more: Whether the file has more text.
        records: Number of records before this one, for messages.
    """
    if at_start:
        leading = _OPENING.match(text, place)
    else:
        leading = _COMMA.match(text, place)
    if leading is None or leading.end() == len(text):
        return None
    start = leading.end()
    if at_start and text[start] == "]":
        return None
    try:
        _, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        # It is not an error if only the rest of the record was not read yet.
        unfinished = (
            error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_TOKEN
        )
        if more and unfinished:
            return None
        _fail(path, records, error.msg)
    except RecursionError:
        _fail(path, records, "it is nested too deeply")
    # A number at the end of the text may have more digits.
    if more and end == len(text):
        return None
    return start, end


def _fail(path: str, records: int, reason: str) -> NoReturn:
    """Raise the error for a file that is not an array."""
    raise DataError(
        f"{path} is not a JSON array of records: {reason} (after {records} records). Fix the file. "
        "A file with a record in each line must begin with '{'."
    )


# Read at once from a .zst. It bounds how much text one step of decompression can give.
_COMPRESSED_BYTES = 1 << 16
_BEGINNING = Position()
_NEWLINE = ord("\n")
# Read to find out whether a file is a JSON array.
_BEGINNING_BYTES = 1 << 12
# A file of plain text is one document, which is encoded at once.
_LONGEST_TEXT_BYTES = 1 << 28
_LONGEST_LINE_BYTES = 1 << 30


def read_blocks(
    paths: Sequence[str],
    keys: Sequence[str],
    start: Position = _BEGINNING,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[InputBlock]:
    """Yield all blocks from `start` on.

    Args:
        paths: The input files.
        keys: The keys of the texts. In tables only these columns are read.
        start: Where to begin.
        block_bytes: The approximate size of a block.

    Raises:
        DataError: a file cannot be read, is truncated, or has no column for a key. Or a file of
            plain text is too long, or is read with several keys.
    """
    # Files before the start are not opened at all.
    for number in range(start.file, len(paths)):
        if number == start.file:
            begin = start
        else:
            begin = Position(number)
        yield from _read_file_blocks(paths[number], keys, begin, block_bytes)


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
        with open_regular(path) as raw:
            if is_compressed(path):
                if path.lower().endswith(".gz"):
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


def is_array_file(path: str) -> bool:
    """Return whether a file is one JSON array, which its beginning shows."""
    beginning, _ = next(open_lines(path, 0, _BEGINNING_BYTES), (b"", 0))
    return is_array(beginning)


def _read_file_blocks(
    path: str, keys: Sequence[str], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the blocks of one file with the reader of its format."""
    format = find_format(path)
    if format in (InputFormat.PARQUET, InputFormat.ARROW):
        return _read_table_blocks(path, keys, begin, block_bytes)
    if format is InputFormat.TEXT:
        return _read_text_block(path, keys, begin)
    if is_array_file(path):
        pieces = open_lines(path, begin.offset, block_bytes)
        return read_array_blocks(path, pieces, begin, block_bytes)
    return _read_line_blocks(path, begin, block_bytes)


def _read_text_block(path: str, keys: Sequence[str], begin: Position) -> Iterator[InputBlock]:
    """Yield the only block of a file of plain text. Yield nothing if an earlier run has read it."""
    if begin.line:
        return
    if len(keys) > 1:
        raise DataError(
            f"{path} is plain text, which has one text, but --json-keys names {len(keys)}: "
            f"{' '.join(keys)}. Give one key, or leave out the file."
        )
    parts = list[bytes]()
    size = 0
    disk_bytes = 0
    for piece, disk_bytes in open_lines(path):  # noqa: B007 (the last value is used below)
        parts.append(piece)
        size += len(piece)
        if size > _LONGEST_TEXT_BYTES:
            raise DataError(
                f"{path} has more than {format_bytes(_LONGEST_TEXT_BYTES)}. A file of plain text "
                "is one document. Split it into files, or write one JSON record for each document "
                'into a .jsonl file: {"text": "..."}.'
            )
    yield InputBlock(path, 1, PlainText(b"".join(parts)), Position(begin.file, size, 1), disk_bytes)


def _read_line_blocks(path: str, begin: Position, block_bytes: int) -> Iterator[InputBlock]:
    """Yield the complete lines of a file from a position on, in blocks."""
    position = begin
    parts = list[bytes]()
    size = 0
    disk_bytes = 0

    def make_block(content: bytes) -> InputBlock:
        # NumPy counts several times faster than `bytes.count`.
        newlines = int(np.count_nonzero(np.frombuffer(content, np.uint8) == _NEWLINE))
        # The last line of a file may have no newline.
        lines = newlines + (not content.endswith(b"\n"))
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
        if size - cut > _LONGEST_LINE_BYTES:
            raise DataError(
                f"{path} has a line of more than {format_bytes(_LONGEST_LINE_BYTES)} after line "
                f"{position.line}. It may have no lines. Fix or leave out the file."
            )
        if cut == 0 or size < block_bytes:
            parts.append(piece)
            continue
        made = make_block(b"".join((*parts, memoryview(piece)[:cut])))
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


def open_table(path: str) -> AbstractContextManager[FileTable]:
    """Open a Parquet or an Arrow file."""
    if find_format(path) is InputFormat.PARQUET:
        return open_parquet(path)
    return open_arrow(path)


def count_rows(path: str) -> int:
    """Return the number of rows of a table."""
    with open_table(path) as table:
        return table.count_rows()


def _read_table_blocks(
    path: str, keys: Sequence[str], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the rows of a table from a position on, in blocks."""
    with open_table(path) as table:
        _check_columns(path, table.schema, keys)
        for first_row, batch, place in table.read_rows(keys, begin.offset, block_bytes):
            end = first_row + batch.num_rows
            yield InputBlock(path, first_row + 1, batch, Position(begin.file, end, end), place)


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


# A record may have thousands of keys. A message names this many.
_NAMED_KEYS = 8


@dataclass(frozen=True)
class BadLine:
    """A line (or row) that gives no document. `line` counts from 1."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        """Return path, line and reason, as compilers print them."""
        return f"{self.path}:{self.line}: {self.reason}"


def extract_texts(block: InputBlock, keys: Sequence[str]) -> tuple[list[list[str]], list[BadLine]]:
    """Return the texts of a block and its bad lines.

    Args:
        block: Lines or rows of one file.
        keys: The keys of the texts in a record.

    Returns:
        For each key the texts in order, and the bad lines.
    """
    texts: list[list[str]] = [[] for _ in keys]
    bad: list[BadLine] = []
    for line, values in _parse_block(block, keys):
        if isinstance(values, str):
            bad.append(BadLine(block.path, line, values))
        else:
            for column, value in zip(texts, values, strict=True):
                column.append(value)
    return texts, bad


def list_text_lines(block: InputBlock, keys: Sequence[str]) -> list[int]:
    """Return the number of the line of each text that `extract_texts` returns."""
    return [line for line, values in _parse_block(block, keys) if not isinstance(values, str)]


def _parse_block(block: InputBlock, keys: Sequence[str]) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the number of each line or row, with its texts or why it is bad."""
    if isinstance(block.content, bytes):
        return _parse_lines(block, keys)
    if isinstance(block.content, PlainText):
        return _parse_plain_text(block.content, keys)
    return _parse_rows(block, keys)


def _parse_lines(block: InputBlock, keys: Sequence[str]) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the number of each line that is not blank, with its texts or why it is bad."""
    fast = _import_fast_loads()
    for line, raw in enumerate(block.content.split(b"\n"), block.first_line):
        if raw and not raw.isspace():
            # Only the first line of a file can begin with a byte order mark.
            yield line, _parse(raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw, keys, fast)


def _parse(raw: bytes, keys: Sequence[str], fast: Callable[[bytes], Any] | None) -> list[str] | str:
    """Return the values of the keys, or the reason why the line is bad.

    The standard parser decides on whatever the fast parser rejects, such as NaN.
    """
    if fast is not None:
        with contextlib.suppress(ValueError):
            return _pick_values(fast(raw), keys)
    try:
        record = parse_json(raw.decode("utf-8"))
    except ValueError as error:
        return f"not JSON: {error} (a file of plain text needs the suffix .txt, .text or .md)"
    values = _pick_values(record, keys)
    # Only here, because the fast parser rejects half surrogate pairs.
    if isinstance(values, list) and _has_half_surrogate_pair(values):
        return "holds half a surrogate pair, which is not a character"
    return values


def _pick_values(record: Any, keys: Sequence[str]) -> list[str] | str:
    """Return the texts of the keys, or the reason why the record has none."""
    if not isinstance(record, dict):
        return f"must be a JSON object, is {type(record).__name__}"
    values = []
    for key in keys:
        if key not in record:
            return f"no key {key!r}, only {_name_keys(record)}; name others with --json-keys"
        value = record[key]
        if value is None:
            return _describe_null(key)
        if not isinstance(value, str):
            return f"the value of {key!r} is {type(value).__name__}, not a string"
        values.append(value)
    return values


def _name_keys(record: dict[str, Any]) -> str:
    """Return the keys of a record for a message, those with texts first."""
    keys = sorted(record, key=lambda key: not isinstance(record[key], str))
    return format_some(map(repr, keys), _NAMED_KEYS) or "an empty object"


def _has_half_surrogate_pair(values: Sequence[str]) -> bool:
    """Return whether a text has half a surrogate pair, which no encoder accepts."""
    try:
        "".join(values).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _parse_rows(block: InputBlock, keys: Sequence[str]) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the number of each row, with its texts or the reason why it is bad."""
    columns = [block.content.column(key).to_pylist() for key in keys]
    for line, values in enumerate(zip(*columns, strict=True), block.first_line):
        empty = [key for key, value in zip(keys, values, strict=True) if value is None]
        yield line, _describe_null(empty[0]) if empty else list(values)


def _describe_null(key: str) -> str:
    """Return why a line is bad whose text is null, in each format."""
    return f"the value of {key!r} is null, not a string"


def _parse_plain_text(
    text: PlainText, keys: Sequence[str]
) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the only text of a file. White space alone is no document, like a blank line."""
    content = text.content.removeprefix(b"\xef\xbb\xbf")
    if not content or content.isspace():
        return
    try:
        yield 1, [content.decode("utf-8")] * len(keys)
    except UnicodeDecodeError as error:
        yield 1, f"not UTF-8 text: {error}"


def _import_fast_loads() -> Callable[[bytes], Any] | None:
    """Return orjson's parser if it is installed, since it is several times faster."""
    try:
        import orjson
    except ImportError:
        return None
    return orjson.loads
