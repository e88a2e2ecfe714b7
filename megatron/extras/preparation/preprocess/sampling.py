"""A few texts from all parts of the inputs, to try an encoder on the corpus itself.

Invariant: the amount of reading is bounded, whatever the size of the corpus. Files that can be
entered at any byte are entered there.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.extras.preparation.preprocess.input_files import (
    InputFormat,
    find_format,
    is_compressed,
)
from megatron.extras.preparation.preprocess.inputs import (
    InputBlock,
    Position,
    count_rows,
    is_array_file,
    open_lines,
    read_blocks,
)
from megatron.extras.preparation.preprocess.texts import extract_texts

# Spots from the first byte of the inputs to the last one. One text is taken at each.
_SPOTS = 64
_BLOCK_BYTES = 1 << 16
_PIECE_BYTES = 1 << 18
# The search for the end of a longer line is given up. The spot then gives no sample.
_LONGEST_LINE_BYTES = 1 << 23
_CHARS_EACH = 16_000
_CHARS_ALL = 400_000


def sample_texts(paths: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return up to 64 texts, spread evenly over the bytes of all files.

    Each text is truncated to 16,000 characters, and all together have about 400,000.

    Args:
        paths: The input files.
        keys: The keys of the texts in a record.
    """
    sizes = [Path(path).stat().st_size for path in paths]
    total = sum(sizes)
    chosen = list[str]()
    chars = 0
    # Several spots of such a file read the same block, which may be one very long line.
    begin = functools.cache(lambda path: _read_first_columns(path, keys))
    for spot in range(_SPOTS):
        place = total * spot // _SPOTS
        file = 0
        # `place` is a byte of all files end to end. The loop finds the file that holds it.
        while file < len(paths) - 1 and place >= sizes[file]:
            place = place - sizes[file]
            file = file + 1
        if _has_one_entry(paths[file]):
            texts = _choose_row(begin(paths[file]), spot)
        else:
            texts = next(_read_texts_at(paths[file], place, sizes[file], spot, keys), None)
        if texts is not None and chars < _CHARS_ALL:
            chosen += [text[:_CHARS_EACH] for text in texts]
            chars += sum(min(len(text), _CHARS_EACH) for text in texts)
    # Small files give the same line at several spots. dict keeps the order and drops repetitions.
    return list(dict.fromkeys(chosen))


def _has_one_entry(path: str) -> bool:
    """Return whether records of a file can be read from its beginning only."""
    if find_format(path) in (InputFormat.TEXT, InputFormat.PARQUET, InputFormat.ARROW):
        return False
    return is_compressed(path) or is_array_file(path)


def _read_first_columns(path: str, keys: Sequence[str]) -> list[list[str]]:
    """Return the texts of the first block with any, a list for each key. It may be empty."""
    for block in read_blocks([path], keys, block_bytes=_BLOCK_BYTES):
        columns, _ = extract_texts(block, keys)
        if columns and columns[0]:
            return columns
    return []


def _choose_row(columns: list[list[str]], spot: int) -> list[str] | None:
    """Return one text of each column, another one for each spot."""
    if not columns:
        return None
    row = spot % len(columns[0])
    return [column[row] for column in columns]


def _read_texts_at(
    path: str, place: int, size: int, spot: int, keys: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the texts of one line at or after a byte of a file, as a list with one for each key."""
    if find_format(path) is InputFormat.TEXT:
        yield [_read_passage_at(path, place)] * len(keys)
        return
    for block in _read_block_at(path, place, size, keys):
        columns, _ = extract_texts(block, keys)
        if columns and columns[0]:
            texts = _choose_row(columns, spot)
            assert texts is not None, "there is a column"
            yield texts


def _read_passage_at(path: str, place: int) -> str:
    """Return some text of a file of plain text, which begins near a byte."""
    if is_compressed(path):
        place = 0
    piece, _ = next(open_lines(path, place, _BLOCK_BYTES), (b"", 0))
    # The byte may be inside a character. The incomplete character is left out.
    return piece[:_BLOCK_BYTES].decode("utf-8", errors="ignore")


def _read_block_at(path: str, place: int, size: int, keys: Sequence[str]) -> Iterator[InputBlock]:
    """Yield the block with the first complete line at or after a byte of a file."""
    if find_format(path) in (InputFormat.PARQUET, InputFormat.ARROW):
        # Tables are entered by row, so the byte is converted to a row.
        row = count_rows(path) * place // max(1, size)
        yield from read_blocks([path], keys, Position(0, row, row), _BLOCK_BYTES)
        return
    content = b""
    found = place == 0
    for piece, _ in open_lines(path, place, _PIECE_BYTES):
        content += piece
        # The byte is usually inside a line, of which only a part would be read. Skip to the next.
        if not found and b"\n" in content:
            content = content.split(b"\n", 1)[1]
            found = True
        if found and b"\n" in content:
            yield InputBlock(path, 2, content[: content.rindex(b"\n")], Position(), 0)
            return
        if len(content) > _LONGEST_LINE_BYTES:
            return
    # The last line of a file may have no newline.
    if found and content:
        yield InputBlock(path, 2, content, Position(), 0)
