"""What the main thread of this rank does, and how long it may take.

Its phase is a `RankProgress`, which the watchdog (`extras/watch/watchdog/watchdog.py`) reads from
another thread. Entering a phase
is a few assignments, so it costs less than a microsecond, also without a watchdog.
"""

import math
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron.base.code_version import PACKAGE

LONG_FACTOR = 10.0
"""Phases other than a repeated step may take this many times `--hang-timeout`."""
SLOWEST_FACTOR = 3.0
"""With `--hang-timeout auto`, a phase or part may take this many times as long as the
slowest one so far."""
PART_SECONDS = 20.0
"""What a part of a step may take in addition: a microbatch, a reduction, an optimizer."""
PHASE_SECONDS = 300.0
"""What everything else may take in addition. A file system may not answer for minutes."""
FIRST_SECONDS = 1800.0
"""What the first one of a kind may take, and a compilation."""


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
    stage: str = ""
    """What distinguishes it from other phases with the same name, which may be shorter."""

    @property
    def is_step(self) -> bool:
        """Whether it is a training step."""
        return self.name.startswith(TRAINING)

    @property
    def kind(self) -> str:
        """The name without numbers, and the stage. Phases that do the same have the same kind."""
        return _NUMBER.sub("", self.name) + self.stage

    @property
    def factor(self) -> float:
        """The time limit as a multiple of `--hang-timeout`."""
        if not self.is_limited:
            return math.inf
        if self.is_repeated:
            return 1.0
        return LONG_FACTOR


TRAINING = "training iteration"
"""What a training step does. Its number follows."""
_NUMBER = re.compile(r"\d+")
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
        self.part = ""
        """The part of a step that computes, such as "microbatch 3". Empty between such parts."""
        self.marks = 0
        """Number of changes of the phase or the part."""
        self.completed: dict[str, float] = {}
        """Kind of a phase that was entered and left -> seconds of its longest work in a thread.

        That work may have started before the phase."""
        self._seen: dict[str, int] = {}
        """Kind of a step -> its largest size so far."""
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

    def begin_step(self, kind: str, number: int, size: int = 0) -> None:
        """Begin a step, which lasts until the next one. The first of its kind may take long.

        Args:
            kind: What the step does, such as "training iteration".
            number: Its number.
            size: Its tokens. A step that is larger than all before it counts as a first one.
        """
        self._change(Phase(f"{kind} {number}", is_repeated=size <= self._seen.get(kind, -1)))
        self._seen[kind] = max(size, self._seen.get(kind, 0))

    def begin_part(self, part: str) -> None:
        """Begin a part of the present phase, which lasts until the next part or phase.

        Args:
            part: What it does, or nothing if the phase goes on without parts.
        """
        self.part = part
        self.marks += 1

    @contextmanager
    def enter(self, phase: Phase) -> Iterator[None]:
        """Enter a phase within the current one. The time of the outer phase starts again after it.

        Args:
            phase: The phase.
        """
        with self.return_after():
            self._change(phase)
            yield
            self.completed.setdefault(phase.kind, 0.0)

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
        self.begin_part("")


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


FILE_THREAD = "files"
"""Name of the threads in which a rank works on files while the ranks wait together."""
FLIGHT_RECORDER_ENTRIES = 1000
"""Number of collectives that torch's flight recorder keeps, with a watchdog."""


@dataclass(frozen=True)
class RankState:
    """What a rank does. It is sent as JSON through the store."""

    at: str
    """The line of this package, like `run/loop.py:102 train_iteration`."""
    waits: bool
    """Whether it waits for other ranks in a collective."""
    phase: str
    sequence: int
    """Number of changes of the phase so far."""
    collectives: dict[str, list[Any]] = field(default_factory=dict)
    """The last collective of each group: its number in the group, and the operation with sizes."""
    published: float = 0.0
    """The time of this rank's clock, in seconds since 1970."""
    limit: float = 0.0
    """Seconds that the phase may take, with `--hang-timeout auto`."""
    recent: dict[str, dict[str, str]] = field(default_factory=dict)
    """The last few collectives of each group: number -> operation with sizes."""
    collective: str = ""
    """The last collective of all groups in words, or nothing if it is not known."""


def find_location(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost frame of this package, like `run/loop.py:102 train_iteration`.

    Args:
        frames: Frames and their line numbers, the outermost first.
    """
    here = "outside of this program"
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        # Lines inside torch say little. The caller in this package says what was done.
        if path.is_relative_to(PACKAGE) and not is_waiting(frame):
            here = f"{path.relative_to(PACKAGE)}:{line} {frame.f_code.co_name}"
    return here


def locate_thread(thread: int) -> str:
    """Return the line of this package at which a thread is."""
    frame = sys._current_frames().get(thread)
    return find_location(reversed(list(traceback.walk_stack(frame))))
