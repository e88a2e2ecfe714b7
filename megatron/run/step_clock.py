"""The wall time of training iterations.

On a GPU the host queues the optimizer's kernels and goes on. They run when the host begins the next
iteration. A time from the start of an iteration to its end on the host would leave them out, so
TFLOPs and MFU would be too high.

The invariant: the times of all iterations add up to the time of the loop without its pauses. An
iteration is measured from the same point of the iteration before it to the same point of its own.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Measures iterations one after the other, without the pauses between them."""

    def __init__(
        self, device: torch.device, *, read: Callable[[], float] = time.perf_counter
    ) -> None:
        """Create a clock. It runs from `start` on.

        Args:
            device: The device that computes.
            read: Returns a time in seconds.
        """
        self._device = device
        self._read = read
        self._since = 0.0
        self._earlier = 0.0
        """Seconds of this iteration before the last pause."""
        self.has_paused = False
        """Whether there was a pause since the last iteration was finished."""

    def start(self) -> None:
        """Start the first iteration of a launch."""
        self._since = self._read()
        self._earlier = 0.0

    def finish_iteration(self) -> float:
        """Return the seconds of the iteration, and start the next one."""
        now = self._read()
        seconds = self._earlier + now - self._since
        self._since = now
        self._earlier = 0.0
        self.has_paused = False
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock during an evaluation or a save."""
        # The optimizer may still run. Its time belongs to the iteration, not to the pause.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._earlier += self._read() - self._since
        self.has_paused = True
        try:
            yield
        finally:
            self._since = self._read()
