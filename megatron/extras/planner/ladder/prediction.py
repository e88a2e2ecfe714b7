"""What a ladder says about a larger run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.base.plain_text import format_count
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
    parametrization: str = "standard"
    """Parametrization of all runs. With mup the best rate is the same for all widths, with
    completep for all sizes."""


@dataclass(frozen=True)
class Prediction:
    """What a ladder says about a run."""

    parameters: float
    tokens: float
    loss: float
    low: float
    high: float
    """The loss is between `low` and `high` with a probability of 95 %."""
    optimal_tokens: float | None
    """Tokens with which this model uses its compute best. None: far from what the ladder has."""
    lr: float
    lr_reason: str
    batch_tokens: float
    """Tokens of a batch."""
    times_size: float
    """Parameters, relative to the largest rung."""
    times_tokens: float
    times_smallest: float
    """The smaller one of parameters and tokens, relative to the smallest rung."""

    @property
    def warning(self) -> str | None:
        """What to know about a run that is far from all rungs."""
        if self.times_smallest < 1 / _FAR:
            return (
                f"this is {self.times_smallest:.3g} times the smallest rung. Laws do not hold for "
                "such small runs"
            )
        far = max(self.times_size, self.times_tokens)
        if far <= _FAR:
            return None
        return (
            f"this is {self.times_size:.3g} times the parameters and {self.times_tokens:.3g} times "
            "the tokens of the largest rung. The law extrapolates. OLMo's published ladder up to "
            "1.3B foretold its 7B 1.9 % and its 13B 3.7 % too low"
        )


def fit_rows(rows: Sequence[LadderRow], parametrization: str = "standard") -> Fit:
    """Fit a law to results.

    Args:
        rows: The results.
        parametrization: See `Fit`.

    Raises:
        DataError: See `law.check_runs` and `law.bootstrap`.
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
        parametrization,
    )


def predict(fitted: Fit, parameters: float, tokens: float) -> Prediction:
    """Return what the law says about a run."""
    # The interval is that of a single run, and not of the law alone.
    low, high = find_interval(fitted.laws, fitted.runs, fitted.law, parameters, tokens)
    lr, reason = choose_rate(fitted, parameters, tokens)
    return Prediction(
        parameters,
        tokens,
        float(fitted.law.predict(parameters, tokens)),
        low,
        high,
        find_optimal_tokens(fitted, parameters),
        lr,
        reason,
        compute_batch(tokens),
        parameters / float(fitted.runs.parameters.max()),
        tokens / float(fitted.runs.tokens.max()),
        min(
            parameters / float(fitted.runs.parameters.min()),
            tokens / float(fitted.runs.tokens.min()),
        ),
    )


def find_optimal_tokens(fitted: Fit, parameters: float) -> float | None:
    """Return the tokens with which a model uses its compute best.

    None: they are ten times as many as those of any run of the ladder, or a tenth of them.
    """
    found = fitted.law.find_optimal_tokens(parameters)
    # Far from the runs, small errors of the exponents change the answer by powers of ten.
    few, many = float(fitted.runs.tokens.min()), float(fitted.runs.tokens.max())
    return found if few / 10 <= found <= many * 10 else None


def compute_batch(tokens: float) -> float:
    """Return the tokens of a batch by the step law (arXiv 2503.04715)."""
    return float(0.58 * tokens**0.571)


def choose_rate(fitted: Fit | None, parameters: float, tokens: float) -> tuple[float, str]:
    """Return a learning rate, and where it is from.

    The exponents are those of the step law (arXiv 2503.04715): N^-0.713 D^0.307. With rates of the
    ladder, only its factor is fitted. If they transfer, it is their mean.
    """
    rates = {} if fitted is None else fitted.rates
    # With muP, a small model has the rate of a large one.
    if fitted is not None and fitted.parametrization != "standard" and rates:
        mean = float(np.exp(np.log(list(rates.values())).mean()))
        runs = format_count(len(rates), "run")
        over = {"mup": "widths and not depths"}.get(fitted.parametrization, "widths and depths")
        return mean, f"the best rates of {runs} of the ladder, which transfer over {over}"
    factor, reason = (
        1.79,
        "the published step law, as there are no three rates of one run of a ladder",
    )
    if rates:
        # Each best rate gives a factor. Their mean is that of logarithms.
        factors = [rate / (size**-0.713 * data**0.307) for (size, data), rate in rates.items()]
        factor = float(np.exp(np.log(factors).mean()))
        runs = format_count(len(rates), "run")
        reason = f"the best rates of {runs} of the ladder, with the step law's exponents"
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
