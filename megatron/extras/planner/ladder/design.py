"""One dial: a complete configuration from the number of layers, by published rules or a ladder.

Invariant: a flag that is given is kept, and what follows from it is computed from it.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.fields import LoadedConfig, ValueWithOrigin, flatten
from megatron.config.normalise import read_argv
from megatron.config.yaml_file import dump_fields
from megatron.extras.interop.translators.translator import OtherTrainers, load_config
from megatron.extras.planner.ladder.prediction import Fit, choose_rate, compute_batch
from megatron.extras.planner.ladder.runs import count_inner_parameters
from megatron.model.layer_parts import get_activation
from megatron.plan.resolve import resolve

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
