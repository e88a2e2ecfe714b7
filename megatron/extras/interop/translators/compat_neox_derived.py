"""Values that follow from several keys of GPT-NeoX.

Invariant: as in `compat_derived`. A value of the command line has priority over the keys, so what
depends on the sizes of the model is computed here and not where the file is read.

Source: GPT-NeoX's `ParallelMLP`, its `init_functions.py`, and its calculation of derived arguments.
"""

import math
from collections.abc import Callable

from megatron.extras.interop.translators.compat import (
    NEOX,
    Computed,
    Derivation,
    FlagValues,
)

_DEFAULT_STD = 0.02


def _compute_width(values: FlagValues) -> Computed:
    """Return the inner width of the MLP.

    Raises:
        ValueError: the two matrices of GPT-NeoX's gated MLP would not fit each other.
    """
    hidden = values.get_field("model.hidden_size")
    gated = values.get_field("model.glu_activation") is not None
    given = values.get_number("intermediate-size")
    factor = values.get_number("expansion-factor")
    multiple = int(values.get_number("mlp-multiple-of", 1.0))
    width = 4 * hidden
    if not math.isnan(given):
        width = int(given)
    elif not math.isnan(factor):
        width = int(factor * hidden)
    if values.has("mlp-type", "llama"):
        if math.isnan(given):
            width = _round_up(int(8 * hidden / 3), 256)
        return width, "the width of GPT-NeoX's Llama MLP"
    elif not gated and math.isnan(given) and math.isnan(factor):
        return None, ""
    if gated:
        # A gated MLP has about as many parameters as one of this width without a gate.
        both = int(width * 2 / 3)
        inner = _round_up(both // 2, multiple)
        if _round_up(both, 2 * multiple) != 2 * inner:
            raise ValueError(
                f"intermediate_size {width} gives two matrices of a gated MLP in GPT-NeoX that do "
                f"not fit each other. It takes a third of the number: write {3 * width} for a "
                f"width of {width}."
            )
        return inner, "a third of intermediate_size, by GPT-NeoX's rule"
    if width % (2 * multiple):
        raise ValueError(
            f"intermediate_size {width} must be divisible by {2 * multiple}, 2 x mlp_multiple_of."
        )
    return width, "the width of GPT-NeoX's MLP"


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _compute_std(values: FlagValues) -> Computed:
    method = _find_method(values, "init-method", "normal")
    if method == "small_init":
        return "small", "init_method small_init"
    # Both trainers have the same default.
    if method == "normal" and "init-method-std" not in values:
        return None, ""
    return _find_deviation(values, method), f"init_method {method}"


def _compute_output_std(values: FlagValues) -> Computed:
    method = _find_method(values, "output-layer-init-method", "scaled_normal")
    reason = f"output_layer_init_method {method}"
    if method == "wang_init":
        return "wang", reason
    # It is the default here, if the other matrices have the same number.
    if method == "scaled_normal" and _find_method(values, "init-method", "normal") == "normal":
        return None, ""
    return _find_deviation(values, method), reason


def _find_method(values: FlagValues, key: str, default: str) -> str:
    return (values.get_words(key) or (default,))[0]


def _find_deviation(values: FlagValues, method: str) -> float | None:
    """Return the standard deviation of a method. None if the model's sizes are not known."""
    hidden = values.get_field("model.hidden_size")
    layers = values.get_field("model.num_layers")
    if hidden is None or layers is None:
        return None
    std = values.get_number("init-method-std", _DEFAULT_STD)
    return {
        "normal": std,
        "scaled_normal": std / math.sqrt(2 * layers),
        "single_residual_scaled_normal": std / math.sqrt(layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / layers / math.sqrt(hidden),
    }[method]


def _compute_epsilon(values: FlagValues) -> Computed:
    if values.get_field("model.normalization") != "RMSNorm":
        return None, ""
    return values.get_number("rms-norm-epsilon", 1e-8), "rms_norm_epsilon"


def _compute_window(values: FlagValues) -> Computed:
    return int(values.get_number("sliding-window-width")) + 1, (
        "sliding_window_width tokens before a token, and the token itself"
    )


def _compute_warmup(values: FlagValues) -> Computed:
    # A warm-up of the command line replaces the fraction of the file.
    if values.list_warmups():
        return None, ""
    return values.get_number("warmup", 0.01), "warmup, a fraction of the decay"


def _compute_decay(values: FlagValues) -> Computed:
    steps = values.get_field("batch.train_iters") * values.get_number("lr-decay-fraction")
    return max(1, math.floor(steps)), "lr_decay_fraction x train_iters"


def _compute_accumulation(values: FlagValues) -> Computed:
    steps = values.get_number("gradient-accumulation-steps")
    # A batch size of the command line replaces the steps. One of the file must agree with them.
    replaced = values.get_field("batch.global_batch_size") is not None
    if steps == 1 or math.isnan(steps) or (replaced and "train-batch-size" not in values):
        return None, ""
    return int(steps), "gradient_accumulation_steps, at any number of ranks"


def _take_whole(key: str) -> Callable[[FlagValues], Computed]:
    """Return a rule that gives the value of a key."""
    return lambda values: (int(values.get_number(key)), key.replace("-", "_"))


def _compute_save_at(values: FlagValues) -> Computed:
    words = values.get_words("extra-save-iters") or ()
    # Iteration 0 is the state before the first step, which is not saved.
    numbers = tuple(int(word) for word in words if int(word) > 0)
    return numbers or None, "extra_save_iters, without 0"


NEOX_DERIVATIONS = (
    Derivation(NEOX, "model.ffn_hidden_size", _compute_width, needs=("model.hidden_size",)),
    Derivation(NEOX, "model.init_method_std", _compute_std),
    Derivation(NEOX, "model.output_init_method_std", _compute_output_std),
    Derivation(NEOX, "model.layernorm_epsilon", _compute_epsilon),
    Derivation("sliding-window-width", "model.sliding_window", _compute_window),
    Derivation(NEOX, "optimizer.lr_warmup_fraction", _compute_warmup),
    # A missing number of iterations is an error of its own.
    Derivation(
        "lr-decay-fraction",
        "optimizer.lr_decay_iters",
        _compute_decay,
        needs=("batch.train_iters",),
    ),
    Derivation(NEOX, "batch.gradient_accumulation_steps", _compute_accumulation),
    # Without --save, they would be an error here. NeoX ignores them.
    *(
        Derivation(key, f"checkpoint.{name}", compute or _take_whole(key), "", ("checkpoint.save",))
        for key, name, compute in (
            ("checkpoint-factor", "save_interval", None),
            ("extra-save-iters", "save_at", _compute_save_at),
            ("keep-last-n-checkpoints", "keep_latest_checkpoints", None),
        )
    ),
)
