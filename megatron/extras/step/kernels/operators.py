"""The choice of the kernels that a model uses."""

import os
from dataclasses import replace

from megatron.base.errors import ConfigError
from megatron.config.kernels import KernelsConfig
from megatron.extras.step.kernels.adamw import KernelAdamW
from megatron.extras.step.kernels.cross_entropy import CrossEntropyKernels
from megatron.extras.step.kernels.dropout import drop
from megatron.extras.step.kernels.gate import ACTIVATION_KERNELS
from megatron.extras.step.kernels.head_norm import divide_projection
from megatron.extras.step.kernels.kind import find_kernel_obstacle
from megatron.extras.step.kernels.residual_norm import add_and_normalise
from megatron.model.fused_operators import FusedOperators


def choose_operators(
    config: KernelsConfig, device_type: str, *, has_dropout: bool = False
) -> FusedOperators:
    """Return the kernels that the configuration asks for, if the device can run them.

    A CPU runs them only in Triton's interpreter (TRITON_INTERPRET=1), which is for tests.

    Args:
        config: The settings of kernels.
        device_type: "cuda" or "cpu".
        has_dropout: Whether the model has dropout. On a GPU only a kernel computes its masks.

    Raises:
        ConfigError: Triton is not installed, or its import fails.
    """
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return FusedOperators()
    if obstacle := find_kernel_obstacle("cuda"):
        if has_dropout:
            raise ConfigError(
                f"dropout on a GPU needs a kernel: {obstacle}, or give --hidden-dropout 0 "
                "--attention-dropout 0"
            )
        flags = " ".join(config.fusion_flags)
        raise ConfigError(f"{flags}: {obstacle}, or leave the flag out")
    return build_operators(config, has_dropout=has_dropout)


def build_operators(config: KernelsConfig, *, has_dropout: bool = False) -> FusedOperators:
    """Return the kernels that the configuration asks for.

    Args:
        config: The settings of kernels.
        has_dropout: Whether the model has dropout.
    """
    operators = FusedOperators()
    if has_dropout:
        operators = replace(operators, drop=drop)
    if config.rope_fusion:
        operators = replace(operators, rotate_projection=divide_projection)
    if config.bias_swiglu_fusion:
        operators = replace(operators, activations=dict(ACTIVATION_KERNELS.list_rows()))
    if config.residual_norm_fusion:
        operators = replace(operators, add_and_normalise=add_and_normalise)
    if config.cross_entropy_loss_fusion:
        operators = replace(operators, loss=CrossEntropyKernels())
    if config.adamw_fusion:
        operators = replace(operators, build_adamw=KernelAdamW)
    return operators
