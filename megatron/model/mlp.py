"""The feed-forward half of a block, plain or gated (https://arxiv.org/abs/2002.05202)."""

from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import GLU, ModelConfig
from megatron.model.fused_operators import FusedOperators
from megatron.model.shape import ModelShape
from megatron.parallel.entered_linear import apply_entered_linears
from megatron.parallel.layers import (
    ColumnParallelLinear,
    Init,
    RowParallelLinear,
    list_numbers,
    make_replicated_inside_region,
)
from megatron.parallel.mesh import TensorParallel


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def _linear(x: Tensor) -> Tensor:
    return x


def _square_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_LIMIT = 7.0
"""Largest value of the gate of gpt-oss, and largest absolute value of its linear factor."""


def _clamped_swish(x: Tensor) -> Tensor:
    x = x.clamp(max=_LIMIT)
    return x * torch.sigmoid(1.702 * x)


_GATES: dict[GLU, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    # The erf form, as in the paper.
    "geglu": _gelu_erf,
    "reglu": F.relu,
    "liglu": _linear,
    "clamped_swiglu": _clamped_swish,
}
"""Value of --glu-activation -> the activation of the gate. The names are Megatron-DeepSpeed's."""


def multiply_gate(
    gate: Tensor,
    up: Tensor,
    activation: Callable[[Tensor], Tensor],
    glu: GLU | None,
    operators: FusedOperators,
) -> Tensor:
    """Return the product inside a gated MLP, [s, b, f/t].

    Args:
        gate: The output of the gate's matrix.
        up: The output of the other matrix.
        activation: The activation of the gate.
        glu: Its name.
        operators: The kernels. They have no form for clamped_swiglu.
    """
    if glu == "clamped_swiglu":
        up = up.clamp(-_LIMIT, _LIMIT) + 1
    elif operators.apply_gate is not None and glu is not None:
        return operators.apply_gate(gate, up, glu)
    return activation(gate) * up


class XIELU(nn.Module):
    """xIELU (https://arxiv.org/abs/2411.13010), an activation with two weights in each layer.

    y = a x^2 + b x for x > 0 and c (exp(x) - 1 - x) + b x below, with a = softplus(alpha_p),
    b = 1/2 and c = b + softplus(alpha_n). From -1e-6 to 0, exp(x) - 1 is replaced by its value at
    -1e-6.
    """

    _BETA = 0.5
    _EPS = -1e-6

    def __init__(self, tp: TensorParallel) -> None:
        """Create both weights, uninitialised."""
        super().__init__()
        self.alpha_p = make_replicated_inside_region((1,), tp, Init.XIELU_P)
        self.alpha_n = make_replicated_inside_region((1,), tp, Init.XIELU_N)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of each element, computed in fp32."""
        wide = x.float()
        positive = F.softplus(self.alpha_p.float()) * wide.square()
        negative = self._BETA + F.softplus(self.alpha_n.float())
        below = negative * (torch.expm1(wide.clamp(max=self._EPS)) - wide)
        return (torch.where(wide > 0, positive, below) + self._BETA * wide).to(x.dtype)


def build_activation(config: ModelConfig, tp: TensorParallel) -> Callable[[Tensor], Tensor]:
    """Return the activation function of the MLP, which may be a module with weights."""
    if config.glu_activation is not None:
        return _GATES[config.glu_activation]
    match config.activation:
        case "gelu":
            return _gelu_tanh if config.bias_gelu_fusion else _gelu_erf
        case "squared_relu":
            return _square_relu
        case "xielu":
            return XIELU(tp)
        case _:
            assert_never(config.activation)


class MLP(nn.Module):
    """Map [s, b, h] to [s, b, h] through an inner width f.

    The gate and up projections are two matrices, so that a rank's part of each is a contiguous
    slice.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel, width: int | None = None) -> None:
        """Create the two or three matrices.

        Args:
            shape: Sizes of the model.
            tp: The tensor-parallel ranks.
            width: The inner width. Default: that of the model's MLPs.
        """
        super().__init__()
        config = shape.config
        f = width or shape.ffn_hidden_size
        self.tp = tp
        self.activation = build_activation(config, tp)
        self.glu_activation = config.glu_activation
        self.operators = FusedOperators()
        """The kernels that take the place of PyTorch's operators."""
        self.up = ColumnParallelLinear(
            config.hidden_size, f, bias=shape.has_mlp_bias, tp=tp, init=Init.NORMAL
        )
        self.gate: ColumnParallelLinear | None = None
        if config.glu_activation:
            self.gate = ColumnParallelLinear(
                config.hidden_size, f, bias=shape.has_mlp_bias, tp=tp, init=Init.NORMAL
            )
        self.down = RowParallelLinear(
            f, config.hidden_size, bias=shape.has_mlp_bias, tp=tp, init=Init.SCALED_NORMAL
        )

    def use_operators(self, operators: FusedOperators) -> None:
        """Use kernels in place of PyTorch's operators."""
        self.operators = operators
        if operators.square_relu is not None and self.activation is _square_relu:
            self.activation = operators.square_relu

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # [s, b, f/t] in between
        # The tensor-parallel region is entered once for both matrices. Two entries would double the
        # communication.
        up, gate = apply_entered_linears(
            x,
            [(self.up.weight, self.up.bias), (self.gate.weight, self.gate.bias)],
            self.tp,
            numbers=list_numbers(self.up, self.gate),
            # Those of both matrices, because their input is the same.
            products=self.up.products,
        )
        inner = multiply_gate(gate, up, self.activation, self.glu_activation, self.operators)
        return self.down(inner)
