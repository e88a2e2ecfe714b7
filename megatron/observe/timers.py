"""Where the time of an iteration goes: seconds for each named phase.

Invariant: measuring never waits for the device. On a GPU, phases that queue work are bracketed with CUDA events, which are read
only in `take`; phases that block the host (data wait, evaluation, save) and all phases on a CPU are read from the wall clock.
Phases may nest: `communication` is inside `forward-backward` and `optimizer`, so sums over phases count it twice.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

DATA_WAIT = "data-wait"
FORWARD_BACKWARD = "forward-backward"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
EVALUATE = "evaluate"
SAVE = "save"

# They end with the host waiting anyway, and what a slow disk costs is host time: events would show the device's idle gap only.
_HOST_PHASES = frozenset({DATA_WAIT, EVALUATE, SAVE})


class _WallTimer:
    """Context that adds wall seconds; entering and leaving costs about half a microsecond."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._starts: list[
            float
        ] = []  # a stack, for a phase entered inside itself: only the outermost counts

    def __enter__(self) -> None:
        self._starts.append(time.perf_counter())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start = self._starts.pop()
        if not self._starts:
            self._seconds += time.perf_counter() - start

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _EventTimer:
    """Context that records a pair of events on the current stream; `take` reads and reuses them."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._free: list[Any] = []
        self._open: list[Any] = []
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def __enter__(self) -> None:
        self._open.append(self._record())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start = self._open.pop()
        if self._open:
            self._free.append(start)
        else:
            self._pairs.append((start, self._record()))

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def take(self) -> float:
        pairs, self._pairs = self._pairs, []
        seconds, self._seconds = self._seconds, 0.0
        for start, end in pairs:
            end.synchronize()  # streams may differ from pair to pair, so each end is waited for
            seconds += start.elapsed_time(end) / 1000.0
            self._free += (start, end)
        return seconds


class Timers:
    """`with timers("data-wait"): ...`; `timers.add("communication", seconds)`; `timers.take()` -> seconds since the last take.

    Entered by the thread that does the work: one phase must not be open in two threads at once.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, make_event: Callable[[], Any] | None = None
    ) -> None:
        """`device` decides the clock; `make_event` gives timing events with `record`, `synchronize` and `elapsed_time` (ms).
        Default: CUDA's on a CUDA device, else none."""
        if make_event is None and torch.device(device).type == "cuda":
            make_event = _make_cuda_event
        self._make_event = make_event
        self._clocks: dict[str, _WallTimer | _EventTimer] = {}

    def __call__(self, phase: str) -> _WallTimer | _EventTimer:
        clock = self._clocks.get(phase)
        if clock is None:
            on_host = self._make_event is None or phase in _HOST_PHASES
            clock = self._clocks[phase] = (
                _WallTimer()
                if on_host or self._make_event is None
                else _EventTimer(self._make_event)
            )
        return clock

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self(phase).add(seconds)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last take, phases in the order of their first use; on a GPU this waits for their end."""
        return {phase: clock.take() for phase, clock in self._clocks.items()}


def _make_cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def compute_seconds(phase_seconds: dict[str, float]) -> float:
    """Forward, backward and optimizer without the communication inside them; at least 0, as that may overlap them."""
    busy = phase_seconds.get(FORWARD_BACKWARD, 0.0) + phase_seconds.get(OPTIMIZER, 0.0)
    return max(0.0, busy - phase_seconds.get(COMMUNICATION, 0.0))
