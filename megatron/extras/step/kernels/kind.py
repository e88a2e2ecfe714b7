"""An engine with kernels. This module imports neither torch nor Triton."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.base.errors import ConfigError
from megatron.model.layer_parts import SOFTMAXES

if TYPE_CHECKING:
    from megatron.config.kernels import KernelsConfig
    from megatron.model.fused_operators import FusedOperators
    from megatron.plan.run_plan import Plan


def list_options(plan: Plan, device_type: str) -> dict[str, FusedOperators]:
    """Return the argument `operators` of an engine, or nothing if its model needs no kernels.

    They are only imported if there are some.

    Args:
        plan: The plan of the run.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: See `choose_operators`.
    """
    model = plan.config.model
    operators: FusedOperators | None = None
    drops = device_type == "cuda" and model.has_dropout
    if plan.config.kernels.fusion_flags or drops:
        operators = choose_operators(
            plan.config.kernels, device_type, has_dropout=model.has_dropout
        )
    if SOFTMAXES.require(model.softmax_type).weigh is not None:
        operators = add_attention(model.softmax_type, operators)
    if device_type == "cuda" and find_delta_rule(plan):
        operators = add_delta_rule(plan, operators)
    return {} if operators is None else {"operators": operators}


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
    from megatron.model.fused_operators import FusedOperators

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
    """Return the kernels that the configuration asks for. Their calls need Triton.

    Args:
        config: The settings of kernels.
        has_dropout: Whether the model has dropout.
    """
    from megatron.extras.step.kernels.adamw import KernelAdamW
    from megatron.extras.step.kernels.cross_entropy import CrossEntropyKernels
    from megatron.extras.step.kernels.dropout import drop
    from megatron.extras.step.kernels.gate import ACTIVATION_KERNELS
    from megatron.extras.step.kernels.residual_norm import add_and_normalise
    from megatron.extras.step.kernels.rotary import divide_projection
    from megatron.model.fused_operators import FusedOperators

    chosen: dict[str, Any] = {
        "drop": has_dropout and drop,
        "rotate_projection": config.rope_fusion and divide_projection,
        "activations": config.bias_swiglu_fusion and dict(ACTIVATION_KERNELS.list_rows()),
        "add_and_normalise": config.residual_norm_fusion and add_and_normalise,
        "loss": config.cross_entropy_loss_fusion and CrossEntropyKernels(),
        "build_adamw": config.adamw_fusion and KernelAdamW,
    }
    return FusedOperators(**{name: kernel for name, kernel in chosen.items() if kernel})


def add_attention(softmax_type: str, operators: FusedOperators | None = None) -> FusedOperators:
    """Return kernels with those of a kind of softmax, which are PyTorch's and need no Triton."""
    from megatron.extras.step.kernels.attention import ATTENTION_KERNELS
    from megatron.model.fused_operators import FusedOperators

    kernels = ATTENTION_KERNELS.require(softmax_type)()
    return replace(operators or FusedOperators(), attention=kernels)


def find_delta_rule(plan: Plan) -> bool:
    """Return whether the model has the gated delta rule in 16 bits, and fla-core is installed."""
    config = plan.config
    if "gated_delta_net" not in config.model.attention_kinds:
        return False
    in_16_bits = config.precision.bf16 or config.precision.fp16
    return in_16_bits and importlib.util.find_spec("fla") is not None


def add_delta_rule(plan: Plan, operators: FusedOperators | None = None) -> FusedOperators:
    """Return kernels with that of the gated delta rule."""
    from megatron.extras.step.kernels.delta_rule import DeltaRuleKernel
    from megatron.model.fused_operators import FusedOperators

    kernel = DeltaRuleKernel(in_bf16=plan.config.precision.bf16)
    return replace(operators or FusedOperators(), delta_rule=kernel)


def find_kernel_obstacle(device_type: str) -> str:
    """Return why this process cannot run the kernels, or an empty text.

    Args:
        device_type: "cuda" or "cpu".
    """
    if device_type == "cpu":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'megatron-3d[kernels]'"
    try:
        importlib.import_module("triton.language")
    # A damaged package fails in many ways, and otherwise would fail in the first step.
    except Exception as error:
        return (
            f"the import of Triton fails ({type(error).__name__}: {error}); pip install "
            "--force-reinstall triton"
        )
    return ""
