"""Ranges of iterations whose batches are dropped without training on them.

Invariant: parsed ranges are inclusive and sorted, and neither overlap nor touch. An iteration is in
at most one of them.
"""

import re
from collections.abc import Sequence

from megatron.base.errors import ConfigError

SkipRange = tuple[int, int]


def parse_ranges(texts: tuple[str, ...]) -> tuple[SkipRange, ...]:
    """Read ('8401-8800', '9001-9100') into sorted, merged (first, last) pairs.

    Both ends are inclusive and 1-based. Ranges that overlap or touch (8401-8800 8801-9000) become
    one.

    Raises:
        ConfigError: a text is not FIRST-LAST.
    """
    return merge_ranges([parse_range(text, "--skip-train-iteration-range") for text in texts])


def merge_ranges(ranges: Sequence[SkipRange]) -> tuple[SkipRange, ...]:
    """Return the iterations of all ranges as sorted ranges that neither overlap nor touch."""
    merged: list[SkipRange] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            # The earlier range may end later, because ranges are sorted by their first iteration.
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def parse_range(text: str, flag: str) -> tuple[int, int]:
    """Return (first, last) of one range of iterations.

    Args:
        text: FIRST-LAST.
        flag: The flag, for the message.

    Raises:
        ConfigError: The text is not FIRST-LAST.
    """
    match = re.fullmatch(r"(\d[\d_]*)-(\d[\d_]*)", text.strip())
    # (0, 0) fails the next check, so a text that does not match gets the same message.
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"{flag} '{text}' is not FIRST-LAST with 1 <= FIRST <= LAST (iterations, both "
            "included); write it as in 8401-8800."
        )
    return first, last


def find_range(ranges: tuple[SkipRange, ...], iteration: int) -> SkipRange | None:
    """Return the range that contains `iteration` (1-based), or None."""
    return next((r for r in ranges if r[0] <= iteration <= r[1]), None)
