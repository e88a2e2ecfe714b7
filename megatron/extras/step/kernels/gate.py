"""The activations of the MLP with one kernel for each direction.

In a gated MLP it is activation(gate) * up. PyTorch needs two kernels forward and three backward,
which move 14 values for each element instead of 8. It also keeps activation(gate) for the backward
pass. The square of ReLU takes two kernels forward and four backward, which move 14 values instead
of 5.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.config.table import Absent, Table
from megatron.parallel.torch_private import make_operator


def _make_result(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _make_gradients(_: Tensor, gate: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _make_result(gate), _make_result(gate)


@make_operator("apply_gate", _make_result)
def apply_gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, each [s, b, f/t]."""
    from megatron.extras.step.kernels.gate_kernel import launch_forward

    out = _make_result(gate)
    launch_forward(gate.contiguous(), up.contiguous(), out, activation)
    return out


@make_operator("apply_gate_backward", _make_gradients)
def _differentiate(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    from megatron.extras.step.kernels.gate_kernel import launch_backward

    grads = _make_gradients(grad, gate)
    launch_backward(grad.contiguous(), gate.contiguous(), up.contiguous(), *grads, activation)
    return grads


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    return (*_differentiate(grad, gate, up, ctx.activation), None)


torch.library.register_autograd("megatron::apply_gate", _backward, setup_context=_save)


@make_operator("square_relu", _make_result)
def square_relu(x: Tensor) -> Tensor:
    """Return the square of ReLU, [s, b, f/t]."""
    from megatron.extras.step.kernels.gate_kernel import launch_square

    out = _make_result(x)
    launch_square(x.contiguous(), out)
    return out


@make_operator("square_relu_backward", _make_result)
def _square_back(grad: Tensor, x: Tensor) -> Tensor:
    from megatron.extras.step.kernels.gate_kernel import launch_square_backward

    out = _make_result(grad)
    launch_square_backward(grad.contiguous(), x.contiguous(), out)
    return out


def _save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_square(ctx: Any, grad: Tensor) -> Tensor:
    return _square_back(grad, *ctx.saved_tensors)


torch.library.register_autograd(
    "megatron::square_relu", _differentiate_square, setup_context=_save_input
)


ACTIVATION_KERNELS: Table[Callable[..., Tensor]] = Table(
    "activation",
    {
        "squared_relu": square_relu,
        "swiglu": partial(apply_gate, activation="swiglu"),
        "geglu": partial(apply_gate, activation="geglu"),
        "reglu": partial(apply_gate, activation="reglu"),
        "liglu": partial(apply_gate, activation="liglu"),
        "clamped_swiglu": Absent("has no kernel: both of its factors are limited"),
    },
    otherwise=Absent("has no kernel, so PyTorch's operators compute it"),
)
"""Value of --activation or --glu-activation -> its kernel. See `FusedOperators.activations`."""
