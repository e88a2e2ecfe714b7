"""The product inside a gated MLP: activation(gate) * up, with one kernel for each direction.

PyTorch needs two kernels forward and three backward, which move 14 values for each element instead
of 8. It also keeps activation(gate) for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.config.model import GLU
from megatron.parallel.operators import make_operator


@make_operator("apply_gate")
def _apply(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from megatron.extras.training.kernels.gate_kernel import launch_forward

    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    launch_forward(gate.contiguous(), up.contiguous(), out, activation)
    return out


@make_operator("apply_gate_backward")
def _differentiate(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    from megatron.extras.training.kernels.gate_kernel import launch_backward

    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_up = torch.empty_like(gate, memory_format=torch.contiguous_format)
    launch_backward(
        grad.contiguous(), gate.contiguous(), up.contiguous(), grad_gate, grad_up, activation
    )
    return grad_gate, grad_up


@torch.library.register_fake("megatron::apply_gate")
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.register_fake("megatron::apply_gate_backward")
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    one, other = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    return one, other


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    return (*_differentiate(grad, gate, up, ctx.activation), None)


torch.library.register_autograd("megatron::apply_gate", _backward, setup_context=_save)


def apply_gate(gate: Tensor, up: Tensor, activation: GLU) -> Tensor:
    """Return activation(gate) * up. See `ApplyGate`."""
    return _apply(gate, up, activation)
