"""Comparisons of AdamW's kernel with torch's operator, on any device that runs the kernel."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.extras.training.kernels.adamw import AdamWKernel
from megatron.model.fused_operators import AdamWParameter
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
    kept: list[AdamWParameter] = field(default_factory=list)
    expected: list[list[Tensor]] = field(default_factory=list)
    """Weight and both moments of each parameter, on the CPU."""

    def __post_init__(self) -> None:
        """Create the parameters."""
        generator = torch.Generator().manual_seed(0)
        for number, size in enumerate(SIZES):
            value = torch.randn(size, generator=generator)
            weight, first, second = (
                make_memory(size, self.device, dtype, shift=self.shift)
                for dtype in (torch.float32, self.moments, self.moments)
            )
            weight.copy_(value)
            copy = None
            if self.copies is not None:
                copy = make_memory(size, self.device, self.copies, shift=self.shift)
            if copy is not None and number == REPLACED:
                copy = torch.full((), 7.0, dtype=self.copies, device=self.device).expand(size)
            parameter = nn.Parameter(weight, requires_grad=False)
            decay = DECAY if number % 2 else 0.0
            self.kept.append(
                AdamWParameter(
                    *(parameter, first, second, copy),
                    rate=0.5 if number == 3 else 1.0,
                    decoupled=number % 3 == 1,
                    decay=decay,
                    eps=1e-8,
                )
            )
            zeros = torch.zeros(size, dtype=self.moments)
            self.expected.append([value, zeros, zeros.clone()])
        self.kernel = AdamWKernel(self.kept, self.betas)

    def step(self, number: int, factor: float, *, applied: bool) -> None:
        """Update both with the same random gradients."""
        generator = torch.Generator().manual_seed(number)
        for parameter, state in zip(self.kept, self.expected, strict=True):
            gradient = torch.randn(parameter.weight.shape, generator=generator)
            if len(gradient) > 5000:
                gradient[: len(VALUES)] = torch.tensor(VALUES).roll(number)
            parameter.weight.grad = gradient.to(self.device)
            if applied:
                self._update(parameter, state, gradient * factor, number)
        numbers = [float(applied), factor, *RATES, float(number)]
        self.kernel(torch.tensor(numbers, dtype=torch.float64, device=self.device))

    def _update(
        self, kept: AdamWParameter, state: list[Tensor], gradient: Tensor, number: int
    ) -> None:
        """Update the expected state with torch's operator of the CPU."""
        opened = [pad(each.float()) for each in state]
        fused_adamw_(
            *([opened[0]], [pad(gradient)], [opened[1]], [opened[2]], []),
            [torch.tensor(float(number))],
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=RATES[kept.decoupled] * kept.rate,
            weight_decay=kept.decay,
            eps=kept.eps,
            maximize=False,
        )
        for stored, new in zip(state, opened, strict=True):
            stored.copy_(new[: stored.numel()])

    def find_differences(self) -> list[str]:
        """Return the names of tensors that are not equal bit for bit. NaN equals NaN."""
        differing = []
        for number, (kept, state) in enumerate(zip(self.kept, self.expected, strict=True)):
            pairs = {"weight": (kept.weight, state[0]), "first": (kept.exp_avg, state[1])}
            pairs["second"] = (kept.exp_avg_sq, state[2])
            if kept.copy is not None and number == REPLACED:
                pairs["copy"] = (kept.copy, torch.full_like(state[0], 7.0).to(kept.copy.dtype))
            elif kept.copy is not None:
                pairs["copy"] = (kept.copy, state[0].to(kept.copy.dtype))
            for name, (found, expected) in pairs.items():
                # NaN has many bit patterns.
                equal = torch.allclose(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
                if not equal:
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
        before = [kept.weight.clone() for kept in compared.kept]
        compared.step(number, factor, applied=applied)
        found = compared.find_differences()
        changed = any(
            not torch.equal(kept.weight.nan_to_num(), old.nan_to_num())
            for kept, old in zip(compared.kept, before, strict=True)
        )
        if changed != applied:
            found.append("whether the weights changed")
        differing.append(found)
    return differing
