"""The coordinate check: how the sizes of activations and of their changes depend on the model.

Models of several widths and depths are trained for a few steps. If a parametrization transfers
learning rates, the changes of the activations do not grow with the width. Source:
https://arxiv.org/abs/2203.03466, appendix D.1.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.tree import Config
from megatron.console.figure import make_figure, save_figure
from megatron.engine.native import NativeEngine
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.parallel.grid import Grid
from megatron.parallel.mesh import build_mesh
from megatron.plan.resolve import resolve
from megatron.run.start.open_data import open_data
from megatron.run.state import TrainState

RATIOS = {"width": (1, 2, 4, 8), "depth": (1, 2, 4)}
"""Direction -> the sizes of the models, relative to the base model."""
_STEPS = 4
_SHRINKS, _FLAT, _GROWS = -0.5, 0.1, 0.3
"""Below the first slope a size shrinks, from there to the second it is fine, and above the third it
grows."""
_STREAM = "residual stream"
_WIDTHS = (
    *("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
)
"""Settings that grow with the width."""

Sizes = dict[tuple[str, str], float]
"""(Part of the model, "at the start" or "change") -> root mean square."""


@dataclass(frozen=True)
class Slope:
    """The slope of the logarithm of a size by that of the width or the depth."""

    direction: str
    part: str
    what: str
    slope: float
    sizes: tuple[float, ...]
    """The mean over the seeds for each model."""

    @property
    def verdict(self) -> str:
        """Whether a change stays the same: ok, shrinks, grows, unclear, or empty if not judged."""
        # Initial sizes may depend on the width by design. In deeper models, the last layer reads
        # another input, so only what all layers have added is compared.
        if self.what != "change" or (self.direction == "depth" and self.part != _STREAM):
            return ""
        if self.slope > _GROWS:
            return "grows"
        if self.slope < _SHRINKS:
            return "shrinks"
        return "ok" if self.slope < _FLAT else "unclear"


def enlarge(config: Config, direction: str, ratio: int) -> Config:
    """Return the configuration of a model `ratio` times as large, with that of `config` as base.

    Raises:
        ConfigError: The configuration names a base model.
    """
    model = config.model
    # A base of the base would give factors in the smallest model already.
    if model.base_width is not None or model.base_depth is not None:
        raise ConfigError(
            "the flags describe the base model: leave out --base-width and --base-depth."
        )
    sizes: dict[str, int | None] = {}
    if model.parametrization != "standard":
        sizes["base_width"] = model.hidden_size
    if model.parametrization == "completep":
        sizes["base_depth"] = model.num_layers
    if direction == "depth":
        sizes["num_layers"] = model.num_layers * ratio
    else:
        # Wider models have more heads of the same width.
        sizes["kv_channels"] = model.kv_channels or model.hidden_size // model.num_attention_heads
        for name in _WIDTHS:
            value = getattr(model, name)
            # What follows from the hidden size needs no value.
            if value is not None:
                sizes[name] = value * ratio
    return replace(config, model=replace(model, **sizes))  # type: ignore[arg-type]


def measure(config: Config, seeds: Sequence[int]) -> Iterator[tuple[str, int, Sizes]]:
    """Train all models. Yield the direction, the ratio and the sizes of each.

    Raises:
        ConfigError: A configuration has errors.
    """
    # The length and the schedule are those of the check.
    batch = replace(
        config.batch,
        train_iters=_STEPS,
        train_samples=None,
        train_tokens=None,
        train_time=None,
    )
    optimizer = replace(config.optimizer, lr_warmup_fraction=None, lr_warmup_samples=0, min_lr=0.0)
    config = replace(config, batch=batch, optimizer=optimizer)
    for direction, ratios in RATIOS.items():
        for ratio in ratios:
            larger = enlarge(config, direction, ratio)
            for seed in seeds:
                yield direction, ratio, _train(replace(larger, batch=replace(batch, seed=seed)))


def _train(config: Config) -> Sizes:
    """Train one model for a few steps, and return the sizes on its first batch."""
    plan = resolve(config, 1)
    plan.raise_on_errors()
    # One process has all experts.
    experts = None
    if config.model.num_experts is not None:
        experts = 1
    mesh = build_mesh(Grid(1, 1, 1), torch.device("cpu"), expert_size=experts)
    sources = open_data(plan, mesh, TrainState())
    assert sources.train is not None, "there are training steps"
    engine = NativeEngine(plan, mesh)
    size = plan.batch_size.final
    batch = sources.train.read_batch(size)
    inputs = Inputs(torch.cat([each.tokens for each in batch]))
    # The same batch is read before and after, so only the weights make a difference.
    before = _read_activations(engine.stages[0], inputs)
    lr = config.optimizer.lr
    assert lr is not None, "the plan has no errors"
    for iteration in range(1, _STEPS + 1):
        # The full rate from the first step, so that all models change as much as they will.
        engine.train_batch(batch, iteration=iteration, lr=lr)
        batch = sources.train.read_batch(size)
    # Files of the data stay open otherwise, for each of many models.
    sources.close()
    after = _read_activations(engine.stages[0], inputs)
    sizes: Sizes = {}
    for name, first in before.items():
        sizes[name, "at the start"] = _compute_rms(first)
        sizes[name, "change"] = _compute_rms(after[name] - first)
    return sizes


def _read_activations(model: GPT, inputs: Inputs) -> dict[str, Tensor]:
    """Return the outputs of attention and MLP in the last layer, its output, and the logits."""
    found: dict[str, Tensor] = {}
    # The last layer has what all layers before it have changed.
    last = list(model.get_blocks().values())[-1]
    hooks = [
        module.register_forward_hook(
            lambda _, __, output, name=name: found.update({name: output.detach()})
        )
        for name, module in (("attention", last.attention), ("MLP", last.mlp))
    ]
    # Dropout would be a part of the change.
    training = model.training
    model.eval()
    with torch.no_grad():
        found[_STREAM] = model.run_blocks(None, inputs)
        found["logits"] = model.project_to_logits(found[_STREAM])
    model.train(training)
    for hook in hooks:
        hook.remove()
    return found


def _compute_rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def fit_slopes(measured: Sequence[tuple[str, int, Sizes]]) -> list[Slope]:
    """Return the slope of each size, over all seeds.

    Raises:
        ConfigError: A size is not finite, so a model diverged, or it is 0.
    """
    groups: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for direction, ratio, sizes in measured:
        for (part, what), size in sizes.items():
            if not np.isfinite(size) or size <= 0:
                raise ConfigError(
                    f"{part}, {what}: the size is {size} in a model of {ratio} times the "
                    f"{direction}. A model that diverges needs a smaller --lr."
                )
            groups[direction, part, what].append((ratio, size))
    slopes = []
    for key, points in groups.items():
        # A power is a line in logarithms.
        x, y = np.log(np.array(points, float).T)
        # The geometric mean, as the line is fitted to logarithms.
        means = [float(np.exp(y[x == ratio].mean())) for ratio in np.unique(x)]
        slopes.append(Slope(*key, float(np.polyfit(x, y, 1)[0]), tuple(means)))
    return slopes


def draw(slopes: Sequence[Slope], path: Path) -> None:
    """Draw the sizes against width and depth.

    Raises:
        ConfigError: matplotlib is missing, or does not know the format of `path`.
    """
    figure = make_figure(9, 6)
    axes = figure.subplots(2, 2)
    for row, what in enumerate(("at the start", "change")):
        for column, direction in enumerate(RATIOS):
            for each in slopes:
                if (each.what, each.direction) == (what, direction):
                    label = f"{each.part} {each.slope:+.2f}"
                    axes[row][column].loglog(RATIOS[direction], each.sizes, "o-", label=label)
            axes[row][column].set_title(f"{what}, by {direction}")
            axes[row][column].legend(fontsize="small")
    save_figure(figure, path)


def describe_base(model: ModelConfig) -> str:
    """Return the parametrization and the base model for people."""
    return f"{model.parametrization}, from width {model.hidden_size} and {model.num_layers} layers"
