"""AdamW over fp32 master weights, and the arithmetic on the whole model's gradient: norm, clipping, zeros.

The invariant: the optimizer sees plain local fp32 tensors, whatever holds them (a module's own parameters, FSDP2's shards, copies
of bf16 weights), so its numbers are the same everywhere. AdamW: https://arxiv.org/abs/1711.05101.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron import apex
from megatron.config.optimizer import OptimizerConfig
from megatron.parallel.layers import ParameterSpec


@dataclass
class MasterParameter:
    """One parameter's local part as the optimizer sees it."""

    name: str
    spec: ParameterSpec
    offset: tuple[int, ...]
    """Where the local part begins in the whole model's parameter."""
    model: nn.Parameter
    """What the module computes with: the same memory as `weight`, or its low-precision copy."""
    weight: nn.Parameter
    """fp32. Its `.grad` is set for the optimizer's step."""

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices: biases and norms have one dimension."""
        return len(self.spec.shape) > 1


class AdamW:
    """Adam with decoupled weight decay on matrices only; moments exist from the start, so that they can be loaded into."""

    def __init__(self, masters: list[MasterParameter], config: OptimizerConfig) -> None:
        self.masters = masters
        groups = [
            {
                "params": [m.weight for m in masters if m.decays],
                "weight_decay": config.weight_decay,
            },
            {"params": [m.weight for m in masters if not m.decays], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        betas = (config.adam_beta1, config.adam_beta2)
        on_gpu = any(m.weight.is_cuda for m in masters)
        apex_adam, reason = (
            apex.find("apex.optimizers", "FusedAdam") if on_gpu else (None, "apex is for GPUs")
        )
        self._step_in_groups = apex_adam is not None
        if apex_adam is not None:
            self._optimizer: torch.optim.Optimizer = apex_adam(
                groups, lr=0.0, betas=betas, eps=config.adam_eps, adam_w_mode=True
            )
            self.description = ("optimizer", "apex FusedAdam", reason)
        else:
            self._optimizer = torch.optim.AdamW(
                groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True
            )
            self.description = ("optimizer", "torch AdamW, fused", reason)
        self.step_count = 0
        for master in masters:
            self._optimizer.state[master.weight] = {
                "exp_avg": torch.zeros_like(master.weight),
                "exp_avg_sq": torch.zeros_like(master.weight),
            }
        self.set_step_count(0)

    def set_step_count(self, count: int) -> None:
        """How many steps the moments have seen: Adam's bias correction depends on it."""
        self.step_count = count
        if self._step_in_groups:
            for group in self._optimizer.param_groups:
                group["step"] = count
            return
        for master in self.masters:
            step = torch.tensor(float(count), dtype=torch.float32, device=master.weight.device)
            self._optimizer.state[master.weight]["step"] = step

    def get_moment(self, master: MasterParameter, kind: str) -> Tensor:
        """The live exp_avg or exp_avg_sq of a parameter."""
        return self._optimizer.state[master.weight][kind]

    def reset(self) -> None:
        """Moments and step count as before the first step."""
        for master in self.masters:
            self.get_moment(master, "exp_avg").zero_()
            self.get_moment(master, "exp_avg_sq").zero_()
        self.set_step_count(0)

    def step(self, lr: float) -> None:
        """Apply the gradients that the masters carry."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.step_count += 1


def compute_squared_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of all elements, a scalar in fp64 on their device.

    On the CPU, torch's norm of a whole matrix adds its squares up one after the other in fp32, which was wrong by 2e-5 for a word
    embedding, and differently so for each sharding of it. Rows are short: their norms are right to 1e-8, and are added in fp64.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if tensors[0].is_cuda:
        norms = list(torch._foreach_norm(tensors))
    else:
        rows = [torch.linalg.vector_norm(t, dim=-1) for t in tensors]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64) for r in rows]
    return torch.stack(norms).double().square().sum()


def count_zeros(tensors: list[Tensor]) -> Tensor:
    """Number of zeros over all elements (a scalar on their device)."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([t.numel() - torch.count_nonzero(t) for t in tensors]).double().sum()
