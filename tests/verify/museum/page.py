"""The tables of `docs/known_errors.md`, written from the museum's errors."""

from collections.abc import Iterator
from itertools import groupby

from verify.museum.errors import ERRORS, KnownError

BEGIN = "<!-- known errors -->"
END = "<!-- end of known errors -->"


def format_tables() -> str:
    """Return a table for each trainer, in the order of their first errors."""
    return "\n".join([BEGIN, *_format_lines(), "", END])


def _format_lines() -> Iterator[str]:
    trainers = [error.trainer for error in ERRORS]
    # The sort keeps the order within a trainer.
    ordered = sorted(ERRORS, key=lambda error: trainers.index(error.trainer))
    for trainer, errors in groupby(ordered, key=lambda error: error.trainer):
        yield f"\n## {trainer}\n"
        yield "| error | what was wrong | what it cost | how long it stood | found here by |"
        yield "|---|---|---|---|---|"
        for error in errors:
            cells = [f"[{error.source}]({make_link(error.source)})", error.wrong, error.cost]
            cells += [format_period(error), format_method(error)]
            yield f"| {' | '.join(cells)} |"


def make_link(source: str) -> str:
    """Return the address of a number or a file of a repository."""
    if ":" in source:
        repository, path = source.split(":")
        return f"https://github.com/{repository}/blob/master/{path}"
    repository, number = source.split("#")
    # GitHub leads from the number of a pull request to it.
    return f"https://github.com/{repository}/issues/{number}"


def format_period(error: KnownError) -> str:
    """Return when the error came and when it was fixed, as far as it is known."""
    begin = error.since or "begin not known"
    if error.until.startswith("reported"):
        return f"{begin}, {error.until}"
    return f"{begin}, to {error.until}"


def format_method(error: KnownError) -> str:
    """Return the method that was written down, and what was found instead."""
    text = f"{error.method}: {error.expected}"
    if error.missed:
        return f"{text}. **Not as written:** {error.missed}"
    return text
