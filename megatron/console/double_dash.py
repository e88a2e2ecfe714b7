"""Splits command lines in which everything after `--` belongs to another program."""

import sys
from collections.abc import Sequence


def split_at_double_dash(argv: Sequence[str] | None) -> tuple[list[str], list[str] | None]:
    """Return the words before the first `--`, and those after it.

    tyro would refuse the flags of the other program, so they are separated first.

    Args:
        argv: The command line. Default: that of this process.

    Returns:
        The words before `--`.
        The words after it, or None if there is no `--`.
    """
    if argv is None:
        words = sys.argv[1:]
    else:
        words = list(argv)
    if "--" not in words:
        return words, None
    end = words.index("--")
    return words[:end], words[end + 1 :]
