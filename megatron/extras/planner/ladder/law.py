"""The law L(N, D) = E + A N^-a + B D^-b, fitted to the losses of small runs.

Source: Hoffmann et al. 2022 (https://arxiv.org/abs/2203.15556), approach 3, with the objective of
Besiroglu et al. 2024 (https://arxiv.org/abs/2404.10102): Huber's loss of log differences.

For fixed exponents the law is linear, so a grid over both exponents cannot miss the minimum, and no
random starts are needed. Damped Gauss-Newton steps then refine all five numbers.

Legend: k runs, g points of the grid.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError

Array = NDArray[np.float64]
DELTA = 1e-3
"""Differences of logarithms above this count linearly, so single bad runs do not bend the law."""
FEWEST_RUNS = 6
"""Five numbers are fitted."""
_EXPONENTS = np.arange(0.05, 1.51, 0.05)
_REWEIGHTED = 15
"""Solutions of the linear problem for each point of the grid, each with the last one's weights."""
_STEPS = 3000
"""Most steps of a refinement. Where two terms of a law can hardly be told apart, 300 were too few.
"""
_STEPS_OF_DRAWN = 300
"""The same for runs that are drawn again, whose laws scatter far more than this changes them."""
_ENOUGH = 1e-8
"""Relative progress of a step after which the refinement ends."""
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Runs:
    """What is known of each run, all [k]."""

    parameters: Array
    """N, without the embedding."""
    tokens: Array
    """D, the tokens of the training."""
    loss: Array

    def select(self, rows: NDArray) -> "Runs":
        """Return some of the runs, by a mask or by numbers."""
        return Runs(self.parameters[rows], self.tokens[rows], self.loss[rows])


@dataclass(frozen=True)
class Law:
    """A fitted law."""

    e: float
    """E, the loss that remains with an endless model and endless data."""
    a_factor: float
    """A."""
    b_factor: float
    """B."""
    a: float
    """Exponent of the parameters."""
    b: float
    """Exponent of the tokens."""

    def predict(self, parameters: Array | float, tokens: Array | float) -> Array:
        """Return the loss of runs."""
        size, data = np.asarray(parameters, float), np.asarray(tokens, float)
        return self.e + self.a_factor * size**-self.a + self.b_factor * data**-self.b

    def find_optimal_tokens(self, parameters: float) -> float:
        """Return the tokens with which a model of this size uses its compute best.

        With C = 6 N D fixed, the loss is smallest where both terms have the same slope.
        """
        # The slopes over log N and over log D, which are equal at the minimum.
        slope = self.a * self.a_factor * parameters**-self.a
        return float((self.b * self.b_factor / slope) ** (1 / self.b))


_EXPONENT_LIMITS = 0.01, 3.0
"""Exponents of a law that are possible."""


def check_runs(runs: Runs) -> None:
    """Check that a law can be fitted.

    Raises:
        DataError: There are too few runs or sizes, or a number is not finite and positive.
    """
    # A NaN is neither above nor below 0.
    table = np.stack([runs.parameters, runs.tokens, runs.loss])
    bad = np.flatnonzero(~(np.isfinite(table) & (table > 0)).all(axis=0))
    if len(bad):
        raise DataError(
            f"run {bad[0]} has {runs.parameters[bad[0]]:g} parameters, {runs.tokens[bad[0]]:g} "
            f"tokens and the loss {runs.loss[bad[0]]:g}. A run that diverged or is not complete "
            "must be left out."
        )
    if table.shape[1] < FEWEST_RUNS:
        raise DataError(
            f"{table.shape[1]} runs are too few for a law with five numbers. Give at least "
            f"{FEWEST_RUNS}."
        )
    for name, values in (("sizes", runs.parameters), ("numbers of tokens", runs.tokens)):
        if len(np.unique(values)) < 3:
            raise DataError(
                f"the runs have {len(np.unique(values))} {name}. A law needs at least three. Vary "
                "parameters and tokens apart from each other."
            )


def fit(runs: Runs) -> Law:
    """Return the law that fits the runs best.

    Raises:
        DataError: See `check_runs`.
    """
    check_runs(runs)
    # Relative to the middle, all five numbers have similar sizes.
    size, data = _find_middle(runs.parameters), _find_middle(runs.tokens)
    start = _search_grid(runs, size, data)
    found, _ = _refine(runs, start, size, data)
    return _to_law(found, size, data)


def bootstrap(runs: Runs, law: Law, times: int = 400, seed: int = 1) -> list[Law]:
    """Return laws that fit runs which are drawn with replacement.

    Each begins at the law of all runs. Draws without three sizes and three numbers of tokens are
    left out, and so are those that show no law.

    Raises:
        DataError: Most draws show no law.
    """
    rng = np.random.default_rng(seed)
    size, data = _find_middle(runs.parameters), _find_middle(runs.tokens)
    start = _to_vector(law, size, data)
    laws: list[Law] = []
    for _ in range(times):
        # A run may be drawn several times.
        drawn = runs.select(rng.integers(0, len(runs.loss), len(runs.loss)))
        if min(len(np.unique(drawn.parameters)), len(np.unique(drawn.tokens))) < 3:
            continue
        found, _ = _refine(drawn, start, size, data, _STEPS_OF_DRAWN)
        # A loss falls with both, and no published exponent is near these limits.
        if (found[3:] > _EXPONENT_LIMITS[0]).all() and (found[3:] < _EXPONENT_LIMITS[1]).all():
            laws.append(_to_law(found, size, data))
    if len(laws) < times / 4:
        raise DataError(
            f"the {len(runs.loss)} runs do not determine a law: without some of them, "
            f"{times - len(laws)} of {times} fits give none. Add sizes and numbers of tokens."
        )
    return laws


def find_interval(
    laws: list[Law], runs: Runs, law: Law, parameters: float, tokens: float
) -> tuple[float, float]:
    """Return the range of the loss of a run, with a probability of 95 %.

    It has the spread of the laws, and that of single runs around the law.
    """
    # Laws of drawn runs scatter as laws of other runs would.
    predicted = np.array([float(each.predict(parameters, tokens)) for each in laws])
    low, high = np.quantile(predicted, _QUANTILES)
    # Two standard deviations are 95 % of a normal distribution.
    noise = 2 * measure_noise(runs, law) * float(law.predict(parameters, tokens))
    middle = float(law.predict(parameters, tokens))
    # Both are independent of each other.
    return (
        middle - float(np.hypot(middle - low, noise)),
        middle + float(np.hypot(high - middle, noise)),
    )


def measure_noise(runs: Runs, law: Law) -> float:
    """Return the root mean square of the relative differences between the runs and the law."""
    found = np.log(law.predict(runs.parameters, runs.tokens)) - np.log(runs.loss)
    return float(np.sqrt(np.mean(found**2)))


def _find_middle(values: Array) -> float:
    return float(np.exp(np.log(values).mean()))


def _search_grid(runs: Runs, size: float, data: float) -> Array:
    """Return the best point of the grid: log E, log A', log B', a and b.

    A' and B' are the terms at the middle size and the middle number of tokens.
    """
    grid_a, grid_b = (each.ravel() for each in np.meshgrid(_EXPONENTS, _EXPONENTS))
    columns = np.stack(
        [
            np.ones((len(grid_a), len(runs.loss))),
            (runs.parameters / size) ** -grid_a[:, None],
            (runs.tokens / data) ** -grid_b[:, None],
        ],
        axis=2,
    )
    # A relative difference is nearly one of logarithms.
    relative = columns / runs.loss[:, None]
    # All points of the grid are solved at once.
    weights = np.ones((len(grid_a), len(runs.loss)))
    ridge = 1e-12 * np.eye(3)
    for _ in range(_REWEIGHTED):
        weighted = relative * weights[:, :, None]
        normal = np.einsum("gki,gkj->gij", weighted, relative) + ridge
        found = np.linalg.solve(normal, weighted.sum(axis=1)[:, :, None])[:, :, 0]
        difference = np.einsum("gki,gi->gk", relative, found) - 1
        weights = _weigh(difference)
    # No part of a loss is negative.
    cost = np.where((found > 0).all(axis=1), _sum_huber(difference), np.inf)
    best = int(np.argmin(cost))
    if not np.isfinite(cost[best]):
        # Then the runs do not show all three parts. The refinement begins with equal parts.
        best = int(np.argmin(_sum_huber(difference)))
        found[best] = runs.loss.mean() / 3
    return np.array([*np.log(found[best]), grid_a[best], grid_b[best]])


def _refine(
    runs: Runs, start: Array, size: float, data: float, steps: int = _STEPS
) -> tuple[Array, float]:
    """Return the numbers with the least sum of Huber's losses near `start`, and this sum."""
    # In logarithms all three parts stay positive.
    x, y = np.log(runs.parameters / size), np.log(runs.tokens / data)
    target = np.log(runs.loss)

    def compute(vector: Array) -> tuple[Array, Array]:
        """Return the differences [k], and their derivatives [k, 5]."""
        rest = np.full_like(x, vector[0])
        terms = np.exp(np.stack([rest, vector[1] - vector[3] * x, vector[2] - vector[4] * y]))
        total = terms.sum(axis=0)
        slopes = np.stack([*terms, -x * terms[1], -y * terms[2]]) / total
        return np.log(total) - target, slopes.T

    vector = start
    # The start is the best of the grid, or the law of all runs.
    difference, slopes = compute(vector)
    cost = float(_sum_huber(difference))
    # Levenberg and Marquardt: smaller steps after a bad one, and larger ones after a good one.
    damping = 1e-3
    for _ in range(steps):
        weighted = slopes * _weigh(difference)[:, None]
        normal = weighted.T @ slopes
        step = np.linalg.solve(
            normal + damping * (np.diag(np.diag(normal)) + 1e-12 * np.eye(5)),
            -weighted.T @ difference,
        )
        with np.errstate(over="ignore", invalid="ignore"):
            tried, tried_slopes = compute(vector + step)
            tried_cost = float(_sum_huber(tried))
        # A NaN counts as a bad step.
        if not tried_cost < cost:
            damping *= 4
            if damping > 1e12:
                break
            continue
        small = cost - tried_cost < _ENOUGH * cost
        vector, difference, slopes, cost = vector + step, tried, tried_slopes, tried_cost
        damping = max(damping / 3, 1e-12)
        if small:
            break
    return vector, cost


def _weigh(difference: Array) -> Array:
    """Return the weights with which squares have the slopes of Huber's loss."""
    return np.minimum(1.0, DELTA / np.maximum(np.abs(difference), 1e-300))


def _sum_huber(difference: Array) -> Array:
    """Return the sum of Huber's losses over the last axis."""
    size = np.abs(difference)
    return np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA)).sum(axis=-1)


def _to_law(vector: Array, size: float, data: float) -> Law:
    """Return the law of a vector.

    Raises:
        DataError: An exponent is too large for a number.
    """
    e, a_term, b_term = np.exp(vector[:3]).tolist()
    a, b = vector[3:].tolist()
    try:
        return Law(e, a_term * size**a, b_term * data**b, a, b)
    except OverflowError as error:
        raise DataError(
            f"the runs do not determine a law: the best exponents are {a:.3g} and {b:.3g}. Add "
            "sizes and numbers of tokens."
        ) from error


def _to_vector(law: Law, size: float, data: float) -> Array:
    factors = [law.e, law.a_factor * size**-law.a, law.b_factor * data**-law.b]
    return np.array([*np.log(factors), law.a, law.b])
