"""Formats counts and lists as text for people."""

from collections.abc import Sequence


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
