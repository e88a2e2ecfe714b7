"""Command lines that hold the command line of another program."""

import sys

import pytest

from megatron.console.parse import split_at_double_dash


@pytest.mark.parametrize(
    ("argv", "own", "other"),
    [
        (["--at", "3"], ["--at", "3"], None),
        (["--at", "3", "--", "train.py", "--lr", "1"], ["--at", "3"], ["train.py", "--lr", "1"]),
        (["--"], [], []),
        (["a", "--", "b", "--", "c"], ["a"], ["b", "--", "c"]),
    ],
)
def test_words_are_split_at_the_first_double_dash(
    argv: list[str], own: list[str], other: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert split_at_double_dash(argv) == (own, other)
    monkeypatch.setattr(sys, "argv", ["tool.py", *argv])
    assert split_at_double_dash(None) == (own, other)
