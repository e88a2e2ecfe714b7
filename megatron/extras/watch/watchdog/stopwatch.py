"""How long the present phase of this rank has lasted, and how long it may last.

With a number of `--hang-timeout`, the limit is that number, or ten times as much. With auto, it
follows from what parts of the same kind have needed. What has no history may take FIRST_SECONDS,
but only PHASE_SECONDS if no rank works.

Invariant: only time in which this process ran counts. After a machine was suspended and resumed, no
phase has exceeded its limit.
"""

import contextlib
import math
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from megatron.base.outside_file import load_text
from megatron.parallel.rank_progress import (
    FIRST_SECONDS,
    PART_SECONDS,
    PHASE_SECONDS,
    SLOWEST_FACTOR,
    RankProgress,
)

_STEPS = 100
"""The slowest part of this many training steps counts. Of other phases it is the slowest of all."""
_FIRST_STEPS = 2
"""The first steps count only until there are more. They compile and allocate."""
_COMPILERS = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "triton/compiler/compiler.py",
)
"""Files of which no function is on the stack while compiled code runs."""
_QUIET_SHARE = 0.2
"""In the first of a kind, a rank that is silent for this part of PHASE_SECONDS does not run."""
_THREADS = Path("/proc/self/task")


def is_compiling() -> bool:
    """Return whether a thread of this process compiles. A backward pass has its own thread."""
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            if at.f_code.co_filename.endswith(_COMPILERS):
                return True
            at = at.f_back  # type: ignore[assignment]
    return False


class Stopwatch:
    """Measures the present phase, in the thread that watches it."""

    def __init__(self, progress: RankProgress, hang_timeout: float | None, interval: float) -> None:
        """Start at the current phase.

        Args:
            progress: The phases of this rank.
            hang_timeout: Seconds that a step may take. None: auto.
            interval: Seconds between two calls of `tick`.
        """
        self._progress = progress
        self._hang_timeout = hang_timeout
        self._longest_tick = 4 * interval
        self._last: float | None = None
        # A limit that was found for a phase must not become that of the next one.
        self._lock = threading.Lock()
        self._work: list[str] = []
        self._worked_at = 0.0
        """Seconds of the phase at which a thread was last seen to work."""
        self._slowest: dict[str, dict[int, float]] = {}
        """Kind -> iteration -> seconds of the slowest one in this iteration."""
        self._first = 0
        """The first iteration of this launch."""
        self.seconds = 0.0
        """Seconds for which the phase or part has lasted."""
        self.limit = 0.0
        """Seconds that it may take."""
        self.own_limit = 0.0
        """Seconds that it may take, whatever the other ranks do."""
        self.silent_limit = 0.0
        """Seconds that it may take if a rank publishes nothing."""
        self._begin()

    def tick(self, now: float) -> None:
        """Add the time since the last call, or begin again if the phase has changed.

        Args:
            now: The time of a monotonic clock, in seconds.
        """
        if self._count() != self.number:
            self._record()
            with self._lock:
                self._begin()
        elif self._last is not None:
            # A long gap between two calls means that this process was suspended.
            self.seconds += min(now - self._last, self._longest_tick)
        self._last = now

    @property
    def name(self) -> str:
        """The phase and its part, in words."""
        return f"{self._part} of {self.phase.name}" if self._part else self.phase.name

    def change_limit(self, number: int, seconds: float) -> bool:
        """Allow a phase the time that the slowest rank needs. Return whether it still lasts.

        Only the first of a kind may get less time than it had.

        Args:
            number: The number of the phase.
            seconds: The time that it may take.
        """
        with self._lock:
            if number != self.number:
                return False
            self.limit = seconds if self.is_first else max(self.limit, seconds)
            return True

    def is_idle(self, threads: Iterable[threading.Thread]) -> bool:
        """Return whether none of these threads has worked for long. Call it again and again.

        A thread that waits for a file or for another thread does not run on a processor at all. The
        work of child processes is not counted, so a process that has some is never idle.
        """
        work: list[str] = []
        # A thread may have ended, or Linux may not count its time.
        with contextlib.suppress(OSError):
            children = [load_text(path) for path in _THREADS.glob("*/children")]
            if children and not any(children):
                times = [_THREADS / f"{each.native_id}" / "schedstat" for each in threads]
                work = [str(self.number), *(load_text(path) for path in times)]
        if not work or work != self._work:
            self._work = work
            self._worked_at = self.seconds
        return self.seconds - self._worked_at >= PHASE_SECONDS - self.quiet_seconds

    def _count(self) -> int:
        # A number limits the complete step, whatever its parts are.
        return self._progress.marks if self._hang_timeout is None else self._progress.sequence

    def _begin(self) -> None:
        # The number comes first. A phase that changes now begins again at the next tick.
        self.number = self._count()
        """Number of changes of the phase before it."""
        self.phase = self._progress.phase
        self._part = self._progress.part
        # A GPU works behind the program. In which part the program waits for it may change.
        self._kind = f"{self.phase.kind}, {'a part' if self._part else ''}"
        self._iteration = self._progress.iteration
        self._first = self._first or self._iteration
        self.seconds = 0.0
        self.silent_limit = self.limit = self.own_limit = self._find_limit()
        self.is_first = self._hang_timeout is None and self.limit == FIRST_SECONDS
        """Whether it is the first of its kind, so that nothing shows how long it takes."""
        self.quiet_seconds = 0.0
        """Seconds for which a rank may publish nothing. Work in C++ may hold Python's lock."""
        if self.is_first:
            self.silent_limit = PHASE_SECONDS
            self.quiet_seconds = _QUIET_SHARE * PHASE_SECONDS
        elif self._hang_timeout is None and self.phase.is_repeated:
            self.silent_limit = min(self.limit, self._add_slowest(PART_SECONDS))

    def _find_limit(self) -> float:
        phase = self.phase
        if self._hang_timeout is not None:
            return phase.factor * self._hang_timeout
        if not phase.is_limited:
            return math.inf
        if not phase.is_repeated and phase.kind not in self._progress.completed:
            return FIRST_SECONDS
        return self._add_slowest(PART_SECONDS if self._part else PHASE_SECONDS)

    def _add_slowest(self, seconds: float) -> float:
        slowest = max(self._slowest.get(self._kind, {}).values(), default=0.0)
        # Work in a thread may have started before the phase.
        slowest = max(slowest, self._progress.completed.get(self.phase.kind, 0.0))
        return SLOWEST_FACTOR * slowest + seconds

    def _record(self) -> None:
        """Remember how long the phase has taken, if it took longer than others."""
        known = self._slowest.setdefault(self._kind, {})
        known[self._iteration] = max(known.get(self._iteration, 0.0), self.seconds)
        if not self.phase.is_step:
            # One number is enough for what never becomes too old.
            self._slowest[self._kind] = {0: max(known.values())}
            return
        for old in [each for each in known if self._is_old(each)]:
            del known[old]

    def _is_old(self, iteration: int) -> bool:
        is_first = iteration < self._first + _FIRST_STEPS
        return iteration <= self._iteration - _STEPS or (
            is_first and self._iteration >= self._first + 2 * _FIRST_STEPS
        )
