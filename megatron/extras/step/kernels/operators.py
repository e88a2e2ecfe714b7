"""The choice of the kernels that a model uses."""

from dataclasses import replace

from megatron.config.kernels import KernelsConfig
from megatron.extras.step.kernels.adamw import KernelAdamW
from megatron.extras.step.kernels.cross_entropy import CrossEntropyKernels
from megatron.extras.step.kernels.dropout import drop
from megatron.extras.step.kernels.gate import ACTIVATION_KERNELS
from megatron.extras.step.kernels.head_norm import divide_projection
from megatron.extras.step.kernels.residual_norm import add_and_normalise
from megatron.model.fused_operators import FusedOperators


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
