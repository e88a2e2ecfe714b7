"""Warns about a run whose loss stays far above the loss that it started with."""

_ITERATIONS = 50
"""The warning needs this many high losses in a row. A spike that recovers is shorter."""
_FACTOR = 0.2
"""A loss is high if it exceeds the usual loss by this fraction of it, and by at least _MARGIN."""
_MARGIN = 1.0
"""Without this margin, noise would cause a warning if the usual loss is very small."""


def compute_high_loss(usual: float) -> float:
    """Return the loss above which a run is probably diverging, given a usual loss. Both in nats."""
    return usual + max(_MARGIN, _FACTOR * usual)


class DivergenceWatch:
    """Compares each loss with the first one of this launch, and warns once."""

    def __init__(self) -> None:
        """Create a watch that has seen no loss."""
        self._first: float | None = None
        self._above = 0
        self._warned = False

    def observe(self, loss: float, iteration: int) -> str | None:
        """Return a warning if the run seems to have diverged, and None otherwise.

        Args:
            loss: The finite loss of an applied step.
            iteration: The iteration of the step.
        """
        if self._first is None:
            self._first = loss
        limit = compute_high_loss(self._first)
        if loss > limit:
            self._above += 1
        else:
            self._above = 0
        if self._above < _ITERATIONS or self._warned:
            return None
        self._warned = True
        return (
            f"warning: the loss was above {limit:.3f} in the {_ITERATIONS} iterations up to "
            f"{iteration}. In the first iteration of this launch it was {self._first:.3f}. The run "
            "has probably diverged. Roll back to an earlier checkpoint with tools/rollback.py, and "
            "lower --lr or skip the data"
        )
