"""The table at the start: what is in use (attention, norm, optimizer, loss, index helpers, backend) and why.

Invariant: the slow choice is said aloud; each row gives its reason.
"""

from collections.abc import Iterable


def format_start_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """(what, choice, why) rows as one aligned block of lines.

    >>> print(format_start_table([("attention", "sdpa", "torch's flash kernel"), ("norm", "torch", "apex is not installed")]))
     in use    | choice | why
     attention | sdpa   | torch's flash kernel
     norm      | torch  | apex is not installed
    """
    table = [("in use", "choice", "why"), *rows]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return "\n".join(
        f" {what:<{widths[0]}} | {choice:<{widths[1]}} | {why}" for what, choice, why in table
    )
