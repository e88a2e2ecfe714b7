"""Values that are computed from several flags of Megatron core, for models as gpt-oss."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron.config.layer_choice import choose_layers, find_expert_layers
from megatron.extras.interop.translators.compat import Computed, Derivation, FlagValues

_CLAMPED = {"--quick-geglu": None, "--glu-linear-offset": 1.0, "--activation-func-clamp-value": 7.0}
"""The flags that together are clamped SwiGLU -> the value that each must have."""
_ROPE = {
    "position_embedding_type": "rotary",
    "rope_scaling": "yarn",
    "rope_scaling_factor": 32.0,
    "rope_original_length": 4096,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": False,
}
"""The rotary positions of gpt-oss (https://arxiv.org/abs/2508.10925)."""


def describe_layers(chosen: Sequence[int], num_layers: int) -> str | None:
    """Return a text for which `choose_layers` returns these layers, as in 3::4.

    Args:
        chosen: Numbers of layers in ascending order.
        num_layers: Layers of the model.

    Returns:
        The text, or None if no layer is chosen.
    """
    if not chosen:
        return None
    if len(chosen) > 1:
        text = f"{chosen[0]}::{chosen[1] - chosen[0]}"
        if choose_layers(text, num_layers) == frozenset(chosen):
            return text
    return ",".join(map(str, chosen))


def _compute_clamped_gate(values: FlagValues) -> Computed:
    given = [flag for flag in _CLAMPED if flag in values]
    off = [flag for flag in given if _CLAMPED[flag] == 1.0 and values.get_number(flag) == 0]
    if off == given:
        return None, ""
    if all(
        flag in values and number in (None, values.get_number(flag))
        for flag, number in _CLAMPED.items()
    ):
        return "clamped_swiglu", "that is what these three flags compute"
    raise ValueError(
        f"{' '.join(given)}: of these activations there is only that of gpt-oss, --quick-geglu "
        "--glu-linear-offset 1.0 --activation-func-clamp-value 7.0. Give all three, or use "
        "--glu-activation."
    )


def _compute_window(values: FlagValues) -> Computed:
    text = " ".join(values.get_words("--window-size") or ())
    found = re.fullmatch(r"\(?(-?\d+),\s*(-?\d+)\)?", text)
    if found is None or int(found[2]) != 0 or int(found[1]) < -1:
        raise ValueError(
            f"--window-size {text} must be N,0: N tokens before a token, and none after it; use "
            "--sliding-window, which also counts the token itself."
        )
    before = int(found[1])
    if before == -1:
        return None, ""
    return before + 1, f"{before} tokens before a token, and the token itself"


def _compute_full_layers(values: FlagValues) -> Computed:
    text = " ".join(values.get_words("--window-attn-skip-freq") or ())
    layers = values.get_field("model.num_layers")
    if layers is None or "--window-size" not in values:
        return None, ""
    if text.isdecimal() and int(text) > 0:
        step = int(text)
        return f"{step - 1}::{step}", f"every {step}th layer reads all tokens"
    # A list has a 1 for each layer with a window. It is written as that of --moe-layer-freq.
    with_window = find_expert_layers(text, layers)
    full = [layer for layer in range(layers) if layer not in with_window]
    return describe_layers(full, layers), "its zeros are the layers that read all tokens"


def _give(value: Any) -> Callable[[FlagValues], Computed]:
    """Return a function that always gives a value of gpt-oss."""
    return lambda values: (value, "--enable-gpt-oss, as in the published model")


CORE_DERIVATIONS: tuple[Derivation, ...] = (
    *((flag, "model.glu_activation", _compute_clamped_gate) for flag in _CLAMPED),
    ("--window-size", "model.sliding_window", _compute_window),
    ("--window-attn-skip-freq", "model.full_attention_layers", _compute_full_layers),
    *(("--enable-gpt-oss", f"model.{name}", _give(value)) for name, value in _ROPE.items()),
)
