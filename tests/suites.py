"""What the short suite does otherwise than the complete one: its comparisons train fewer steps."""

import os
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
