"""Comparisons of AdamW's kernel with torch's operator, on any device that runs the kernel."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.engine.optimizer import MasterParameter, Scaling
from megatron.extras.step.kernels.adamw import KernelAdamW
from megatron.parallel.parameter_spec import Init, ParameterSpec
from megatron.parallel.torch_private import fused_adamw_

SIZES = (0, 1, 7, 2048, 0, 5003, 33)
REPLACED = 3
"""The parameter whose copy is one number, as where float8 values take its place."""
VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, 1e-30, 1e30)
"""Gradients that the first elements of the largest parameter get, one a step."""
DECAY = 0.1
RATES = (0.1, 0.02)


def pad(tensor: Tensor) -> Tensor:
    """Return a tensor of a multiple of 64 elements.

    At the end of a tensor, torch's operator of a CPU rounds its last elements otherwise.
    """
    padded = tensor.new_zeros(-(-tensor.numel() // 64) * 64)
    padded[: tensor.numel()] = tensor.detach()
    return padded


def make_memory(size: int, device: str, dtype: torch.dtype, *, shift: int) -> Tensor:
    """Return zeros whose address is moved by some elements."""
    return torch.zeros(size + shift, device=device, dtype=dtype)[shift:]


@dataclass
class Comparison:
    """Parameters that a kernel updates, and the same ones that torch's operator updates."""

    device: str
    moments: torch.dtype
    copies: torch.dtype | None
    betas: tuple[float, float]
    shift: int = 0
    masters: list[MasterParameter] = field(default_factory=list)
    expected: list[list[Tensor]] = field(default_factory=list)
    """Weight and both moments of each parameter, on the CPU."""

    def __post_init__(self) -> None:
        """Create the parameters."""
        generator = torch.Generator().manual_seed(0)
        for number, size in enumerate(SIZES):
            value = torch.randn(size, generator=generator)
            weight = make_memory(size, self.device, torch.float32, shift=self.shift)
            weight.copy_(value)
            master = nn.Parameter(weight, requires_grad=False)
            model = master
            if self.copies is not None:
                copy = make_memory(size, self.device, self.copies, shift=self.shift)
                if number == REPLACED:
                    copy = torch.full_like(copy[:1], 7.0).expand(size)
                model = nn.Parameter(copy, requires_grad=False)
            shape = (size, 1) if number % 2 else (size,)
            self.masters.append(
                MasterParameter(
                    "head.weight" if number % 3 == 1 else f"weight {number}",
                    ParameterSpec(shape, Init.NORMAL, decays=len(shape) > 1),
                    (0,) * len(shape),
                    model,
                    master,
                    scaling=Scaling(rate=0.5, epsilon=2.0) if number == REPLACED else Scaling(),
                )
            )
            zeros = torch.zeros(size, dtype=self.moments)
            self.expected.append([value, zeros, zeros.clone()])
        self.config = OptimizerConfig(
            weight_decay=DECAY,
            adam_beta1=self.betas[0],
            adam_beta2=self.betas[1],
            exp_avg_dtype="bf16" if self.moments == torch.bfloat16 else "fp32",
            exp_avg_sq_dtype="bf16" if self.moments == torch.bfloat16 else "fp32",
        )
        self.kernel = KernelAdamW(self.masters, self.config)
        assert self.kernel.writes_copies

    def step(self, number: int, factor: float, *, applied: bool) -> None:
        """Update both with the same random gradients."""
        generator = torch.Generator().manual_seed(number)
        for master, state in zip(self.masters, self.expected, strict=True):
            gradient = torch.randn(master.weight.shape, generator=generator)
            if len(gradient) > 5000:
                gradient[: len(VALUES)] = torch.tensor(VALUES).roll(number)
            master.weight.grad = gradient.to(self.device)
            if applied:
                self._update(master, state, gradient * factor, number)
        decision = torch.tensor([float(applied), factor], dtype=torch.float64, device=self.device)
        self.kernel.set_step_count(number - 1)
        self.kernel.step_if(decision, *RATES)

    def _update(
        self, master: MasterParameter, state: list[Tensor], gradient: Tensor, number: int
    ) -> None:
        """Update the expected state with torch's operator of the CPU."""
        opened = [pad(each.float()) for each in state]
        fused_adamw_(
            *([opened[0]], [pad(gradient)], [opened[1]], [opened[2]], []),
            [torch.tensor(float(number))],
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=RATES[master.decoupled] * master.scaling.rate,
            weight_decay=DECAY if master.decays else 0.0,
            eps=self.config.adam_eps * master.scaling.epsilon,
            maximize=False,
        )
        for stored, new in zip(state, opened, strict=True):
            stored.copy_(new[: stored.numel()])

    def find_differences(self) -> list[str]:
        """Return the names of tensors that are not equal bit for bit. NaN equals NaN."""
        differing = []
        for number, (master, state) in enumerate(zip(self.masters, self.expected, strict=True)):
            pairs = {
                "weight": (master.weight, state[0]),
                "first": (self.kernel.get_moment(master, "exp_avg"), state[1]),
                "second": (self.kernel.get_moment(master, "exp_avg_sq"), state[2]),
            }
            copy = master.model_parameter
            if self.copies is not None:
                value = torch.full_like(state[0], 7.0) if number == REPLACED else state[0]
                pairs["copy"] = (copy, value.to(copy.dtype))
            for name, (found, expected) in pairs.items():
                # NaN has many bit patterns.
                if not torch.allclose(found.cpu(), expected, rtol=0, atol=0, equal_nan=True):
                    differing.append(f"{name} {number}")
        return differing


def compare_steps(
    device: str,
    moments: torch.dtype,
    copies: torch.dtype | None,
    betas: tuple[float, float],
    shift: int = 0,
) -> list[list[str]]:
    """Return the differences after each of four steps, one of which is dropped."""
    compared = Comparison(device, moments, copies, betas, shift)
    differing = []
    for number, factor, applied in (
        (1, 1.0, True),
        (2, 0.37, True),
        (3, float("nan"), False),
        (3, 2.0**-16, True),
    ):
        before = [master.weight.clone() for master in compared.masters]
        compared.step(number, factor, applied=applied)
        found = compared.find_differences()
        changed = any(
            not torch.equal(master.weight.nan_to_num(), old.nan_to_num())
            for master, old in zip(compared.masters, before, strict=True)
        )
        if changed != applied:
            found.append("whether the weights changed")
        differing.append(found)
    return differing
