"""AdEMAMix: AdamW with a second, slow moving average of the gradient.

The slow average covers the gradients of tens of thousands of steps. Source:
https://arxiv.org/abs/2409.03137.
"""

import math

import torch

from megatron.config.optimizer import OPTIMIZERS, OptimizerConfig
from megatron.engine.optimizer import (
    PIECE,
    Optimizer,
    choose_rate,
    compute_decay,
    group_masters,
    open_in_fp32,
    scale_gradients,
    split_batches,
)
from megatron.parallel import torch_private as private


class AdEMAMix(Optimizer):
    """AdEMAMix with decoupled weight decay on matrices only."""

    row = OPTIMIZERS.require("ademamix")
    description = ("optimizer", "AdEMAMix", "--optimizer ademamix")

    @torch.no_grad()
    def step(self, lr: float, decoupled_lr: float | None = None, factor: float = 1.0) -> None:
        """Update the weights. See `Optimizer.step`."""
        scale_gradients(self.masters, factor)
        self.step_count += 1
        config = self._config
        alpha = compute_alpha(config, self.step_count)
        beta3 = compute_beta3(config, self.step_count)
        fast_correction = 1.0 - config.adam_beta1**self.step_count
        root_of_correction = math.sqrt(1.0 - config.adam_beta2**self.step_count)
        for group in group_masters(self.masters):
            tensors = [
                (m.weight, m.weight.grad, *self.states[m.weight].values())
                for m in group
                if m.weight.grad is not None
            ]
            rate = choose_rate(lr, decoupled_lr, decoupled=group[0].decoupled)
            rate *= group[0].scaling.rate
            decay = compute_decay(group[0], config)
            epsilon = config.adam_eps * group[0].scaling.epsilon
            for weights, gradients, fast_kept, squares_kept, slow in split_batches(tensors, PIECE):
                with open_in_fp32(fast_kept) as fast, open_in_fp32(squares_kept) as squares:
                    private.foreach_lerp_(fast, gradients, 1.0 - config.adam_beta1)
                    private.foreach_lerp_(slow, gradients, 1.0 - beta3)
                    private.foreach_mul_(squares, config.adam_beta2)
                    private.foreach_addcmul_(
                        squares, gradients, gradients, value=1.0 - config.adam_beta2
                    )
                    denominators = private.foreach_sqrt(squares)
                    private.foreach_div_(denominators, root_of_correction)
                    private.foreach_add_(denominators, epsilon)
                    updates = private.foreach_div(fast, fast_correction)
                # As in the paper, the slow average has no bias correction. It is small at first.
                private.foreach_add_(updates, slow, alpha=alpha)
                private.foreach_div_(updates, denominators)
                if group[0].decays:
                    private.foreach_mul_(weights, 1.0 - rate * decay)
                private.foreach_add_(weights, updates, alpha=-rate)


def compute_alpha(config: OptimizerConfig, step: int) -> float:
    """Return the weight of the slow average in a 1-based step. It rises linearly from 0."""
    warmup = config.ademamix_alpha_warmup
    if warmup is None or step >= warmup:
        return config.ademamix_alpha
    return config.ademamix_alpha * step / warmup


def compute_beta3(config: OptimizerConfig, step: int) -> float:
    """Return the decay rate of the slow average in a 1-based step.

    It rises from `--adam-beta1` to `--ademamix-beta3`. The half-life of the average rises linearly,
    and the rate does not. The half-life is proportional to -1 / log(rate).
    """
    warmup = config.ademamix_beta3_warmup
    if warmup is None or step >= warmup:
        return config.ademamix_beta3
    part = step / warmup
    inverse = (1.0 - part) * _invert_log(config.adam_beta1)
    inverse += part * _invert_log(config.ademamix_beta3)
    # Both rates are 0, so the slow average is always the last gradient.
    if inverse == 0.0:
        return 0.0
    return min(math.exp(1.0 / inverse), config.ademamix_beta3)


def _invert_log(rate: float) -> float:
    """Return 1 / log(rate), and its limit 0 for the rate 0."""
    if rate == 0.0:
        return 0.0
    return 1.0 / math.log(rate)
