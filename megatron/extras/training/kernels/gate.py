"""The product inside a gated MLP: activation(gate) * up, with one kernel for each direction.

PyTorch needs two kernels forward and three backward, which move 14 values for each element instead
of 8. It also keeps activation(gate) for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.config.model import GLU


@torch.library.custom_op("megatron::apply_gate", mutates_args=())
def _apply(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from megatron.extras.training.kernels.gate_kernel import launch_forward

    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    launch_forward(gate.contiguous(), up.contiguous(), out, activation)
    return out


@torch.library.custom_op("megatron::apply_gate_backward", mutates_args=())
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


@_apply.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@_differentiate.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    one, other = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    return one, other


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    return (*_differentiate(grad, gate, up, ctx.activation), None)


_apply.register_autograd(_backward, setup_context=_save)


def apply_gate(gate: Tensor, up: Tensor, activation: GLU) -> Tensor:
    """Return activation(gate) * up. See `ApplyGate`."""
    return _apply(gate, up, activation)
