"""Files that are one JSON array of records.

Invariant: memory holds one block, or one record if it is longer than a block. The text of a record
is passed on as it is, so a record gives the same texts as the same record in a line of its own.
"""

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from megatron.errors import DataError
from megatron.preprocess.blocks import InputBlock, Position

_SPACE = r"[ \t\r\n]*"
# A byte order mark, as it looks when each byte is one character.
_OPENING = re.compile(rf"(?:\xef\xbb\xbf)?{_SPACE}\[{_SPACE}")
_COMMA = re.compile(rf"{_SPACE},{_SPACE}")
_CLOSING = re.compile(rf"{_SPACE}\]{_SPACE}")
_EMPTY = re.compile(rf"{_OPENING.pattern}\]{_SPACE}")
# The longest part of a record that is wrong only because the text ends inside it: an escape with
# two surrogates. A string that does not end is recognised by its message.
_LONGEST_TOKEN = 16
_DECODER = json.JSONDecoder()


def is_array(beginning: bytes) -> bool:
    """Return whether a file that begins with these bytes is a JSON array."""
    return beginning.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").startswith(b"[")


def read_array_blocks(
    path: str, pieces: Iterator[tuple[bytes, int]], begin: Position, block_bytes: int
) -> Iterator[InputBlock]:
    """Yield the records of an array in blocks, one record a line.

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
        # A record that is longer than a piece is tried again only when twice as much is read.
        # Otherwise its time would be quadratic.
        while more and length <= len(rest):
            piece, disk_bytes = next(pieces, (b"", disk_bytes))
            more = bool(piece)
            added.append(piece)
            length += len(piece)
        rest = b"".join((rest, *added))
        # One character for each byte, so that places in the text are places in the file.
        text = rest.decode("latin-1")
        place = 0
        while True:
            at_start = offset + place == 0
            found = _find_record(path, text, place, at_start, more, position.line + len(records))
            if found is None:
                break
            start, place = found
            # Outside of strings a line end is white space, and inside it is not valid JSON.
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
    """Return the first and the last place of the next record, or None if the text has none.

    Args:
        path: The file, for messages.
        text: A part of the file.
        place: Where the last record ended in it.
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
        # The rest of the record may only not have been read yet.
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
