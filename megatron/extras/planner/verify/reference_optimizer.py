"""Optimizers of the reference: torch's AdamW, and AdEMAMix and Muon as formulas on whole tensors.

Sources: https://arxiv.org/abs/1711.05101, https://arxiv.org/abs/2409.03137 (algorithm 1),
https://arxiv.org/abs/2502.16982. The warm-ups of AdEMAMix, and the scale and the Newton-Schulz
steps of Muon are functions of the engine. They work on whole tensors.
"""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.engine.ademamix import compute_alpha, compute_beta3
from megatron.engine.muon import compute_scale, orthogonalise
from megatron.extras.planner.verify.reference_parameters import find_row, get_ratios
from megatron.model.shape import ModelShape

Parameters = dict[str, nn.Parameter]
Moments = dict[str, dict[str, Tensor]]
"""Kind -> name of the parameter -> moment."""
Rates = tuple[float, float | None]
"""The learning rate, and that of the word embedding and the output matrix if it is another one."""


class ReferenceOptimizer:
    """Updates complete parameters by their gradients."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig, shape: ModelShape) -> None:
        """Create the optimizer that the configuration names, with moments of zero."""
        self._config = config
        self._shape = shape
        self._steps = 0
        # Only Muon treats matrices and other parameters differently.
        self._matrices: Parameters = {}
        self._others = parameters
        slow: dict[str, Parameters] = {}
        self._update: Callable[[Rates], None] = self._update_by_adamw
        match config.optimizer:
            case "adam":
                pass
            case "ademamix":
                self._update = self._update_by_ademamix
                slow = {"exp_avg_slow": parameters}
            case "muon":
                for name, p in parameters.items():
                    if find_row(name).is_matrix_of_layer:
                        self._matrices[name] = p
                self._others = {n: p for n, p in parameters.items() if n not in self._matrices}
            case _:
                # Another optimizer would be compared with AdamW.
                assert_never(config.optimizer)
        kinds = {"exp_avg": self._others, "exp_avg_sq": self._others, **slow}
        if self._matrices:
            kinds["momentum"] = self._matrices
        self.moments: Moments = {
            kind: {name: torch.zeros_like(p, requires_grad=False) for name, p in owned.items()}
            for kind, owned in kinds.items()
        }
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [p],
                    "name": name,
                    "weight_decay": self._get_decay(name),
                    "eps": self._get_epsilon(name),
                }
                for name, p in self._others.items()
            ],
            betas=(config.adam_beta1, config.adam_beta2),
            foreach=False,
        )

    @torch.no_grad()
    def step(self, rates: Rates) -> None:
        """Update all parameters."""
        self._steps += 1
        self._update(rates)
        self._update_by_muon(rates[0])

    def _get_decay(self, name: str) -> float:
        excluded = name.startswith("embedding.") and not self._config.weight_decay_on_embeddings
        decay = self._config.weight_decay * (find_row(name).decays and not excluded)
        # The product of rate and decay does not depend on the width.
        return decay / self._get_rate_factor(name)

    def _get_rate(self, name: str, rates: Rates) -> float:
        if rates[1] is not None and name in ("embedding.word.weight", "head.weight"):
            return rates[1]
        return rates[0] * self._get_rate_factor(name)

    def _get_rate_factor(self, name: str) -> float:
        if find_row(name).is_matrix_of_layer:
            return 1 / get_ratios(self._shape.config)[0]
        return 1.0

    def _get_epsilon(self, name: str) -> float:
        width, depth = get_ratios(self._shape.config)
        if name.startswith("blocks."):
            width *= depth
        return self._config.adam_eps / width

    def _update_by_adamw(self, rates: Rates) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self._get_rate(group["name"], rates)
        # The moments are read after the step, because torch creates them in it.
        self._adamw.step()
        for name, p in self._others.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                self.moments[kind][name] = self._adamw.state[p][kind].clone()

    def _update_by_ademamix(self, rates: Rates) -> None:
        config = self._config
        first = config.adam_beta1
        second = config.adam_beta2
        third = compute_beta3(config, self._steps)
        alpha = compute_alpha(config, self._steps)
        for name, p in self._others.items():
            gradient = _get_gradient(p)
            fast, squares, slow = (self.moments[kind][name] for kind in self.moments)
            fast.mul_(first).add_(gradient, alpha=1 - first)
            squares.mul_(second).add_(gradient.square(), alpha=1 - second)
            slow.mul_(third).add_(gradient, alpha=1 - third)
            # The slow average has no bias correction, as in the paper.
            root = (squares / (1 - second**self._steps)).sqrt() + self._get_epsilon(name)
            update = (fast / (1 - first**self._steps) + alpha * slow) / root
            p.sub_(self._get_rate(name, rates) * (update + self._get_decay(name) * p))

    def _update_by_muon(self, lr: float) -> None:
        config = self._config
        decay = config.muon_momentum
        for name, p in self._matrices.items():
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


def _get_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "each parameter has a gradient"
    return parameter.grad
