"""Reads files that are one JSON array of records.

Invariant: memory holds one block, or one record if it is longer than a block. The text of a record
is not changed. So an array gives the same texts as a file with the same records in lines.
"""

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from megatron.base.errors import DataError
from megatron.extras.preparation.preprocess.blocks import InputBlock, Position

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
