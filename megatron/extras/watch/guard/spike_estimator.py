"""Robust running estimates of one signal, such as the loss, and the limits of its normal values.

All numbers are logarithms of the signal, so thresholds do not depend on its scale.

- The running median is the median of the last `smoothing` normal values.
- The noise is 1.4826 / sqrt(2) times the median of |value - value before it| over the last `window`
  values, spikes included. It is a standard deviation if the noise is normal. A few outliers do not
  change it, and neither does the steep fall of the loss at the start of a run.
- The margin is `threshold` times the noise, and at least `min_rise`. With few values the noise is
  uncertain, so the margin is larger.

A value is a spike if it is more than the margin above the running median. A loss is also a spike in
two other cases. It is far below the running median, as for text that repeats itself. Or it is more
than 1.3 margins above the lowest running median within `reach` iterations. This finds a slow rise,
which a comparison with the last values would miss.

Spikes do not change the running median at first. If they outnumber normal values by `LASTING`, the
change is lasting, and the last spikes become the new level. The old level stays normal for `reach`
iterations, so the values may also return to it.

Invariant: the state is a function of the recorded values. A run that resumes with the state makes
the same decisions as a run that was not interrupted.

Source: Huber, Robust Statistics. Medians of the values and of their absolute differences are used
instead of mean and standard deviation, because a spike would change the latter. OLMo-core's
SkipStepOptimizer uses mean and standard deviation of the last 128 steps with a threshold of 6. The
losses of skipped steps count, so its level follows a lasting change too.
"""

import math
from collections import deque
from statistics import median
from typing import Any

from megatron.run.state import compute_high_loss

_MAD_TO_SIGMA = 1.4826
"""Standard deviation / median absolute deviation, of a normal distribution."""
_UNCERTAINTY = 4.0
"""With n values, the threshold is multiplied by 1 + this / n."""
_NORMAL = 2.0
"""A running median counts as normal up to this many times the noise above the level.

The lowest of many medians is below the true level by about the noise.
"""
_SMALLEST = 1e-30
"""Smaller values are raised to this, because zero has no logarithm."""
_MIN_FALL = -math.log(0.8)
"""A loss must be below its level by 20 % to be a spike. Clean losses fall, and seldom jump down."""
_SLOW = 1.3
"""A slow rise is a spike at this many margins above the lowest running median.

The lowest of many medians is below the true level.
"""
LASTING = 32
"""A change is lasting if spikes outnumber normal values by this since it began."""
_LEAST = 4
"""With a running median of few values, as many spikes suffice, but at least this many."""


class SpikeEstimator:
    """The estimates of one signal. `find_limits` reads them and `record` updates them."""

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
            reach: Iterations that a loss is compared with. None: the signal is not a loss. It may
                fall and may rise slowly, and has no limit before the noise is known.
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
        self._last: float | None = None
        """The last value, normal or not."""
        self._spikes: deque[float] = deque(maxlen=smoothing)
        """The last spikes, which may be the beginning of a lasting change."""
        self._surplus = 0
        """Spikes minus normal values since the change began."""
        self._former: tuple[int, float] | None = None
        """Iteration and level of the last lasting change."""
        self._low: float | None = None
        self._high: float | None = None

    def find_limits(self) -> tuple[float | None, float | None]:
        """Return the smallest and the largest normal value, in units of the signal.

        A limit is None if there is none, or if there are too few values yet.
        """
        low = None if self._low is None else math.exp(self._low)
        high = None if self._high is None else math.exp(self._high)
        return low, high

    def find_level(self) -> float | None:
        """Return the running median in units of the signal, or None without a value."""
        return math.exp(median(self._recent)) if self._recent else None

    def find_last_normal(self, iteration: int) -> int:
        """Return the last iteration before a spike whose level was still normal.

        If the signal has jumped, it is the iteration just before the spike. If the signal has risen
        slowly, it is up to `reach` iterations earlier.

        Args:
            iteration: The first iteration of the spike.
        """
        if not self._recent:
            return iteration - 1
        normal = self._find_lowest() + _NORMAL * self._find_noise()
        if median(self._recent) <= normal:
            return iteration - 1
        earlier = [at for at, value in self._medians if value <= normal]
        return earlier[-1] if earlier else iteration - 1

    def record(self, value: float, iteration: int) -> None:
        """Record the value of a step, whether it was applied or not. It must be finite."""
        # Logarithms make a distance a ratio, whatever the size of the signal.
        logarithm = math.log(max(value, _SMALLEST))
        is_low = self._low is not None and logarithm < self._low
        is_high = self._high is not None and logarithm > self._high
        # A slow change of the level hardly alters the differences of neighbours.
        if self._last is not None:
            self._differences.append(logarithm - self._last)
        self._last = logarithm
        if is_low or is_high:
            self._record_spike(logarithm, iteration)
        else:
            self._surplus = max(0, self._surplus - 1)
            self._recent.append(logarithm)
            if self._reach is not None:
                self._record_median(iteration, self._reach)
        if not self._surplus:
            self._spikes.clear()
        if self._former is not None and self._former[0] < iteration - (self._reach or 0):
            self._former = None
        # Computed once for each value, because sorting the window takes the most time.
        self._update_limits()

    def _record_spike(self, logarithm: float, iteration: int) -> None:
        """Count a spike, and accept a lasting change as the new level."""
        self._spikes.append(logarithm)
        self._surplus += 1
        known = len(self._recent)
        enough = LASTING if known == self._smoothing else max(_LEAST, known)
        if self._surplus < enough:
            return
        self._former = (iteration, median(self._recent))
        # Values from before the change would keep the limits where they were.
        self._recent = self._spikes.copy()
        self._medians.clear()
        self._since_median = 0
        self._surplus = 0

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
        self._last = None
        self._spikes.clear()
        self._surplus = 0
        self._former = None
        self._low = None
        self._high = None

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "recent": list(self._recent),
            "differences": list(self._differences),
            "medians": [list(entry) for entry in self._medians],
            "since_median": self._since_median,
            "last": self._last,
            "spikes": list(self._spikes),
            "surplus": self._surplus,
            "former": None if self._former is None else list(self._former),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state. If a window has become shorter, its oldest values are dropped."""
        self.clear()
        self._recent.extend(state["recent"])
        self._differences.extend(state["differences"])
        self._medians.extend((at, value) for at, value in state["medians"])
        self._since_median = state["since_median"]
        # Older versions recorded applied steps only, and the absolute values of differences.
        self._last = state.get("last", self._recent[-1] if self._recent else None)
        self._spikes.extend(state.get("spikes", []))
        self._surplus = state.get("surplus", 0)
        former = state.get("former")
        self._former = None if former is None else (former[0], former[1])
        self._update_limits()

    def _update_limits(self) -> None:
        count = len(self._differences)
        if count + 1 < self._min_steps:
            self._low = None
            self._high = self._find_early_limit()
            return
        threshold = self._threshold * (1 + _UNCERTAINTY / count)
        noise = threshold * self._find_noise()
        margin = max(noise, self._min_rise)
        level = median(self._recent)
        self._high = min(level + margin, self._find_lowest() + _SLOW * margin)
        if self._reach is None:
            return
        # In a steep fall, as at the start of a run, the running median is half its length behind.
        expected = level + self._smoothing / 2 * min(0.0, median(self._differences))
        self._low = expected - max(noise, _MIN_FALL)
        if self._former is not None:
            _, former_level = self._former
            self._high = max(self._high, former_level + margin)
            self._low = min(self._low, former_level - max(noise, _MIN_FALL))

    def _find_early_limit(self) -> float | None:
        """Return the limit before the noise is known.

        In the first steps of a run, a loss does not rise far, even if its noise is large. If it
        does rise far, the run has diverged, and the later estimates would follow it.
        """
        if self._reach is None or not self._recent:
            return None
        return math.log(compute_high_loss(math.exp(median(self._recent))))

    def _find_noise(self) -> float:
        if not self._differences:
            return 0.0
        # A difference of two values has twice the variance of one.
        return _MAD_TO_SIGMA / math.sqrt(2) * median(map(abs, self._differences))

    def _find_lowest(self) -> float:
        """Return the lowest running median within `reach`. There is at least one value."""
        return min([median(self._recent), *(value for _, value in self._medians)])
