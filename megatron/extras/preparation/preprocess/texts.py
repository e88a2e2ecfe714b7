"""From a block of lines or rows to texts, and to a report of every line that has none.

Invariant: a line gives one text for each key, or it is bad for all keys. The outputs of several
keys therefore have the same documents. A blank line is neither a document nor bad.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.base.outside_file import parse_json
from megatron.base.plain_text import format_some
from megatron.extras.preparation.preprocess.inputs import InputBlock, PlainText

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
