"""The update of AdamW with one kernel, which reads and writes each number once.

It writes the 16-bit copy of the weights too. An update moves 30 bytes for each parameter, and 22
with moments in bf16. All numbers of a step are read from the device, so the host can queue the
update before it knows whether the step is applied.
"""

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.engine.optimizer import AdamW, MasterParameter, choose_rate, compute_decay
from megatron.parallel.shard import ADAM_KINDS

_WRITTEN = ("weights", "firsts", "seconds", "copies")


# An operator without a result needs no function for its shapes.
@torch.library.custom_op("megatron::update_adamw", mutates_args=_WRITTEN)
def _update(
    weights: list[Tensor],
    gradients: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    copies: list[Tensor],
    settings: Tensor,
    decision: Tensor,
    beta1: float,
    beta2: float,
) -> None:
    """Update all parameters.

    Args:
        weights: The parameters in fp32.
        gradients: Their gradients in fp32.
        firsts: The first moments, all of one dtype.
        seconds: The second moments, all of one dtype.
        copies: The copies in 16 bits, one for each parameter or none at all.
        settings: fp32[parameters, 4]: 1 - rate x decay, rate / (1 - beta1^step),
            sqrt(1 - beta2^step) and epsilon.
        decision: fp32[2]: 0 to change nothing, and the factor on the gradients.
        beta1: See AdamW.
        beta2: See AdamW.
    """
    from megatron.extras.step.kernels.adamw_kernel import launch

    launch(weights, gradients, firsts, seconds, copies, settings, decision, (beta1, beta2))


class KernelAdamW(AdamW):
    """AdamW whose update is one kernel, unless apex is used or this rank has no elements."""

    def __init__(self, masters: list[MasterParameter], config: OptimizerConfig) -> None:
        """Create the optimizer, and copy what differs between parameters to their device."""
        super().__init__(masters, config)
        updated = [master for master in masters if master.weight.numel()]
        self.writes_copies = bool(updated) and not self.is_apex
        if not self.writes_copies:
            return
        self.description = ("optimizer", "AdamW, one Triton kernel", "--adamw-fusion")
        self._weights = [master.weight for master in updated]
        self._moments = [
            [self.get_moment(master, kind) for master in updated] for kind in ADAM_KINDS
        ]
        # The model computes with the masters themselves, or with copies in 16 bits.
        models = [master.model_parameter for master in updated]
        self._copies = [model for model in models if model.dtype != torch.float32]
        assert len(self._copies) in (0, len(models)), "the model has one dtype"
        self._betas = config.adam_beta1, config.adam_beta2
        columns = [
            (
                master.scaling.rate,
                compute_decay(master, config),
                config.adam_eps * master.scaling.epsilon,
                float(master.decoupled),
            )
            for master in updated
        ]
        device = self._weights[0].device
        table = torch.tensor(columns, dtype=torch.float64, device=device)
        self._rates, self._decays, self._eps, decoupled = table.T
        self._decoupled = decoupled.bool()

    def step(self, lr: float, decoupled_lr: float | None = None, factor: float = 1.0) -> None:
        """Update the weights. See `Optimizer.step`."""
        if not self.writes_copies:
            super().step(lr, decoupled_lr, factor)
            return
        decision = torch.ones_like(self._rates[:1]).repeat(2)
        decision[1].fill_(factor)
        self.step_if(decision, lr, decoupled_lr)

    @torch.no_grad()
    def step_if(self, decision: Tensor, lr: float, decoupled_lr: float | None) -> None:
        """Update the weights if the device has decided so. See `AdamW.step_if`."""
        if not self.writes_copies:
            super().step_if(decision, lr, decoupled_lr)
            return
        self.step_count += 1
        # A fill is one launch, and the host does not wait for it.
        numbers = self.step_count, lr, choose_rate(lr, decoupled_lr, decoupled=True)
        step, rate, decoupled_rate = (torch.full_like(decision[0], it) for it in numbers)
        rates = torch.where(self._decoupled, decoupled_rate, rate) * self._rates
        beta1, beta2 = self._betas
        settings = torch.stack(
            (
                1 - rates * self._decays,
                rates / (1 - beta1**step),
                (1 - beta2**step).sqrt().expand_as(rates),
                self._eps,
            ),
            dim=1,
        )
        # The kernel reads gradients in the order of their memory.
        gradients = [w.grad.contiguous() for w in self._weights if w.grad is not None]
        read = settings.float(), decision.float()
        _update(self._weights, gradients, *self._moments, self._copies, *read, beta1, beta2)
