"""What a ladder says about a larger run, and a complete configuration from the number of layers.

A configuration follows from published rules or a ladder.

Invariant: a flag that is given is kept, and what follows from it is computed from it.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_count
from megatron.config.fields import LoadedConfig, ValueWithOrigin, flatten
from megatron.config.normalise import read_argv
from megatron.config.yaml_file import dump_fields
from megatron.extras.interop.translators.translator import OtherTrainers, load_config
from megatron.extras.planner.ladder.law import (
    Law,
    Runs,
    bootstrap,
    find_interval,
    fit,
    measure_noise,
)
from megatron.extras.planner.ladder.runs import (
    LadderRow,
    choose_best,
    count_inner_parameters,
    find_rates,
    measure_seeds,
)
from megatron.model.layer_parts import get_activation
from megatron.plan.resolve import resolve

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


_ASPECT = 64
_HEAD = 128
_DEEPEST = 1000
_FULL = "--train-samples 1000000000 --micro-batch-size 1 --global-batch-size 1 --lr 1"
"""Values that a size needs to be resolved."""
_LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--no-add-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0"
)


@dataclass(frozen=True)
class Choice:
    """Flags that were chosen, and why."""

    flags: str
    reason: str


@dataclass(frozen=True)
class Design:
    """A complete configuration."""

    choices: tuple[Choice, ...]
    """What no flag gave."""
    loaded: LoadedConfig
    parameters: int
    """N, without the embedding and the output matrix."""
    tokens: int

    def write(self) -> str:
        """Return the configuration as YAML, with the reasons as comments."""
        # Flags that were given keep their own origin.
        origin = dict(self.loaded.origin)
        for choice in self.choices:
            words = shlex.split(choice.flags)
            given = read_argv(words, OtherTrainers()).given
            origin |= dict.fromkeys(given, choice.reason)
        # A file with all defaults would hide what was chosen.
        chosen = {dotted for dotted, where in origin.items() if where != "default"}
        return dump_fields(flatten(self.loaded.config), origin, chosen)


class _Designer:
    """Collects choices, each of which may depend on the earlier ones."""

    def __init__(self, given: Sequence[str]) -> None:
        self.choices: list[Choice] = []
        self._given = given
        self._known = _read(given)

    def choose(self, flags: str, reason: str) -> None:
        """Choose those of the flags that are not given."""
        left = [
            f"--{flag}"
            for flag in flags.removeprefix("--").split(" --")
            if not _read(f"--{flag}".split()).keys() & self._known.keys()
        ]
        if left:
            self.choices.append(Choice(" ".join(left), reason))

    def get(self, dotted: str, default: float) -> float:
        """Return a number that is given, or else the default."""
        if dotted in self._known:
            return float(self._known[dotted].value)
        return default

    def has(self, *dotted: str) -> bool:
        """Return whether one of these is given."""
        return not self._known.keys().isdisjoint(dotted)

    def load(self, extra: str = "") -> LoadedConfig:
        """Return the configuration of all choices so far. Flags that are given win."""
        # Of a flag that is given twice, the last one counts.
        words = " ".join([*(choice.flags for choice in self.choices), extra])
        return load_config([*words.split(), *self._given])


def _read(words: Sequence[str]) -> dict[str, ValueWithOrigin]:
    return read_argv(words, OtherTrainers()).given


def design(
    depth: int,
    tokens_per_parameter: float,
    given: Sequence[str],
    fitted: Fit | None,
    *,
    keep_architecture: bool = False,
) -> Design:
    """Return a configuration of `depth` layers.

    Args:
        depth: Number of layers.
        tokens_per_parameter: D / N.
        given: Flags, such as those that all runs of a ladder have. They win.
        fitted: The ladder, for the learning rate. None: the published step law.
        keep_architecture: Whether the flags describe the kind of model, which must be that of the
            ladder. Otherwise a Llama is chosen.

    Raises:
        ConfigError: A number is not above 0, or the flags have errors.
    """
    if not 1 <= depth <= _DEEPEST or not 0 < tokens_per_parameter < math.inf:
        raise ConfigError(
            f"--depth {depth} must be 1 to {_DEEPEST}, and --tokens-per-parameter "
            f"{tokens_per_parameter:g} above 0."
        )
    it = _Designer(given)
    # The ladder itself may have this flag, with the same number.
    if it.get("model.num_layers", depth) != depth:
        raise ConfigError(f"--depth {depth} is the number of layers. Leave out --num-layers.")
    _choose_shape(it, depth, keep_architecture)
    plan = resolve(it.load(_FULL).config, 1)
    # The batch depends on the tokens, and these on the size.
    size, length = count_inner_parameters(plan), plan.config.model.seq_length
    wanted = compute_batch(tokens_per_parameter * size)
    # Powers of two divide among any usual number of ranks.
    nearest = 2 ** max(0, round(math.log2(wanted / length)))
    batch = int(it.get("batch.global_batch_size", nearest))
    samples = max(1, round(tokens_per_parameter * size / length / batch)) * batch
    tokens = samples * length
    it.choose(f"--global-batch-size {batch}", f"0.58 D^0.571 = {wanted:,.0f} tokens, step law")
    # The micro batch must divide the batch.
    it.choose(f"--micro-batch-size {math.gcd(batch, 8)}", "tools/plan.py says whether it fits")
    if not it.has("batch.train_iters", "batch.train_tokens", "batch.train_time"):
        reason = f"{tokens_per_parameter:g} tokens for each of {size:,} parameters"
        it.choose(f"--train-samples {samples}", reason)
    rate, reason = choose_rate(fitted, size, tokens)
    it.choose(f"--lr {rate:.3g}", reason)
    # A schedule that is given is complete.
    if not it.has("optimizer.lr_decay_style"):
        floor = it.get("optimizer.lr", rate) / 10
        it.choose(f"--lr-decay-style cosine --min-lr {floor:.3g}", "a tenth, as Chinchilla")
    it.choose("--lr-warmup-fraction 0.02", "2 % of the run")
    if plan.config.parallel.distributed_backend != "gloo":
        it.choose("--bf16", "the fastest precision of GPUs, without a loss scale")
    it.choose("--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0", "as in Llama")
    loaded = it.load()
    # Flags that are given may contradict each other, or what was chosen.
    final = resolve(loaded.config, 1)
    final.raise_on_errors()
    return Design(tuple(it.choices), loaded, size, final.train_tokens or tokens)


def _choose_shape(it: _Designer, depth: int, keep_architecture: bool) -> None:
    """Choose the sizes and the kind of the model."""
    head = int(it.get("model.kv_channels", min(_HEAD, _ASPECT * depth)))
    width = int(it.get("model.hidden_size", math.ceil(_ASPECT * depth / head) * head))
    it.choose(f"--num-layers {depth}", "--depth")
    it.choose(f"--hidden-size {width}", f"{_ASPECT} for each layer, as in nanochat")
    it.choose(f"--num-attention-heads {max(1, width // head)}", f"heads of {head}")
    it.choose("--seq-length 2048", "as in nanochat")
    if keep_architecture:
        return
    it.choose(_LLAMA, "as in Llama")
    if get_activation(it.load(_FULL).config.model).gated:
        inner = math.ceil(width / 48) * 128
        it.choose(f"--ffn-hidden-size {inner}", "8/3 of the width, in steps of 128, as in Llama")
