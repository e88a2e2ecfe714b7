"""What the main thread of this rank does, and how long it may take.

The watchdog (`extras/watch/watchdog/watchdog.py`) reads it from another thread. Entering a phase
is a few assignments, so it costs less than a microsecond, also without a watchdog.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LONG_FACTOR = 10.0
"""Phases other than a repeated step may take this many times `--hang-timeout`."""


@dataclass(frozen=True)
class Phase:
    """A part of the run that has a time limit of its own."""

    name: str
    """The phase in words, such as "training iteration 5"."""
    is_repeated: bool = False
    """Whether it is a step like the one before. Every other phase may take LONG_FACTOR as long."""
    is_limited: bool = True
    """Whether it has a limit at all."""
    in_threads: bool = False
    """Whether a thread works on files while the main threads of all ranks wait together."""

    @property
    def factor(self) -> float:
        """The time limit as a multiple of `--hang-timeout`."""
        if not self.is_limited:
            return math.inf
        if self.is_repeated:
            return 1.0
        return LONG_FACTOR


_START = Phase("the start of the run")


class StopRequested(KeyboardInterrupt):
    """All ranks stop waiting for each other, because one of them has received a signal to stop.

    The argument is the signal of this rank, or 0. `except Exception` does not catch this exception.
    """


class RankProgress:
    """The phase of this rank, and whether it must stop. Only the main thread changes it."""

    def __init__(self) -> None:
        """Begin with the start of the run."""
        self.phase = _START
        self.iteration = 0
        """The last iteration that was started. It names the folder of the files about a hang.

        It is 0 until the first one of a launch."""
        self.sequence = 0
        """Number of changes of the phase. It stays the same while the main thread hangs."""
        self._seen: set[str] = set()
        self.stop_signal = 0
        """The signal to stop that this rank has received, or 0."""
        self.may_stop = True
        """Whether a signal ends the waits of `Ranks`. It is True during the start."""
        self.stopped = False
        """Whether a signal has ended what was done in `allow_stop`."""

    @contextmanager
    def allow_stop(self) -> Iterator[None]:
        """Let a signal end what all ranks do in this context. They go on after it."""
        self.may_stop = True
        try:
            yield
        except StopRequested:
            self.stopped = True
        finally:
            self.may_stop = False

    def begin_start(self) -> None:
        """Begin the start of the run again, after a rollback inside the job."""
        self._seen.clear()
        self.may_stop = True
        self._change(_START)

    def begin_step(self, kind: str, number: int) -> None:
        """Begin a step, which lasts until the next one. The first of its kind may take long.

        Args:
            kind: What the step does, such as "training iteration".
            number: Its number.
        """
        self._change(Phase(f"{kind} {number}", is_repeated=kind in self._seen))
        self._seen.add(kind)

    @contextmanager
    def enter(self, phase: Phase) -> Iterator[None]:
        """Enter a phase within the current one. The time of the outer phase starts again after it.

        Args:
            phase: The phase.
        """
        with self.return_after():
            self._change(phase)
            yield

    @contextmanager
    def return_after(self) -> Iterator[None]:
        """Return to the present phase afterwards. Its time starts again then.

        Without it, what follows an evaluation would be in the phase of its last batch.
        """
        outer = self.phase
        try:
            yield
        finally:
            self._change(outer)

    def _change(self, phase: Phase) -> None:
        self.phase = phase
        self.sequence += 1
