"""Auxiliary losses and the bias of experts for the reference, as formulas on the complete batch.

The reference has all samples of a step in one microbatch. The losses depend on the microbatches of
the copy, which are neighbours in the batch. The model of the reference chooses the experts by its
own router. Everything that follows from the choices is computed here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.loss import LossConfig
from megatron.config.tree import Config
from megatron.model.experts.routing import BALANCE, Router, find_best, list_routers
from megatron.model.gpt import GPT


def leave_out_losses(loss: LossConfig) -> LossConfig:
    """Return the settings of a model that computes no auxiliary loss of experts itself."""
    return replace(loss, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0)


class ReferenceExperts:
    """What the routers of the reference's model choose in a step, and what follows from it."""

    def __init__(self, model: GPT, config: Config) -> None:
        """Watch the routers of a model without auxiliary losses."""
        self._config = config
        self._routers = list_routers(model)
        for router in self._routers:
            router.allocate(torch.device("cpu"))
        self._seen: list[tuple[Router, Tensor, Tensor]] = []
        """Each router with its logits [n, E] and its choices [n, k]."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the choices of a forward pass in this context."""
        self._seen = []
        handles = [router.register_forward_hook(self._record) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, router: Any, arguments: tuple[Any, ...], choice: Any) -> None:
        logits = F.linear(arguments[0], router.weight, router.bias)
        self._seen.append((router, logits, choice.experts))

    def compute_losses(self, samples: int) -> Tensor:
        """Return the sum of the auxiliary losses x their coefficients.

        Args:
            samples: Samples of the batch. Row i of the logits is of sample i % samples.
        """
        loss = self._config.loss
        total = torch.zeros(())
        size = self._config.batch.micro_batch_size
        if loss.moe_router_load_balancing_type == "seq_aux_loss":
            size = 1
        for _, logits, experts in self._seen:
            parts = torch.arange(len(logits)) % samples // size
            numbers = range(int(parts.max()) + 1)
            if loss.moe_router_load_balancing_type != "none":
                balance = [self._balance(logits[parts == i], experts[parts == i]) for i in numbers]
                total = total + loss.moe_aux_loss_coeff * sum(balance) / len(balance)
            total = total + loss.moe_z_loss_coeff * logits.logsumexp(dim=1).square().mean()
        return total

    def _balance(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return E sum(f p) of the tokens of a microbatch or a sequence."""
        model = self._config.model
        if model.moe_router_score_function == "sigmoid":
            scores = logits.sigmoid()
            scores = scores / scores.sum(dim=1, keepdim=True)
        else:
            scores = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
        if model.moe_router_enable_expert_bias or model.moe_router_num_groups is not None:
            experts = find_best(scores.detach(), model.moe_router_topk)
        shares = torch.bincount(experts.flatten(), minlength=scores.shape[1]) / experts.numel()
        return scores.shape[1] * (shares * scores.mean(dim=0)).sum()

    def update_biases(self) -> None:
        """Move each bias of balancing by the choices of the step, which was applied."""
        for router, logits, experts in self._seen:
            if router.balance.numel():
                counts = torch.bincount(experts.flatten(), minlength=logits.shape[1])
                mean = experts.numel() / logits.shape[1]
                rate = self._config.loss.moe_router_bias_update_rate
                router.balance += rate * torch.sign(mean - counts)

    def copy_biases(self) -> dict[str, Tensor]:
        """Return the biases of balancing by their names in checkpoints."""
        return {
            f"blocks.{router.layer}{BALANCE}": router.balance.clone()
            for router in self._routers
            if router.balance.numel()
        }
