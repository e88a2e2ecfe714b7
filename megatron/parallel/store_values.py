"""Values of the rendezvous store, checked when they are read.

Any process that reaches the port of the store can write any value. Invariants: only a value of
digits in a fixed form becomes a part of a path. A record has the fields and types that a rank of
this program sends. Text is printable and has a limited length.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from megatron.base.plain_text import make_plain, make_plain_lines
from megatron.parallel.rank_progress import RankState

_LONGEST_TEXT = 2_000
"""Characters of a text in a record. The message of a rank's error is the longest one."""
_LONGEST_VERDICT = 20_000
_CALL = re.compile(r"\d{7,15}-\d{8}T\d{6}", re.ASCII)


def make_call_name(iteration: int) -> str:
    """Return the name of a roll call: the iteration of the caller, and the time."""
    return f"{iteration:07d}-{time.strftime('%Y%m%dT%H%M%S')}"


def read_call_name(store: dist.Store, key: str) -> str | None:
    """Return the name that `make_call_name` made, or None if the value is anything else."""
    text = store.get(key).decode(errors="replace")
    if _CALL.fullmatch(text):
        return text
    return None


def read_text(store: dist.Store, key: str) -> str:
    """Return a text of several lines."""
    return make_plain_lines(store.get(key).decode(errors="replace"), _LONGEST_VERDICT)


def parse_answer(data: bytes) -> dict[str, Any] | None:
    """Return the answer of a rank to a roll call, or None if the value is anything else.

    An answer has one of three forms: `at` a line of code, `left` with a reason, or all fields of a
    `RankState`.

    Args:
        data: A value of the store.
    """
    try:
        record = json.loads(data)
        if not isinstance(record, dict) or set(record) not in _FORMS:
            return None
        if all(_CHECKS[name](value) for name, value in record.items()):
            plain = _make_plain_values(record)
            assert isinstance(plain, dict)
            return plain
    # Text that is nested too deeply raises a RecursionError.
    except (ValueError, RecursionError):
        pass
    return None


def parse_seconds(data: bytes) -> float:
    """Return a number of seconds that a rank published, or 0 if the value is anything else."""
    try:
        seconds = float(data)
    except ValueError:
        return 0.0
    return seconds if _is_time(seconds) else 0.0


def parse_state(data: bytes) -> RankState | None:
    """Return the state that a rank published, or None if the value is anything else."""
    answer = parse_answer(data)
    if answer is None or "sequence" not in answer:
        return None
    return RankState(**answer)


def _make_plain_values(value: Any) -> Any:
    if isinstance(value, str):
        return make_plain(value, _LONGEST_TEXT)
    if isinstance(value, list):
        return [_make_plain_values(each) for each in value]
    if isinstance(value, dict):
        return {
            make_plain(key, _LONGEST_TEXT): _make_plain_values(each) for key, each in value.items()
        }
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_time(value: Any) -> bool:
    # nan is less than nothing and not more.
    return type(value) is float and value >= 0


def _is_table(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(check, value.values()))


def _is_last_collective(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and _is_count(value[0]) and _is_text(value[1])
    )


def _is_recent(value: Any) -> bool:
    return _is_table(value, _is_text) and all(re.fullmatch(r"[0-9]{1,18}", key) for key in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "left": _is_text,
    "at": _is_text,
    "waits": lambda value: isinstance(value, bool),
    "phase": _is_text,
    "sequence": _is_count,
    "published": _is_time,
    "limit": _is_time,
    "collectives": lambda value: _is_table(value, _is_last_collective),
    "recent": lambda value: _is_table(value, _is_recent),
    "collective": _is_text,
}
_FORMS = ({"left"}, {"at"}, {field.name for field in fields(RankState)})
