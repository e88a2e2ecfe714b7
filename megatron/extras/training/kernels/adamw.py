"""The update of AdamW with one kernel, which reads and writes each number once.

It writes the 16-bit copy of the weights too. An update moves 30 bytes for each parameter, and 22
with moments in bf16. All numbers of a step are read from the device, so the host can queue the
update before it knows whether the step is applied.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.model.fused_operators import AdamWParameter

_WRITTEN = ("weights", "firsts", "seconds", "copies")


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
    from megatron.extras.training.kernels.adamw_kernel import launch

    launch(weights, gradients, firsts, seconds, copies, settings, decision, (beta1, beta2))


@_update.register_fake
def _(
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
    return None


class AdamWKernel:
    """The update of fixed parameters. See `UpdateAdamW`."""

    def __init__(self, parameters: Sequence[AdamWParameter], betas: tuple[float, float]) -> None:
        """Keep the parameters, and copy what differs between them to their device.

        Args:
            parameters: Either all of them have a copy, or none.
            betas: Adam's beta1 and beta2.
        """
        self._weights = [each.weight for each in parameters]
        self._firsts = [each.exp_avg for each in parameters]
        self._seconds = [each.exp_avg_sq for each in parameters]
        self._copies = [each.copy for each in parameters if each.copy is not None]
        assert len(self._copies) in (0, len(parameters)), "the model has one dtype"
        self._betas = betas
        columns = [[p.rate, p.decay, p.eps, p.decoupled] for p in parameters]
        device = parameters[0].weight.device
        table = torch.tensor(columns, dtype=torch.float64, device=device)
        self._rates, self._decays, self._eps, decoupled = table.T
        self._decoupled = decoupled.bool()

    @torch.no_grad()
    def __call__(self, numbers: Tensor) -> None:
        """Update the parameters. See `UpdateAdamW`."""
        _, _, lr, decoupled_lr, step = numbers
        rates = torch.where(self._decoupled, decoupled_lr, lr) * self._rates
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
        gradients = [weight.grad for weight in self._weights]
        _update(
            self._weights,
            # The kernel reads memory in its order.
            [gradient.contiguous() for gradient in gradients if gradient is not None],
            self._firsts,
            self._seconds,
            self._copies,
            settings.float(),
            numbers[:2].float(),
            beta1,
            beta2,
        )
