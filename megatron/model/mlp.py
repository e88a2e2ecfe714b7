"""The feed-forward half of a block, plain or gated (https://arxiv.org/abs/2002.05202)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.table import Table
from megatron.model.fused_operators import FusedOperators
from megatron.model.layer_parts import ACTIVATIONS, get_activation, list_mlp_parameters
from megatron.model.shape import ModelShape
from megatron.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    apply_column_parallel,
    make_replicated_inside_region,
)
from megatron.parallel.mesh import TensorParallel

Activate = Callable[..., Tensor]
"""Maps the output of the first matrix, [s, b, f/t], to the same shape.

In a gated MLP, the arguments are the outputs of gate and up.
"""


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def _square_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_LIMIT = 7.0
"""Largest value of the gate of gpt-oss, and largest absolute value of its linear factor."""


def _gate_clamped(gate: Tensor, up: Tensor) -> Tensor:
    up = up.clamp(-_LIMIT, _LIMIT) + 1
    gate = gate.clamp(max=_LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * up


def _gate_by(activation: Callable[[Tensor], Tensor]) -> Activate:
    """Return the product inside a gated MLP with this activation of the gate."""
    return lambda gate, up: activation(gate) * up


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
        specs = ACTIVATIONS.require("xielu").parameters
        self.alpha_p = make_replicated_inside_region(specs["alpha_p"], tp)
        self.alpha_n = make_replicated_inside_region(specs["alpha_n"], tp)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of each element, computed in fp32."""
        wide = x.float()
        positive = F.softplus(self.alpha_p.float()) * wide.square()
        negative = self._BETA + F.softplus(self.alpha_n.float())
        below = negative * (torch.expm1(wide.clamp(max=self._EPS)) - wide)
        return (torch.where(wide > 0, positive, below) + self._BETA * wide).to(x.dtype)


def _choose_gelu(config: ModelConfig, tp: TensorParallel) -> Activate:
    return _gelu_tanh if config.bias_gelu_fusion else _gelu_erf


def _use(function: Activate) -> Callable[[ModelConfig, TensorParallel], Activate]:
    """Return the builder of a function without settings and weights."""
    return lambda config, tp: function


ACTIVATION_BUILDERS: Table[Callable[[ModelConfig, TensorParallel], Activate]] = Table(
    "activation",
    {
        "gelu": _choose_gelu,
        "squared_relu": _use(_square_relu),
        "xielu": lambda config, tp: XIELU(tp),
        "swiglu": _use(_gate_by(F.silu)),
        # The erf form, as in the paper.
        "geglu": _use(_gate_by(_gelu_erf)),
        "reglu": _use(_gate_by(F.relu)),
        "liglu": _use(torch.mul),
        "clamped_swiglu": _use(_gate_clamped),
    },
)
"""Value of --activation or --glu-activation -> a function that builds it."""


def build_activation(config: ModelConfig, tp: TensorParallel) -> Activate:
    """Return the activation of the MLP, which may be a module with weights."""
    return ACTIVATION_BUILDERS.require(config.activation_name)(config, tp)


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
        self.tp = tp
        self.activation = build_activation(config, tp)
        self._activation_name = config.activation_name
        self.operators = FusedOperators()
        """The kernels that take the place of PyTorch's operators."""
        specs = list_mlp_parameters(shape, width)
        self.up = ColumnParallelLinear(specs, "up", tp)
        self.gate: ColumnParallelLinear | None = None
        if get_activation(config).gated:
            self.gate = ColumnParallelLinear(specs, "gate", tp)
        self.down = RowParallelLinear(specs, "down", tp)

    def use_operators(self, operators: FusedOperators) -> None:
        """Use kernels in place of PyTorch's operators."""
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h]."""
        activate = self.operators.activations.get(self._activation_name, self.activation)
        if self.gate is None:
            return self.down(activate(self.up(x)))  # [s, b, f/t] in between
        up, gate = apply_column_parallel(x, self.up, self.gate)
        return self.down(activate(gate, up))
