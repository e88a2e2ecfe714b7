"""What makes the short suite short, besides the tests that are marked `full`."""

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import TypeVar

import pytest

_VARIABLE = "TEST_SUITE"
"""Ranks of a test read it too."""
_Value = TypeVar("_Value")


def note_suite(config: pytest.Config) -> None:
    """Tell this process, and those that it starts, which suite runs."""
    os.environ[_VARIABLE] = "short" if "not full" in config.getoption("markexpr") else "full"


def by_suite(short: _Value, full: _Value) -> _Value:
    """Return the first value in the short suite, and the second one otherwise."""
    return short if is_short() else full


def is_short() -> bool:
    """Return whether the short suite runs, and not single tests or the complete suite."""
    return os.environ.get(_VARIABLE) == "short"


def find_unchanged(items: Sequence[pytest.Item], changed: Sequence[str]) -> list[pytest.Item]:
    """Return the tests that are marked `when_changed`, and none of whose files is in a list."""
    return [
        item
        for item in items
        if (mark := item.get_closest_marker("when_changed")) is not None
        and not any(fnmatch(name, pattern) for name in changed for pattern in mark.args)
    ]
