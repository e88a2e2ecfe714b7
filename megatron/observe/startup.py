"""The table at the start: which implementations are used, and why.

Invariant: each row gives its reason. A user sees that a slow implementation was chosen.
"""

from collections.abc import Iterable


def format_start_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Format (what, choice, why) rows as one aligned block of lines.

    >>> rows = [("attention", "sdpa", "torch's flash kernel"), ("norm", "torch", "no apex")]
    >>> print(format_start_table(rows))
     in use    | choice | why
     attention | sdpa   | torch's flash kernel
     norm      | torch  | no apex
    """
    table = [("in use", "choice", "why"), *rows]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return "\n".join(
        f" {what:<{widths[0]}} | {choice:<{widths[1]}} | {why}" for what, choice, why in table
    )
