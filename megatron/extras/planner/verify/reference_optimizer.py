"""Optimizers of the reference: torch's AdamW, and AdEMAMix and Muon as formulas on whole tensors.

Sources: https://arxiv.org/abs/1711.05101, https://arxiv.org/abs/2409.03137 (algorithm 1),
https://arxiv.org/abs/2502.16982. The warm-ups of AdEMAMix, and the scale and the Newton-Schulz
steps of Muon are functions of the engine. They work on whole tensors.

A formula shares only the name with the row of `OPTIMIZERS`. So a mistake in the row is found.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.table import Table
from megatron.engine.ademamix import compute_alpha, compute_beta3
from megatron.engine.muon import compute_scale, orthogonalise
from megatron.extras.planner.verify.reference_parameters import (
    decays,
    get_ratios,
    is_matrix_of_layer,
)
from megatron.model.shape import ModelShape

Parameters = dict[str, nn.Parameter]
Moments = dict[str, dict[str, Tensor]]
"""Kind -> name of the parameter -> moment."""
Rates = tuple[float, float | None]
"""The learning rate, and that of the word embedding and the output matrix if it is another one."""


class Formula(ABC):
    """The update of some complete parameters by their gradients."""

    kinds: ClassVar[tuple[str, ...]]
    """Its moments of each parameter."""
    averages: ClassVar[Mapping[str, str]]
    """State that is an average m' = b m + (1 - b) g of gradients -> the setting with b.

    The comparison reads the gradients from them. Each parameter needs one.
    """
    layer_matrices_only: ClassVar[bool] = False
    """Whether AdamW updates what is not a matrix of a layer."""
    rate: ClassVar[float] = 1.0
    """Factor on the enlarged learning rate of the copy."""
    values: ClassVar[Mapping[str, Any]] = {}
    """Dotted name of a setting -> its value in the copy in fp32."""
    spans: ClassVar[tuple[str, ...]] = ()
    """Dotted names of numbers of steps. If they are given, the copy has its own length there."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig, shape: ModelShape) -> None:
        """Create the moments, which are zero."""
        self._parameters = parameters
        self._config = config
        self._shape = shape
        self._steps = 0
        self.moments: Moments = {
            kind: {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
            for kind in self.kinds
        }

    def step(self, rates: Rates) -> None:
        """Update the parameters."""
        self._steps += 1
        self._update(rates)

    @abstractmethod
    def _update(self, rates: Rates) -> None:
        """Update the parameters. The steps are counted already."""

    def _get_decay(self, name: str) -> float:
        excluded = name.startswith("embedding.") and not self._config.weight_decay_on_embeddings
        decay = self._config.weight_decay * (decays(name) and not excluded)
        # The product of rate and decay does not depend on the width.
        return decay / self._get_rate_factor(name)

    def _get_rate(self, name: str, rates: Rates) -> float:
        if rates[1] is not None and name in ("embedding.word.weight", "head.weight"):
            return rates[1]
        return rates[0] * self._get_rate_factor(name)

    def _get_rate_factor(self, name: str) -> float:
        if is_matrix_of_layer(name):
            return 1 / get_ratios(self._shape.config)[0]
        return 1.0

    def _get_epsilon(self, name: str) -> float:
        width, depth = get_ratios(self._shape.config)
        if name.startswith("blocks."):
            width *= depth
        return self._config.adam_eps / width


class AdamWFormula(Formula):
    """torch's AdamW."""

    kinds = ("exp_avg", "exp_avg_sq")
    averages: ClassVar[Mapping[str, str]] = {"exp_avg": "adam_beta1"}

    def __init__(self, parameters: Parameters, config: OptimizerConfig, shape: ModelShape) -> None:
        """Create torch's optimizer."""
        super().__init__(parameters, config, shape)
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [p],
                    "name": name,
                    "weight_decay": self._get_decay(name),
                    "eps": self._get_epsilon(name),
                }
                for name, p in parameters.items()
            ],
            betas=(config.adam_beta1, config.adam_beta2),
            foreach=False,
        )

    def _update(self, rates: Rates) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self._get_rate(group["name"], rates)
        # The moments are read after the step, because torch creates them in it.
        self._adamw.step()
        for name, p in self._parameters.items():
            for kind in self.kinds:
                self.moments[kind][name] = self._adamw.state[p][kind].clone()


class AdEMAMixFormula(Formula):
    """AdEMAMix."""

    kinds = ("exp_avg", "exp_avg_sq", "exp_avg_slow")
    averages: ClassVar[Mapping[str, str]] = {"exp_avg": "adam_beta1"}
    spans = ("optimizer.ademamix_beta3_warmup", "optimizer.ademamix_alpha_warmup")

    def _update(self, rates: Rates) -> None:
        config = self._config
        first = config.adam_beta1
        second = config.adam_beta2
        third = compute_beta3(config, self._steps)
        alpha = compute_alpha(config, self._steps)
        for name, p in self._parameters.items():
            gradient = _get_gradient(p)
            fast, squares, slow = (self.moments[kind][name] for kind in self.kinds)
            fast.mul_(first).add_(gradient, alpha=1 - first)
            squares.mul_(second).add_(gradient.square(), alpha=1 - second)
            slow.mul_(third).add_(gradient, alpha=1 - third)
            # The slow average has no bias correction, as in the paper.
            root = (squares / (1 - second**self._steps)).sqrt() + self._get_epsilon(name)
            update = (fast / (1 - first**self._steps) + alpha * slow) / root
            p.sub_(self._get_rate(name, rates) * (update + self._get_decay(name) * p))


class MuonFormula(Formula):
    """Muon."""

    kinds = ("momentum",)
    averages: ClassVar[Mapping[str, str]] = {"momentum": "muon_momentum"}
    layer_matrices_only = True
    # Its updates have full rank, and rounding errors grow faster with it.
    rate = 1 / 4
    # The products of the default precision are in bf16.
    values: ClassVar[Mapping[str, Any]] = {"optimizer.muon_fp32_matmul_prec": "high"}

    def _update(self, rates: Rates) -> None:
        config = self._config
        decay = config.muon_momentum
        lr = rates[0]
        for name, p in self._parameters.items():
            gradient = _get_gradient(p)
            source = self.moments["momentum"][name].mul_(decay).add_(gradient, alpha=1 - decay)
            if config.muon_nesterov:
                source = gradient * (1 - decay) + source * decay
            # The decay is decoupled from the update.
            p.mul_(1 - lr * config.weight_decay)
            blocks = [torch.arange(len(p))]
            if name.endswith("attention.qkv.weight"):
                # Queries, keys and values are three matrices, whose rows alternate by group.
                heads = blocks[0].view(self._shape.query_groups, -1, self._shape.head_dim)
                blocks = [heads[:, :-2].flatten(), heads[:, -2].flatten(), heads[:, -1].flatten()]
            if ".mlp.experts." in name:
                blocks = list(blocks[0].view(self._shape.config.num_experts or 1, -1))
            for rows in blocks:
                scale = compute_scale(len(rows), p.shape[1], config)
                steps = config.muon_num_ns_steps
                update = orthogonalise(source[rows], steps, config.muon_coefficient_type)
                if config.muon_scale_mode == "spectral":
                    scale /= get_ratios(self._shape.config)[0] ** 0.5
                p[rows] -= lr * scale * update


FORMULAS: Table[type[Formula]] = Table(
    "--optimizer",
    {
        "adam": AdamWFormula,
        "ademamix": AdEMAMixFormula,
        "muon": MuonFormula,
    },
)
"""An optimizer without a formula has `Absent`, and its runs are refused."""


class ReferenceOptimizer:
    """Updates complete parameters by their gradients."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig, shape: ModelShape) -> None:
        """Create the optimizer that the configuration names, with moments of zero.

        Raises:
            ConfigError: It has no formula.
        """
        formula = FORMULAS.require(config.optimizer)
        own = parameters
        self._formulas: list[Formula] = []
        if formula.layer_matrices_only:
            own = {n: p for n, p in parameters.items() if is_matrix_of_layer(n)}
            others = {name: p for name, p in parameters.items() if name not in own}
            self._formulas.append(AdamWFormula(others, config, shape))
        self._formulas.append(formula(own, config, shape))

    @property
    def moments(self) -> Moments:
        """The moments of all parameters."""
        found: Moments = {}
        for formula in self._formulas:
            for kind, tensors in formula.moments.items():
                found[kind] = found.get(kind, {}) | tensors
        return found

    @torch.no_grad()
    def step(self, rates: Rates) -> None:
        """Update all parameters."""
        for formula in self._formulas:
            formula.step(rates)


def get_decays(config: OptimizerConfig) -> dict[str, float]:
    """Return the decay b of each state that is an average m' = b m + (1 - b) g of gradients.

    Raises:
        ConfigError: The optimizer has no formula.
    """
    formula = FORMULAS.require(config.optimizer)
    averages = dict(formula.averages)
    if formula.layer_matrices_only:
        averages = {**AdamWFormula.averages, **averages}
    return {kind: getattr(config, setting) for kind, setting in averages.items()}


def compute_clipping(config: OptimizerConfig, norm: float) -> float:
    """Return the factor on gradients of this norm, as in torch's `clip_grad_norm_`."""
    if not 0 < config.clip_grad < norm:
        return 1.0
    return config.clip_grad / (norm + 1e-6)


def _get_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "each parameter has a gradient"
    return parameter.grad
