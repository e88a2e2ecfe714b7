"""A few texts from all over the inputs, for trying an encoder on the very corpus.

Invariant: costs a bounded amount of reading whatever the corpus; where a file can be entered anywhere, it is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.preprocess.inputs import (
    InputBlock,
    Position,
    count_parquet_rows,
    open_lines,
    read_blocks,
)
from megatron.preprocess.texts import extract_texts

_SPOTS = 64
_BLOCK_BYTES = 1 << 16
_PIECE_BYTES = 1 << 18
_LONGEST_LINE_BYTES = 1 << 23  # a longer one is not needed for a sample
_CHARS_EACH = 16_000
_CHARS_ALL = 400_000


def sample_texts(paths: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Up to 64 texts, each cut to 16,000 characters, spread evenly over the bytes of all files."""
    sizes = [Path(path).stat().st_size for path in paths]
    total, chosen, chars = sum(sizes), list[str](), 0
    for spot in range(_SPOTS):
        place, file = total * spot // _SPOTS, 0
        while file < len(paths) - 1 and place >= sizes[file]:
            place, file = place - sizes[file], file + 1
        texts = next(_read_texts_at(paths[file], place, sizes[file], spot, keys), None)
        if texts is not None and chars < _CHARS_ALL:
            chosen += [text[:_CHARS_EACH] for text in texts]
            chars += sum(min(len(text), _CHARS_EACH) for text in texts)
    return list(dict.fromkeys(chosen))


def _read_texts_at(
    path: str, place: int, size: int, spot: int, keys: Sequence[str]
) -> Iterator[list[str]]:
    """The texts of one line at or after a place in a file, a list with one for each key."""
    for block in _read_block_at(path, place, size, keys):
        columns, _ = extract_texts(block, keys)
        if columns and columns[0]:
            row = spot % len(columns[0])
            yield [column[row] for column in columns]


def _read_block_at(path: str, place: int, size: int, keys: Sequence[str]) -> Iterator[InputBlock]:
    if path.endswith(".parquet"):
        row = count_parquet_rows(path) * place // max(1, size)
        yield from read_blocks([path], keys, Position(0, row, row), _BLOCK_BYTES)
        return
    if path.endswith(
        (".gz", ".zst")
    ):  # entered at the beginning only; different lines of it are taken
        yield from read_blocks([path], keys, block_bytes=_BLOCK_BYTES)
        return
    content, found = b"", place == 0
    for piece, _ in open_lines(path, place, _PIECE_BYTES):
        content += piece
        if not found and b"\n" in content:
            content, found = content.split(b"\n", 1)[1], True
        if found and b"\n" in content:
            yield InputBlock(path, 2, content[: content.rindex(b"\n")], Position(), 0)
            return
        if len(content) > _LONGEST_LINE_BYTES:
            return
    if found and content:
        yield InputBlock(path, 2, content, Position(), 0)
