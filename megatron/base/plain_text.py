"""Text that was not written by this program, made safe to print.

A terminal obeys control characters. An escape sequence, a carriage return or a line break in the
name of a file could hide a line of a log, or forge one.
"""

import sys
from typing import TextIO


def make_plain(text: object, longest: int | None = None) -> str:
    r"""Return a text on one line, without characters that a terminal obeys.

    White space becomes a space. Every other character that cannot be printed, such as ESC or a mark
    that reverses the direction of the text, is written as an escape: "\x1b".

    Args:
        text: The text, or an object that is printed as text.
        longest: Largest number of characters. The rest is replaced by "...". None: no limit.
    """
    given = str(text)
    if longest is not None and len(given) > longest:
        given = given[:longest] + "..."
    if given.isprintable():
        return given
    return "".join(map(_make_plain_character, given))


def _make_plain_character(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return character.encode("unicode_escape").decode()


def make_plain_lines(text: object, longest: int | None = None) -> str:
    """Return a text of several lines as `make_plain` does, with its line breaks.

    Use it for messages of this program that contain foreign text.
    """
    given = str(text)
    if longest is not None and len(given) > longest:
        given = given[:longest] + "..."
    return "\n".join(map(make_plain, given.split("\n")))


def print_line(line: object, file: TextIO | None = None) -> None:
    """Print a message as `make_plain_lines` returns it, immediately (default: to stdout)."""
    print(make_plain_lines(line), file=file or sys.stdout, flush=True)


def print_to_stderr(line: object) -> None:
    """Print a message as `print_line` does, to standard error."""
    print_line(line, sys.stderr)
