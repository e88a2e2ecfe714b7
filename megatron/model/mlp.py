"""The feed-forward half of a block, plain or gated (https://arxiv.org/abs/2002.05202)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.shape import ModelShape
from megatron.parallel.collectives import enter_tensor_parallel
from megatron.parallel.layers import ColumnParallelLinear, Init, RowParallelLinear
from megatron.parallel.mesh import TensorParallel


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def _linear(x: Tensor) -> Tensor:
    return x


def choose_activation(glu: str | None, tanh_gelu: bool) -> Callable[[Tensor], Tensor]:
    """Return the activation function. In a gated MLP it applies to the gate.

    The GELU of geglu is the erf form, as in the paper.
    """
    if glu is None:
        if tanh_gelu:
            return _gelu_tanh
        return _gelu_erf
    # swiglu and the others are the names of Megatron-DeepSpeed's --glu-activation.
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "swiglu": F.silu,
        "geglu": _gelu_erf,
        "reglu": F.relu,
        "liglu": _linear,
    }
    return activations[glu]


class MLP(nn.Module):
    """Map [s, b, h] to [s, b, h] through an inner width f.

    Gate and up are two matrices, so that each rank's part of either is a contiguous slice.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel) -> None:
        """Create the two or three matrices.

        Args:
            shape: Sizes of the model.
            tp: The tensor-parallel ranks.
        """
        super().__init__()
        config = shape.config
        f = shape.ffn_hidden_size
        self.tp = tp
        self.activation = choose_activation(config.glu_activation, config.bias_gelu_fusion)
        self.up = ColumnParallelLinear(
            config.hidden_size, f, bias=config.add_bias_linear, tp=tp, init=Init.NORMAL
        )
        self.gate: ColumnParallelLinear | None = None
        if config.glu_activation:
            self.gate = ColumnParallelLinear(
                config.hidden_size, f, bias=config.add_bias_linear, tp=tp, init=Init.NORMAL
            )
        self.down = RowParallelLinear(
            f, config.hidden_size, bias=config.add_bias_linear, tp=tp, init=Init.SCALED_NORMAL
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h]. With sequence parallelism both are [s/t, b, h]."""
        # Entered once for both matrices. Two entries would double the communication.
        x = enter_tensor_parallel(x, self.tp)
        up = self.up(x, entered=True)  # [s, b, f/t]
        if self.gate is None:
            return self.down(self.activation(up))
        return self.down(self.activation(self.gate(x, entered=True)) * up)
