"""What a ladder says about a larger run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.extras.planner.ladder.law import (
    Law,
    Runs,
    bootstrap,
    find_interval,
    fit,
    measure_noise,
)
from megatron.extras.planner.ladder.runs import LadderRow, choose_best, find_rates, measure_seeds

_FAR = 2.0
"""Times the largest rung, beyond which a warning is given."""


@dataclass(frozen=True)
class Fit:
    """A law, and how well it is known."""

    law: Law
    runs: Runs
    laws: list[Law]
    """Laws of runs that were drawn again."""
    noise: float
    """Root mean square of the relative differences between runs and law."""
    seeds: float | None
    """Standard deviation of a loss over seeds."""
    rates: dict[tuple[float, float], float]
    """Parameters and tokens -> the best learning rate."""

    def transfer_rate(self) -> float:
        """Return the best rate if it does not depend on the size: the mean of logarithms."""
        return float(np.exp(np.log(list(self.rates.values())).mean()))


@dataclass(frozen=True)
class Prediction:
    """What a ladder says about a run."""

    parameters: float
    tokens: float
    loss: float
    low: float
    high: float
    """The loss is between `low` and `high` with a probability of 95 %."""
    optimal_tokens: float
    """Tokens with which this model uses its compute best."""
    lr: float
    lr_reason: str
    batch_tokens: float
    """Tokens of a batch."""
    times_size: float
    """Parameters, relative to the largest rung."""
    times_tokens: float

    @property
    def warning(self) -> str | None:
        """What to know about a run that is far from all rungs."""
        far = max(self.times_size, self.times_tokens)
        if far <= _FAR:
            return None
        return (
            f"this is {self.times_size:.3g} times the parameters and {self.times_tokens:.3g} times "
            "the tokens of the largest rung. The law extrapolates. OLMo's published ladder up to "
            "1.3B foretold its 7B 1.9 % and its 13B 3.7 % too low"
        )


def fit_rows(rows: Sequence[LadderRow]) -> Fit:
    """Fit a law to results.

    Raises:
        DataError: See `law.check_runs`.
    """
    runs = choose_best(rows)
    law = fit(runs)
    return Fit(
        law,
        runs,
        bootstrap(runs, law),
        measure_noise(runs, law),
        measure_seeds(rows),
        find_rates(rows),
    )


def predict(fitted: Fit, parameters: float, tokens: float) -> Prediction:
    """Return what the law says about a run."""
    # The interval is that of a single run, and not of the law alone.
    low, high = find_interval(fitted.laws, fitted.runs, fitted.law, parameters, tokens)
    lr, reason = choose_rate(fitted.rates, parameters, tokens)
    return Prediction(
        parameters,
        tokens,
        float(fitted.law.predict(parameters, tokens)),
        low,
        high,
        fitted.law.find_optimal_tokens(parameters),
        lr,
        reason,
        compute_batch(tokens),
        parameters / float(fitted.runs.parameters.max()),
        tokens / float(fitted.runs.tokens.max()),
    )


def compute_batch(tokens: float) -> float:
    """Return the tokens of a batch by the step law (arXiv 2503.04715)."""
    return float(0.58 * tokens**0.571)


def choose_rate(
    rates: Mapping[tuple[float, float], float], parameters: float, tokens: float
) -> tuple[float, str]:
    """Return a learning rate, and where it is from.

    The exponents are those of the step law (arXiv 2503.04715): N^-0.713 D^0.307. With rates of the
    ladder, only its factor is fitted.
    """
    factor, reason = (
        1.79,
        "the published step law, as there are no three rates of one run of a ladder",
    )
    if rates:
        # Each best rate gives a factor. Their mean is that of logarithms.
        factors = [rate / (size**-0.713 * data**0.307) for (size, data), rate in rates.items()]
        factor = float(np.exp(np.log(factors).mean()))
        reason = f"the best rates of {len(rates)} runs of the ladder, with the step law's exponents"
    return factor * parameters**-0.713 * tokens**0.307, reason


def build_json(fitted: Fit, prediction: Prediction | None) -> dict[str, Any]:
    """Return a fit and a prediction as JSON values."""
    found: dict[str, Any] = {
        "law": asdict(fitted.law),
        "noise": fitted.noise,
        "seeds": fitted.seeds,
        "runs": len(fitted.runs.loss),
    }
    if prediction is not None:
        found["prediction"] = {**asdict(prediction), "warning": prediction.warning}
    return found
