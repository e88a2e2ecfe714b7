"""Seconds that this rank computes in a transformer block, without waiting for other ranks.

All ranks do the same work in the forward pass of a block, so the times of different pipeline stages
can be compared. The collectives inside of a block are left out. What FSDP2 gathers, and what
pipeline stages send, is outside of it.

Invariant: measuring never waits for the device. See `Timers`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class IntervalTimer(Protocol):
    """A context that adds the seconds within it, on the device if that computes."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def take(self) -> float:
        """Return the seconds since the last call. It may wait for the device."""
        ...


class BlockTimer:
    """Measures the forward passes of blocks, separately for each step."""

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
