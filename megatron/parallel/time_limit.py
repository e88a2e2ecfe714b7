"""How the limit of `--distributed-timeout-minutes` is divided."""

from dataclasses import dataclass
from datetime import timedelta

_LONGEST_SECONDS = 10.0
"""The longest time for a roll call, for any `--distributed-timeout-minutes`."""


@dataclass(frozen=True)
class TimeLimit:
    """The limit of `--distributed-timeout-minutes`, divided into two parts.

    After a rank is lost, a collective times out first, and then the roll call takes place.
    """

    minutes: float

    @property
    def roll_call(self) -> timedelta:
        """Time for the roll call and the exit: two fifths of the limit, at most ten seconds."""
        return min(timedelta(seconds=_LONGEST_SECONDS), timedelta(minutes=self.minutes) * 2 / 5)

    @property
    def collective(self) -> timedelta:
        """The time-out of every process group."""
        return timedelta(minutes=self.minutes) - self.roll_call
