"""Formats counts and lists as text for people."""

from collections.abc import Iterable, Sequence


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, as in "1 file" and "2 files".

    Args:
        number: How many.
        noun: The word for one.
        plural: The word for several. Default: `noun` with an s.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"


def format_alternatives(options: Sequence[object]) -> str:
    """Format a list of alternatives, as in '1, 2 or 4'."""
    words = [str(option) for option in options]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def format_some(items: Iterable[object], shown: int = 3) -> str:
    """Join the first items and count the others, as in 'a, b, c and 110 more'.

    A message with thousands of file names could not be read.
    """
    words = [str(item) for item in items]
    text = ", ".join(words[:shown])
    if len(words) > shown:
        text += f" and {len(words) - shown:,} more"
    return text
