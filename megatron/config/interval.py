"""The range of a number. A field of the configuration declares it in its type annotation."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The values that a number may have.

    A field declares it as in `lr: Annotated[float, POSITIVE]`.
    """

    interval: str
    """In mathematical notation: [a, b) contains a but not b."""

    def contains(self, value: float) -> bool:
        """Return whether the value is inside. nan is in no range."""
        low, high = self.parse_bounds()
        above = value > low
        if self.interval.startswith("["):
            above = value >= low
        below = value < high
        if self.interval.endswith("]"):
            below = value <= high
        # All comparisons with nan are false.
        return above and below

    def describe(self) -> str:
        """Return the range in words that complete "must be ..."."""
        low, high = self.parse_bounds()
        if math.isfinite(high):
            lower = "at least" if self.interval.startswith("[") else "above"
            upper = "at most" if self.interval.endswith("]") else "below"
            return f"{lower} {low:.10g} and {upper} {high:.10g}"
        if math.isfinite(low):
            if self.interval.startswith("["):
                return f"at least {low:g}"
            return f"above {low:g}, and finite"
        return "finite"

    def parse_bounds(self) -> tuple[float, float]:
        """Return the lower and the upper bound."""
        low, _, high = self.interval[1:-1].partition(", ")
        return float(low), float(high)


POSITIVE = Range("(0, inf)")
NOT_NEGATIVE = Range("[0, inf)")
PROBABILITY = Range("[0, 1)")
# Above 1e15, the product of a count and a usual sequence length may exceed 64 bits.
COUNT = Range("[1, 1e15]")
WORKERS = Range("[0, 64]")
RANKS = Range("[-1, inf)")
AT_LEAST_ONE = Range("[1, inf)")
FINITE = Range("(-inf, inf)")
