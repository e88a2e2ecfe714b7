"""Formats a count and its noun as text for people."""


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
