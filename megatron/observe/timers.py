"""Seconds of an iteration for each named phase.

Invariant: measuring never waits for the device. On a GPU, phases that queue work are measured with
CUDA events. `Timers.take` reads those of the iteration before, because the device may still work on
the last ones. Phases that block the host (data wait, evaluation, save) and all phases on a CPU are
measured with the wall clock. Phases may nest. `communication` is inside of `forward-backward` and
`optimizer`, so a sum over phases counts it twice.

A `BlockTimer` measures the seconds that this rank computes in a transformer block, without waiting
for other ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class IntervalTimer(Protocol):
    """A context that adds the seconds within it, on the device if that computes."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def take(self) -> float:
        """Return the seconds since the last call. It may wait for the device."""


class BlockTimer:
    """Measures the forward passes of blocks, separately for each step.

    All ranks do the same work in the forward pass of a block, so the times of different pipeline
    stages can be compared. The collectives inside of a block are left out. What FSDP2 gathers, and
    what pipeline stages send, is outside of it.
    """

    def __init__(self, make_timer: Callable[[], IntervalTimer]) -> None:
        """Start without a measured step.

        Args:
            make_timer: Makes a timer of this rank's device.
        """
        self._make_timer = make_timer
        # A timer keeps its events of the device, so it is used again after `take_steps`.
        self._timers: list[IntervalTimer] = []
        self._passes: list[int] = []
        """Number of forward passes of blocks in each measured step."""
        self._runs = False

    def begin_step(self) -> None:
        """Measure the forward passes from now on as those of another step."""
        self._passes.append(0)
        if len(self._timers) < len(self._passes):
            self._timers.append(self._make_timer())

    def enter_block(self) -> None:
        """Start to measure, at the start of a forward pass."""
        # Ranks have different numbers of layers and of microbatches, so the mean is compared.
        self._passes[-1] += 1
        self._resume()

    def leave_block(self) -> None:
        """Stop to measure, at the end of a forward pass."""
        self._pause()

    def leave_out(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return a context like `context` that is not measured, for a collective in a block."""
        # Most collectives are outside of the measured steps, and must stay cheap.
        if self._runs:
            return self._pause_within(context)
        return context

    def take_steps(self) -> list[float]:
        """Return the mean seconds of a forward pass in each measured step, and forget the steps.

        It waits until the device has finished these steps.
        """
        seconds = [
            timer.take() / passes
            for timer, passes in zip(self._timers, self._passes, strict=False)
            if passes
        ]
        self._passes = []
        return seconds

    def _resume(self) -> None:
        self._runs = True
        self._timers[len(self._passes) - 1].__enter__()

    def _pause(self) -> None:
        self._timers[len(self._passes) - 1].__exit__(None, None, None)
        self._runs = False

    @contextmanager
    def _pause_within(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enter a context in which a block is not measured."""
        self._pause()
        try:
            with context:
                yield
        finally:
            self._resume()


DATA_WAIT = "data-wait"
FORWARD_BACKWARD = "forward-backward"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
EVALUATE = "evaluate"
SAVE = "save"

# The host waits at the end of these phases anyway, and a slow disk costs host time. Events would
# show only the idle time of the device.
_HOST_PHASES = frozenset({DATA_WAIT, EVALUATE, SAVE})


class _WallTimer:
    """Context that adds wall seconds. Entering and leaving it costs about half a microsecond."""

    def __init__(self) -> None:
        self._seconds = 0.0
        # A stack, for a phase that is entered within itself. Only the outermost entry counts.
        self._starts: list[float] = []

    def __enter__(self) -> None:
        self._starts.append(time.perf_counter())

    def __exit__(self, *error: object) -> None:
        start = self._starts.pop()
        if not self._starts:
            self._seconds += time.perf_counter() - start

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def take(self) -> float:
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    take_earlier = take


class _EventTimer:
    """Context that records a pair of events on the current stream, which are used again later."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._free: list[Any] = []
        self._open: list[Any] = []
        self._pairs: list[tuple[Any, Any]] = []
        self._earlier: list[tuple[Any, Any]] | None = None
        """Pairs from before the last `take_earlier`. None if there was none yet."""
        self._seconds = 0.0

    def _record(self) -> Any:
        # Creating an event is slow compared with recording one, so events are reused.
        if self._free:
            event = self._free.pop()
        else:
            event = self._make_event()
        event.record()
        return event

    def __enter__(self) -> None:
        self._open.append(self._record())

    def __exit__(self, *error: object) -> None:
        start = self._open.pop()
        if self._open:
            # The phase is still open further out. Only the outermost pair counts.
            self._free.append(start)
        else:
            self._pairs.append((start, self._record()))

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def take(self) -> float:
        return (self.take_earlier() or 0.0) + (self.take_earlier() or 0.0)

    def take_earlier(self) -> float | None:
        """Return the seconds that were complete at the last call. None: this is the first one."""
        pairs = self._earlier
        self._earlier = self._pairs
        self._pairs = []
        seconds = self._seconds
        self._seconds = 0.0
        if pairs is None:
            return seconds or None
        for start, end in pairs:
            # Streams may differ from pair to pair, so each end must be waited for.
            end.synchronize()
            seconds += start.elapsed_time(end) / 1000.0
            self._free += (start, end)
        return seconds


class Timers:
    """Timers of all phases.

    Use `with timers("data-wait"): ...` or `timers.add("communication", seconds)`. `timers.take()`
    returns the seconds since the last call. The thread that does the work enters a phase. One phase
    must not be open in two threads at once.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, make_event: Callable[[], Any] | None = None
    ) -> None:
        """Choose how phases are measured.

        Args:
            device: The device that computes. It decides between events and the wall clock.
            make_event: Makes timing events with `record`, `synchronize` and `elapsed_time` (in ms).
                The default is CUDA's on a CUDA device, and none elsewhere.
        """
        if make_event is None and torch.device(device).type == "cuda":
            make_event = _make_cuda_event
        self._make_event = make_event
        self._timers: dict[str, _WallTimer | _EventTimer] = {}
        self._is_paused = False
        self.blocks = BlockTimer(self._make_timer)
        """Measures the forward passes of blocks. `take` does not return its seconds."""

    def _make_timer(self) -> _WallTimer | _EventTimer:
        if self._make_event is None:
            return _WallTimer()
        return _EventTimer(self._make_event)

    def __call__(self, phase: str) -> _WallTimer | _EventTimer:
        """Return the context that measures a phase."""
        timer = self._timers.get(phase)
        if timer is None:
            timer = _WallTimer() if phase in _HOST_PHASES else self._make_timer()
            self._timers[phase] = timer
        return timer

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not time collectives within this context."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def time_collective(self) -> AbstractContextManager[None]:
        """Return the context of a collective. Its time does not count in `blocks`."""
        if self._is_paused:
            return nullcontext()
        return self.blocks.leave_out(self(COMMUNICATION))

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self(phase).add(seconds)

    def take(self) -> dict[str, float]:
        """Return the seconds by phase, in the order of their first use. Call it each iteration.

        They are those since the last call. For phases that are measured with events, they are those
        of the time between the two calls before. The first call does not have them.
        """
        taken = {phase: timer.take_earlier() for phase, timer in self._timers.items()}
        return {phase: seconds for phase, seconds in taken.items() if seconds is not None}

    def forget(self) -> None:
        """Drop all seconds until now."""
        self._timers.clear()


def _make_cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def compute_seconds(phase_seconds: dict[str, float]) -> float:
    """Return the seconds of forward, backward and optimizer without their communication.

    The result is at least 0, because communication may overlap with computation.
    """
    busy = phase_seconds.get(FORWARD_BACKWARD, 0.0) + phase_seconds.get(OPTIMIZER, 0.0)
    return max(0.0, busy - phase_seconds.get(COMMUNICATION, 0.0))
