"""What operators of a training step do, and the names of the parts of a step.

This module imports no torch. `operator_counter.py` counts.
"""

from dataclasses import dataclass

PRODUCTS = "products"
ATTENTION = "attention kernel, forward"
ATTENTION_BACKWARD = "attention kernel, backward"


@dataclass(frozen=True)
class Case:
    """A step whose operators are counted."""

    flags: str
    microbatches: int


@dataclass(frozen=True)
class Work:
    """What an operator does, in all of its calls."""

    reads: int = 0
    """Bytes."""
    writes: int = 0
    """Bytes."""
    flops: int = 0
    calls: int = 0

    def __add__(self, other: "Work") -> "Work":
        """Return the sum."""
        return Work(
            self.reads + other.reads,
            self.writes + other.writes,
            self.flops + other.flops,
            self.calls + other.calls,
        )

    def times(self, factor: int) -> "Work":
        """Return the work of repeating it."""
        return Work(
            factor * self.reads, factor * self.writes, factor * self.flops, factor * self.calls
        )

    def __sub__(self, other: "Work") -> "Work":
        """Return the difference."""
        return self + other.times(-1)


Counts = dict[tuple[str, str], Work]
"""(part of the step, operator) -> its work."""
