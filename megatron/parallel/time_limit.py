"""The time-outs that follow from `--distributed-timeout-minutes` and `--hang-timeout`.

Also the wait for an asynchronous collective, in a function that the watchdog can recognise.
"""

from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from megatron.parallel.rank_progress import LONG_FACTOR


def wait_for(work: dist.Work) -> None:
    """Wait until a collective is done.

    `Work.wait` has no frame of Python. Without this function, a rank that waits would look like one
    that computes.
    """
    work.wait()


def is_waiting(frame: FrameType) -> bool:
    """Return whether a frame is that of `wait_for`."""
    return frame.f_code is wait_for.__code__


_LONGEST_SECONDS = 10.0
"""The longest time for a roll call, for any `--distributed-timeout-minutes`."""


@dataclass(frozen=True)
class TimeLimit:
    """The limit of `--distributed-timeout-minutes`, divided into two parts.

    After a rank is lost, a collective times out first, and then the roll call takes place.
    """

    minutes: float
    hang_timeout: float | None = None
    """Seconds of `--hang-timeout`, if the ranks are watched."""

    @property
    def roll_call(self) -> timedelta:
        """Time for the roll call and the exit: two fifths of the limit, at most ten seconds."""
        return min(timedelta(seconds=_LONGEST_SECONDS), timedelta(minutes=self.minutes) * 2 / 5)

    @property
    def collective(self) -> timedelta:
        """The time-out of every process group.

        It is longer than the limit of every phase. The watchdog then names a rank first. NCCL would
        end the process without a name.
        """
        limit = timedelta(minutes=self.minutes) - self.roll_call
        if self.hang_timeout is None:
            return limit
        return max(limit, timedelta(seconds=LONG_FACTOR * self.hang_timeout) + self.roll_call)
