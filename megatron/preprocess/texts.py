"""From a block of lines or rows to texts, and to a report of every line that has none.

Invariant: a line gives one text for each key, or is bad as a whole: the outputs of several keys stay in step.
A blank line is nothing at all, neither a document nor bad.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.preprocess.inputs import InputBlock


@dataclass(frozen=True)
class BadLine:
    """A line (row) that gives no document; `line` counts from 1."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def extract_texts(block: InputBlock, keys: Sequence[str]) -> tuple[list[list[str]], list[BadLine]]:
    """For each key the texts of the block in order, and the bad lines."""
    texts: list[list[str]] = [[] for _ in keys]
    bad: list[BadLine] = []
    rows = (
        _parse_lines(block, keys) if isinstance(block.content, bytes) else _parse_rows(block, keys)
    )
    for line, values in rows:
        if isinstance(values, str):
            bad.append(BadLine(block.path, line, values))
        else:
            for column, value in zip(texts, values, strict=True):
                column.append(value)
    return texts, bad


def _parse_lines(block: InputBlock, keys: Sequence[str]) -> Iterator[tuple[int, list[str] | str]]:
    fast = _import_fast_loads()
    for line, raw in enumerate(block.content.split(b"\n"), block.first_line):
        if raw and not raw.isspace():
            yield line, _parse(raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw, keys, fast)


def _parse(raw: bytes, keys: Sequence[str], fast: Callable[[bytes], Any] | None) -> list[str] | str:
    """The values of the keys, or why there are none. What the fast parser refuses (NaN, say) the standard one decides on."""
    record = _NOTHING
    if fast is not None:
        try:
            record = fast(raw)
        except ValueError:
            record = _NOTHING
    if record is _NOTHING:
        try:
            record = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
    if not isinstance(record, dict):
        return f"must be a JSON object, is {type(record).__name__}"
    values = []
    for key in keys:
        if key not in record:
            return f"no key {key!r}"
        value = record[key]
        if not isinstance(value, str):
            return f"the value of {key!r} is {type(value).__name__}, not a string"
        values.append(value)
    if (
        b"\\ud" in raw or b"\\uD" in raw
    ):  # the only way to half a surrogate pair, which no encoder takes
        try:
            "".join(values).encode("utf-8")
        except UnicodeEncodeError:
            return "holds half a surrogate pair, which is not a character"
    return values


def _parse_rows(block: InputBlock, keys: Sequence[str]) -> Iterator[tuple[int, list[str] | str]]:
    columns = [block.content.column(key).to_pylist() for key in keys]
    for line, values in enumerate(zip(*columns, strict=True), block.first_line):
        empty = [key for key, value in zip(keys, values, strict=True) if value is None]
        yield line, f"the value of {empty[0]!r} is null, not a string" if empty else list(values)


def _import_fast_loads() -> Callable[[bytes], Any] | None:
    try:
        import orjson
    except ImportError:
        return None
    return orjson.loads


_NOTHING: Any = object()
