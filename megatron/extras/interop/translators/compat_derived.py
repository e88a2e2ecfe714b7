"""Values that are computed from several flags of another system, and that system's defaults.

A row of the compatibility table handles a single flag. This module handles numbers that are
computed from two flags, and defaults that differ from those of this trainer.

Invariant: a warning reports each value that is set here. A value that was given is never replaced,
with one exception: Megatron's NullTokenizer adds an id to --vocab-size.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.config.fields import PRESET_ORIGIN, all_fields, find_missing
from megatron.config.layer_choice import choose_layers, find_expert_layers
from megatron.config.logging import ALL_RANKS
from megatron.extras.interop.translators.compat import (
    NEOX,
    NEOX_TRAINER,
    OTHER_WARMUPS,
    TRAINERS,
    Computed,
    Derivation,
    FlagValues,
    Given,
    Typed,
    find_row,
)
from megatron.extras.interop.translators.compat_neox_derived import NEOX_DERIVATIONS

_PAI_VOCABULARIES = {
    "LLama2Tokenizer": 32000,
    "LLama3Tokenizer": 128000,
    "Qwen2Tokenizer": 151643,
    "Qwen3Tokenizer": 151643,
}
"""Tokenizer of Pai-Megatron-Patch -> ids of its base vocabulary, without added tokens."""

_NO_EXPERTS = "it is a setting of experts, and there are none"
"""The reason of the rows that are harmless without experts only."""
_ACCOUNT_FOR_ENDS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_SHAPE = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
_OTHER_DATA = (
    "data.mock_data",
    "data.data_phases",
    "data.train_weighted_split_paths",
    "data.train_weighted_split_paths_path",
)
_EVALUATION = (
    "batch.eval_iters",
    "batch.eval_interval",
    "batch.eval_interval_time",
    "batch.eval_only",
    "batch.eval_tasks",
)
_LOADER = ("--file-type", "--col-name", "--eos-token", "--logical-shards", "--datasets")
_REPLACED_BY = {
    "--dtype": ("precision.fp16",),
    "--mixed-precision": ("precision.fp16",),
    "--iterations": ("batch.train_samples",),
    "--num-steps": ("batch.train_samples", "batch.train_time"),
    "--warmup-steps": OTHER_WARMUPS,
    **dict.fromkeys(_LOADER, _OTHER_DATA),
    # A flag of the evaluation asks for one, and fms-fsdp has none.
    "--eval-iters": _EVALUATION,
    "--split": (*_OTHER_DATA, *_EVALUATION),
    # The default weights are those of the default data sets.
    "--weights": (*_OTHER_DATA, "data.datasets"),
    "--zero-stage": ("parallel.sharding_strategy",),
}
"""Flag with a default -> fields that answer the same question. Only one of both may be given."""

_HAS_EFFECT_WITH = {
    "--checkpoint-interval": "checkpoint.save",
    **dict.fromkeys((*_LOADER, "--weights", "--split"), "data.data_path"),
}
"""Flag with a default -> field without which it has no effect."""


def find_defaults(typed: Typed, given: Given) -> tuple[str, list[str]] | None:
    """Return the name of the system whose defaults apply, and these defaults as flags. Or None.

    They apply only if no flag of this trainer gives the shape of the model. If the flags of both
    are mixed, this trainer's defaults apply.
    The default of a flag that is given is left out, because a value may set other fields than the
    default does (`--model`), or none.
    """
    if NEOX in typed:
        return NEOX, _select_defaults(NEOX_TRAINER.defaults, typed, given)
    for system, trainer in TRAINERS.items():
        found = typed.keys() & set(trainer.identify)
        # With this flag alone, all other flags may be those of this trainer.
        if found == {trainer.ambiguous} and not find_missing(given):
            continue
        if found and not _is_model_described_otherwise(given, trainer.shape):
            return system, _select_defaults(trainer.defaults, typed, given)
    return None


def describe_dropped_defaults(typed: Typed, given: Given) -> str | None:
    """Return the warning that the defaults of another system are not used, or None.

    Its flags are given, but other flags describe the model (`find_defaults`).
    """
    for system, trainer in TRAINERS.items():
        found = [flag for flag in trainer.identify if flag in typed]
        if found and found != [trainer.ambiguous]:
            shape = [given[dotted].origin for dotted in _SHAPE if dotted in given]
            return (
                f"{found[0]} is a flag of {system}, but {shape[0]} gives the shape of the model: "
                f"the defaults of {system} are not used for flags that are not given. Give the "
                f"model with a flag of {system} to have them."
            )
    return None


def _select_defaults(defaults: str, typed: Typed, given: Given) -> list[str]:
    """Return the defaults of the flags that nothing on the command line replaces."""
    kept: list[str] = []
    for flag, *values in (part.split() for part in re.split(r" (?=--)", defaults)):
        others = (given[dotted].value for dotted in _REPLACED_BY.get(flag, ()) if dotted in given)
        if _HAS_EFFECT_WITH.get(flag, flag) not in (flag, *given):
            continue
        # A warm-up of 0 is a choice, and a switch that is off is none.
        if flag not in typed and all(value is None or value is False for value in others):
            kept += [flag, *values]
    return kept


def _is_model_described_otherwise(given: Given, flags: tuple[str, ...]) -> bool:
    """Return whether a flag that is not in `flags` gives a part of the model's shape."""
    origins = [given[dotted].origin.replace("_", "-") for dotted in _SHAPE if dotted in given]
    return any(origin not in flags for origin in origins)


def derive_values(typed: Typed, system: str, given: Given) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted field, value, reason) for each value that is computed from other flags.

    Fields that are in `given` are left out.

    Args:
        typed: The flags of the compatibility table.
        system: The system whose defaults apply, or an empty string.
        given: The fields of this trainer.

    Raises:
        ValueError: the flags contradict each other. The message gives the rule.
    """
    _refuse_settings_of_experts(typed, given)
    size = given.get("tokenizer.vocab_size")
    # A preset's number already includes the end of a document.
    if (
        typed.get("--tokenizer-type") == ("NullTokenizer",)
        and size is not None
        and not size.origin.startswith(PRESET_ORIGIN)
    ):
        yield (
            "tokenizer.vocab_size",
            size.value + 1,
            f"--vocab-size is {size.value + 1}: NullTokenizer has {size.value} ids and one for the "
            "end of a document",
        )
    values = FlagValues(typed, given)
    for rule in _DERIVATIONS:
        if rule.field not in given and rule.applies(values, system):
            value, reason = rule.compute(values)
            if value is not None:
                shown = value
                if value is True:
                    shown = "on"
                elif isinstance(value, float):
                    shown = f"{value:g}"
                elif isinstance(value, tuple):
                    shown = " ".join(map(str, value))
                yield rule.field, value, f"{all_fields()[rule.field].flag} is {shown}: {reason}"


def _refuse_settings_of_experts(typed: Typed, given: Given) -> None:
    """Refuse settings that are harmless only because there are no experts.

    Raises:
        ValueError: There are experts and such settings.
    """
    if "model.num_experts" not in given:
        return
    refused = [
        " ".join([flag, *values])
        for flag, values in typed.items()
        if (row := find_row(flag, values)) is not None and row.reason == _NO_EXPERTS
    ]
    if refused:
        raise ValueError(
            f"{', '.join(refused)} would change how the experts of --num-experts are computed, "
            "and this trainer has no such setting: remove it."
        )


def _set(
    value: Any, reason: str, condition: Callable[[FlagValues], Any] = lambda values: True
) -> Callable[[FlagValues], Computed]:
    """Return a rule that gives a fixed value if a condition holds."""
    return lambda values: (value if condition(values) else None, reason)


# Megatron-LM and its forks.
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
    if "--window-size" not in values:
        return None, ""
    if text.isdecimal() and int(text) > 0:
        step = int(text)
        return f"{step - 1}::{step}", f"every {step}th layer reads all tokens"
    # A list has a 1 for each layer with a window. It is written as that of --moe-layer-freq.
    with_window = find_expert_layers(text, layers)
    full = [layer for layer in range(layers) if layer not in with_window]
    return describe_layers(full, layers), "its zeros are the layers that read all tokens"


def _compute_megatron_swiglu_width(values: FlagValues) -> Computed:
    hidden = values.get_field("model.hidden_size")
    if hidden < 1:
        return None, ""
    width = int((4 * hidden * 2 / 3) / 64) * 64
    return max(width, 1), "8/3 x hidden size, rounded down to a multiple of 64, as in Megatron-LM"


def _compute_virtual_stage_layers(values: FlagValues) -> Computed:
    layers = values.get_field("model.num_layers")
    ranks = values.get_field("parallel.pipeline_model_parallel_size") or 1
    stages = values.get_number("--num-virtual-stages-per-pipeline-rank")
    if not stages > 1:
        return None, ""
    both = " and ".join(_ACCOUNT_FOR_ENDS)
    ends = 2 * all(flag in values for flag in _ACCOUNT_FOR_ENDS)
    total = ranks * int(stages)
    if (layers + ends) % total:
        counted = str(layers)
        fix = ""
        if ends:
            counted = f"{layers} + 2 for {both}"
        elif (layers + 2) % total == 0:
            fix = f", or give {both}"
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {stages:g} x pipeline size {ranks} must "
            f"divide --num-layers {counted}; use another number of virtual stages{fix}."
        )
    number = (layers + ends) // total
    return number, "layers / (pipeline size x virtual stages on each rank)"


def _compute_partition_method(values: FlagValues) -> Computed:
    """Return the method that counts the embedding and the output layer, as Megatron-LM's flags."""
    if (values.get_field("parallel.pipeline_model_parallel_size") or 1) == 1:
        return None, ""
    (given, *both) = [flag for flag in _ACCOUNT_FOR_ENDS if flag in values]
    if both:
        return "type:transformer|embedding", " and ".join(_ACCOUNT_FOR_ENDS)
    stages = values.get_number("--num-virtual-stages-per-pipeline-rank", 1)
    if stages > 1 or values.get_field("parallel.num_layers_per_virtual_pipeline_stage"):
        raise ValueError(
            f"{given} without the other of {' and '.join(_ACCOUNT_FOR_ENDS)} is not possible with "
            "virtual stages: the embedding and the output layer count alike. Give both or none."
        )
    return None, ""


def _compute_tracker(values: FlagValues) -> Computed:
    """Return the tracker for a command line that sends its metrics to Weights & Biases."""
    switches = ["--wandb", "--use-wandb"]
    # The project of llm-baselines is only a name.
    names_only = any(values.get_words(flag) for flag in TRAINERS["llm-baselines"].identify)
    if not names_only:
        switches.append("--wandb-project")
    # An empty project turns Megatron's off.
    if all(values.get_words(flag) in (None, ("",)) for flag in switches):
        return None, ""
    return ("wandb",), "metrics go to Weights & Biases, and the ids of its runs to --save"


def _compute_pai_vocabulary(values: FlagValues) -> Computed:
    """Return the ids of Pai-Megatron-Patch's tokenizer, with those of --extra-vocab-size."""
    (name,) = values.get_words("--patch-tokenizer-type") or ("",)
    # Another tokenizer is refused.
    if name not in _PAI_VOCABULARIES:
        return None, ""
    extra = _get_whole_number(values, "--extra-vocab-size", 0)
    return _PAI_VOCABULARIES[name] + extra, f"{name} has {_PAI_VOCABULARIES[name]} ids"


def _profiles_as_microsoft(values: FlagValues) -> bool:
    """Return whether --profile is that of Microsoft's fork, with its own flag for the steps."""
    words = values.get_words("--profile") or ()
    if words not in ((), ("pt",), ("pt-full",)):
        raise ValueError(f"--profile {' '.join(words)} must be --profile, or --profile pt.")
    return words != ()


def _compute_profiled_iterations(values: FlagValues) -> Computed:
    """Return the iterations, counted from 1, that the profilers of Megatron record."""
    if _profiles_as_microsoft(values):
        words = values.get_words("--profile-steps") or ("2,3",)
        match = re.fullmatch(r"(\d+),(\d+)", " ".join(words))
        if match is None:
            raise ValueError(
                f"--profile-steps {' '.join(words)} must be FIRST,LAST; use --profile-iterations."
            )
        return f"{match[1]}-{match[2]}", "--profile-steps, both included"
    start = _get_whole_number(values, "--profile-step-start", 10)
    end = _get_whole_number(values, "--profile-step-end", 12)
    # nsys starts after `start` iterations. PyTorch's profiler is stopped in its step `end`, which
    # is therefore not recorded.
    if values.get_words("--use-pytorch-profiler") is None:
        first = start + 1
        last = end
    else:
        first = max(start, 1)
        last = end - 1
    if first > last:
        raise ValueError(
            f"--profile-step-end {end} must be above --profile-step-start {start}; use "
            "--profile-iterations FIRST-LAST."
        )
    return f"{first}-{last}", f"Megatron profiles from step {start} to step {end}"


def _get_whole_number(values: FlagValues, flag: str, default: int) -> int:
    number = values.get_number(flag)
    if math.isnan(number):
        return default
    return int(number)


def _compute_profiled_ranks(values: FlagValues) -> Computed:
    if _profiles_as_microsoft(values):
        return (ALL_RANKS,), "all ranks, as in Microsoft's Megatron-DeepSpeed"
    return None, ""


def _compute_base_width(values: FlagValues) -> Computed:
    return values.get_field("model.hidden_size"), "--hidden-size, as in Megatron-LM"


def _compute_base_head(values: FlagValues) -> Computed:
    """Return the width of a base head. Megatron-LM has a number that need not be whole."""
    # Their arguments store it as a float.
    width = values.get_number("--mup-base-head-dim", 1.0)
    if width != int(width):
        raise ValueError(f"--mup-base-head-dim {width:g} must be a whole number.")
    return int(width), "Megatron-LM divides logits by head width / root of --mup-base-head-dim"


# llm-baselines.
def _compute_llama_width(values: FlagValues) -> Computed:
    hidden = values.get_field("model.hidden_size")
    multiple = values.get_number("--multiple-of")
    swiglu = values.get_field("model.glu_activation") == "swiglu"
    if not swiglu or not multiple >= 1:
        return None, ""
    width = math.ceil(int(8 * hidden / 3) / int(multiple)) * int(multiple)
    return width, f"8/3 x hidden size, rounded up to a multiple of {int(multiple)}"


def _compute_accumulated_batch(values: FlagValues) -> Computed:
    micro = values.get_field("batch.micro_batch_size")
    steps = values.get_number("--acc-steps")
    if not steps >= 1:
        return None, ""
    return micro * int(steps), "the batch size x --acc_steps, over all ranks"


def _compute_wsd_decay(values: FlagValues) -> Computed:
    iterations = values.get_field("batch.train_iters")
    fraction = values.get_number("--wsd-fract-decay", 0.1)
    if not fraction > 0:
        return None, ""
    return int(fraction * iterations), f"--wsd_fract_decay {fraction:g} x iterations, rounded down"


def _compute_wsd_floor(values: FlagValues) -> Computed:
    scale = values.get_number("--wsd-final-lr-scale", 0.0)
    if not scale >= 0:
        return None, ""
    peak = values.get_field("optimizer.lr")
    return scale * peak, f"the peak rate x --wsd_final_lr_scale {scale:g}"


def _compute_wsd_start(values: FlagValues) -> Computed:
    if not any(values.list_warmups()):
        return None, ""
    peak = values.get_field("optimizer.lr")
    return peak / 100, "a hundredth of the peak rate, as in llm-baselines"


def _compute_one_cycle_floor(values: FlagValues) -> Computed:
    peak = values.get_field("optimizer.lr")
    factor = values.get_number("--final-div-factor")
    decays = values.get_field("optimizer.lr_decay_style") != "constant"
    decays = decays and not values.has("--scheduler", "wsd")
    if not decays or not factor > 0:
        return None, ""
    floor = peak / 100 / factor
    if floor > peak:
        return None, ""
    return floor, f"the peak rate / 100 / --final_div_factor {factor:g}"


# fms-fsdp. Source: its main_training_llama.py. For x finished steps of N and a warm-up of
# w = min(2000, N // 20) steps, its rate is a part of the peak:
#
#     initial    min(1 - (1 - min(x, w) / w)^2, 0.1 + 0.5 (1 - 0.1) (1 + cos(pi min(x, N) / N)))
#     annealing  1 - x / N
def _compute_fms_floor(values: FlagValues) -> Computed:
    if values.get_field("optimizer.lr_decay_style") != "cosine":
        return None, ""
    return values.get_field("optimizer.lr") / 10, "a tenth of the peak rate, as in fms-fsdp"


def _compute_fms_warmup(values: FlagValues) -> Computed:
    return _find_fms_warmup(values), (
        "at most 2000 iterations and a twentieth of training, as in fms-fsdp"
    )


def _find_fms_warmup(values: FlagValues) -> int | None:
    """Return the iterations of fms-fsdp's warm-up, or None if the rate has another schedule."""
    steps = values.get_field("batch.train_iters")
    # Another warm-up that was given is one of this trainer's schedules.
    if values.list_warmups() or steps is None:
        return None
    if values.get_field("optimizer.lr_decay_style") != "cosine":
        return None
    return min(2000, int(steps) // 20)


def _compute_fms_fresh_start(values: FlagValues) -> Computed:
    """Return whether an annealing stage starts at iteration 0 with the weights of another run."""
    load, save = (values.get_field(f"checkpoint.{name}") for name in ("load", "save"))
    if os.path.realpath(load) == os.path.realpath(save):
        return None, ""
    return True, (
        "annealing starts at step 0, as in fms-fsdp, but without the optimizer's moments, which "
        "fms-fsdp loads; to resume it, give the folder of --ckpt_save_path as --ckpt_load_path too"
    )


def _compute_fms_strip_tokens(values: FlagValues) -> Computed:
    added = [values.get_field(f"data.{name}_token") for name in ("bos", "eos")]
    listed = ",".join(str(token) for token in added if token is not None)
    return (
        listed or None,
        "fms-fsdp removes the tokens that it adds from the ends of a document first",
    )


_GPT_OSS = "--enable-gpt-oss, as in the published model"
_LR = ("optimizer.lr",)
_LAYERS = ("model.num_layers",)
_HIDDEN = ("model.hidden_size",)
_DERIVATIONS = (
    Derivation("--use-mup", "model.parametrization", _set("mup", "--use-mup")),
    Derivation("--use-mup", "model.base_width", _compute_base_width),
    Derivation("--use-mup", "model.base_kv_channels", _compute_base_head),
    *(Derivation(flag, "model.glu_activation", _compute_clamped_gate) for flag in _CLAMPED),
    Derivation("--window-size", "model.sliding_window", _compute_window),
    Derivation(
        "--window-attn-skip-freq", "model.full_attention_layers", _compute_full_layers, "", _LAYERS
    ),
    *(
        Derivation("--enable-gpt-oss", f"model.{name}", _set(value, _GPT_OSS))
        for name, value in _ROPE.items()
    ),
    Derivation("fms-fsdp", "optimizer.min_lr", _compute_fms_floor, "", _LR),
    Derivation("fms-fsdp", "optimizer.lr_warmup_iters", _compute_fms_warmup),
    Derivation(
        "fms-fsdp",
        "optimizer.lr_warmup_style",
        _set("quadratic", "the warm-up of fms-fsdp", _find_fms_warmup),
    ),
    Derivation(
        "fms-fsdp",
        "optimizer.lr_decay_from_start",
        _set(True, "the cosine of fms-fsdp begins at step 0", _find_fms_warmup),
    ),
    Derivation(
        "--training-stage",
        "checkpoint.finetune",
        _compute_fms_fresh_start,
        "annealing",
        ("checkpoint.load", "checkpoint.save"),
    ),
    Derivation(
        "fms-fsdp", "data.strip_tokens", _compute_fms_strip_tokens, "", ("data.dataset_format",)
    ),
    *NEOX_DERIVATIONS,
    Derivation("--swiglu", "model.ffn_hidden_size", _compute_megatron_swiglu_width, "", _HIDDEN),
    Derivation("--multiple-of", "model.ffn_hidden_size", _compute_llama_width, "", _HIDDEN),
    Derivation(
        "--acc-steps",
        "batch.global_batch_size",
        _compute_accumulated_batch,
        needs=("batch.micro_batch_size",),
    ),
    Derivation("--final-div-factor", "optimizer.min_lr", _compute_one_cycle_floor, "", _LR),
    *(
        Derivation(flag, "logging.tracker", _compute_tracker, needs=("checkpoint.save",))
        for flag in ("--wandb", "--use-wandb", "--wandb-project")
    ),
    Derivation("--patch-tokenizer-type", "tokenizer.vocab_size", _compute_pai_vocabulary),
    Derivation("--profile", "logging.profile_iterations", _compute_profiled_iterations),
    Derivation("--profile", "logging.profile_ranks", _compute_profiled_ranks),
    *(
        Derivation("--scheduler", f"optimizer.{name}", compute, "wsd", needs)
        for name, compute, needs in (
            ("lr_decay_style", _set("WSD", "--scheduler wsd"), ()),
            ("min_lr", _compute_wsd_floor, _LR),
            ("lr_wsd_decay_iters", _compute_wsd_decay, ("batch.train_iters",)),
            ("lr_wsd_decay_style", _set("linear", "the default of --decay_type"), ()),
            ("lr_warmup_init", _compute_wsd_start, _LR),
        )
    ),
    *(
        Derivation("--opt", f"optimizer.{name}", _set(value, reason), "ademamix")
        for name, value, reason in (
            ("optimizer", "ademamix", "--opt ademamix"),
            ("ademamix_beta3", 0.9, "the default of --adema_beta3"),
            ("ademamix_alpha", 2.0, "the default of --adema_alpha"),
        )
    ),
    *(
        Derivation(flag, "parallel.pp_partition_method", _compute_partition_method)
        for flag in _ACCOUNT_FOR_ENDS
    ),
    Derivation(
        "--num-virtual-stages-per-pipeline-rank",
        "parallel.num_layers_per_virtual_pipeline_stage",
        _compute_virtual_stage_layers,
        needs=_LAYERS,
    ),
)
