"""Robust running estimates of one signal, such as the loss, and the limit above which it spikes.

All numbers are logarithms of the signal, so thresholds do not depend on its scale.

- The running median is the median of the last `smoothing` recorded values.
- The noise is 1.4826 / sqrt(2) times the median of |value - value before it| over the last `window`
  values. It is a standard deviation if the noise is normal. A few outliers do not change it, and
  neither does the steep fall of the loss at the start of a run.
- The level is the lowest running median within `reach` iterations. Without `reach`, it is the
  present running median. The lowest one also shows a slow rise, which a comparison with the last
  values would miss.

The limit is the level plus `threshold` times the noise, and at least `min_rise` above the level.
With few values the noise is uncertain, so the limit is higher.

Invariant: the state is a function of the recorded values. A run that resumes with the state makes
the same decisions as a run that was not interrupted.

Source: Huber, Robust Statistics. Median and MAD are used instead of mean and standard deviation,
because a spike itself would change these. OLMo-core's SkipStepOptimizer uses mean and standard
deviation, with a threshold of 6 and a window of 128 steps.
"""

import math
from collections import deque
from statistics import median
from typing import Any

_MAD_TO_SIGMA = 1.4826
"""Standard deviation / median absolute deviation, of a normal distribution."""
_UNCERTAINTY = 4.0
"""With n values, the threshold is multiplied by 1 + this / n."""
_NORMAL = 2.0
"""A running median counts as normal up to this many times the noise above the level.

The lowest of many medians is below the true level by about the noise.
"""
_EARLY_RISE = 1.0
_EARLY_FRACTION = 0.2
"""Before the noise is known, a loss may be above its level by the larger one of these, in nats and
as a fraction of the level."""
_SMALLEST = 1e-30
"""A signal of zero has no logarithm."""


class SpikeEstimator:
    """The estimates of one signal. `find_limit` reads them and `record` updates them."""

    def __init__(
        self,
        *,
        window: int,
        smoothing: int,
        min_steps: int,
        threshold: float,
        min_rise: float,
        reach: int | None,
    ) -> None:
        """Create the estimates of a signal without a value.

        Args:
            window: Values from which the noise is estimated.
            smoothing: Values of a running median.
            min_steps: Values before the noise is known.
            threshold: Distance from the level to the limit, as a multiple of the noise.
            min_rise: Smallest distance from the level to the limit, as a fraction of the level.
            reach: Iterations whose lowest running median is the level, as for a loss. None: the
                level is the present running median, and there is no limit before the noise is
                known.
        """
        self._min_steps = min_steps
        self._threshold = threshold
        self._min_rise = math.log1p(min_rise)
        self._reach = reach
        self._smoothing = smoothing
        self._recent: deque[float] = deque(maxlen=smoothing)
        self._differences: deque[float] = deque(maxlen=window)
        self._medians: deque[tuple[int, float]] = deque()
        """(iteration, running median) after each `smoothing` values, within `reach`."""
        self._since_median = 0
        self._limit: float | None = None

    def find_limit(self) -> float | None:
        """Return the largest value that is not a spike, in units of the signal.

        It is None if there are too few values yet.
        """
        if self._limit is None:
            return None
        return math.exp(self._limit)

    def find_last_normal(self, iteration: int) -> int:
        """Return the last iteration before a spike whose level was still normal.

        If the signal has jumped, it is the iteration just before the spike. If the signal has risen
        slowly, it is up to `reach` iterations earlier.

        Args:
            iteration: The first iteration of the spike.
        """
        level = self._find_level()
        normal = level + _NORMAL * self._find_noise()
        if not self._recent or median(self._recent) <= normal:
            return iteration - 1
        earlier = [at for at, value in self._medians if value <= normal]
        return earlier[-1] if earlier else iteration - 1

    def record(self, value: float, iteration: int) -> None:
        """Record the value of an applied step.

        A value above the limit is recorded as the limit. The estimates then follow a signal that
        stays high, but slowly.
        """
        logarithm = math.log(max(value, _SMALLEST))
        if self._limit is not None:
            logarithm = min(logarithm, self._limit)
        if self._recent:
            self._differences.append(abs(logarithm - self._recent[-1]))
        self._recent.append(logarithm)
        if self._reach is not None:
            self._record_median(iteration, self._reach)
        # Computed once for each value, because sorting the window takes the most time.
        self._limit = self._find_log_limit()

    def _record_median(self, iteration: int, reach: int) -> None:
        """Record the running median if it is due, and forget those that are too old."""
        self._since_median += 1
        if self._since_median >= self._smoothing:
            self._since_median = 0
            self._medians.append((iteration, median(self._recent)))
        while self._medians and self._medians[0][0] < iteration - reach:
            self._medians.popleft()

    def clear(self) -> None:
        """Forget all values, because the next ones come from other data."""
        self._recent.clear()
        self._differences.clear()
        self._medians.clear()
        self._since_median = 0
        self._limit = None

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "recent": list(self._recent),
            "differences": list(self._differences),
            "medians": [list(entry) for entry in self._medians],
            "since_median": self._since_median,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state. If a window has become shorter, its oldest values are dropped."""
        self.clear()
        self._recent.extend(state["recent"])
        self._differences.extend(state["differences"])
        self._medians.extend((at, value) for at, value in state["medians"])
        self._since_median = state["since_median"]
        self._limit = self._find_log_limit()

    def _find_log_limit(self) -> float | None:
        count = len(self._differences)
        if count + 1 < self._min_steps:
            return self._find_early_limit()
        noise = self._find_noise()
        threshold = self._threshold * (1 + _UNCERTAINTY / count)
        return self._find_level() + max(threshold * noise, self._min_rise)

    def _find_early_limit(self) -> float | None:
        """Return the limit before the noise is known.

        In the first steps of a run, a loss does not rise far, even if its noise is large. If it
        does rise far, the run has diverged, and the later estimates would follow it.
        """
        if self._reach is None or not self._recent:
            return None
        level = math.exp(median(self._recent))
        return math.log(level + max(_EARLY_RISE, _EARLY_FRACTION * level))

    def _find_noise(self) -> float:
        if not self._differences:
            return 0.0
        # A difference of two values has twice the variance of one.
        return _MAD_TO_SIGMA / math.sqrt(2) * median(self._differences)

    def _find_level(self) -> float:
        """Return the level. There is at least one value."""
        return min([median(self._recent), *(value for _, value in self._medians)])
