"""The choice of the kernels that a model uses."""

import importlib
import importlib.util
import os
from dataclasses import replace

from megatron.base.errors import ConfigError
from megatron.config.kernels import KernelsConfig
from megatron.extras.kernels.cross_entropy import CrossEntropyKernels
from megatron.extras.kernels.gate import apply_gate
from megatron.extras.kernels.residual_norm import add_and_normalise
from megatron.extras.kernels.rotary import rotate, rotate_projection
from megatron.model.fused_operators import FusedOperators


def choose_operators(config: KernelsConfig, device_type: str) -> FusedOperators:
    """Return the kernels that the configuration asks for, if the device can run them.

    A CPU runs them only in Triton's interpreter (TRITON_INTERPRET=1), which is for tests.

    Args:
        config: The settings of kernels.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: Triton is not installed, or its import fails. A fallback would let ranks
            compute differently.
    """
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return FusedOperators()
    flags = " ".join(config.fusion_flags)
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"{flags}: Triton is not installed; install it with pip install "
            "'megatron-3d[kernels]', or leave the flag out"
        )
    try:
        importlib.import_module("triton.language")
    # A damaged package fails in many ways, and otherwise would fail in the first step.
    except Exception as error:
        raise ConfigError(
            f"{flags}: the import of Triton fails ({type(error).__name__}: {error}); install it "
            "again with pip install --force-reinstall triton, or leave the flag out"
        ) from error
    return build_operators(config)


def build_operators(config: KernelsConfig) -> FusedOperators:
    """Return the kernels that the configuration asks for.

    Args:
        config: The settings of kernels.
    """
    operators = FusedOperators()
    if config.rope_fusion:
        operators = replace(operators, rotate=rotate, rotate_projection=rotate_projection)
    if config.bias_swiglu_fusion:
        operators = replace(operators, apply_gate=apply_gate)
    if config.residual_norm_fusion:
        operators = replace(operators, add_and_normalise=add_and_normalise)
    if config.cross_entropy_loss_fusion:
        operators = replace(operators, loss=CrossEntropyKernels())
    return operators
