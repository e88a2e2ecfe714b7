"""Values that are computed from several flags of another system, and that system's defaults.

A row of the compatibility table handles a single flag. This module handles numbers that are
computed from two flags, and defaults that differ from those of this trainer.

Invariant: a warning reports each value that is set here. A value that was given is never replaced,
with one exception: Megatron's NullTokenizer adds an id to --vocab-size.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from megatron.config.fields import (
    PRESET_ORIGIN,
    all_fields,
    find_missing,
)
from megatron.config.logging import ALL_RANKS
from megatron.extras.interop.translators.compat import (
    NEOX,
    NEOX_DEFAULTS,
    OTHER_WARMUPS,
    Computed,
    Derivation,
    FlagValues,
    Given,
    Typed,
    find_row,
)
from megatron.extras.interop.translators.compat_core_derived import CORE_DERIVATIONS
from megatron.extras.interop.translators.compat_fms_derived import FMS_DEFAULTS, FMS_DERIVATIONS
from megatron.extras.interop.translators.compat_neox_derived import NEOX_DERIVATIONS

_IDENTIFY_LLM_BASELINES = (
    "--n-layer",
    "--n-embd",
    "--n-head",
    "--sequence-length",
    "--acc-steps",
    "--iterations",
    "--model",
)
_IDENTIFY_FMS = (
    "--model-variant",
    "--num-steps",
    "--learning-rate",
    "--use-dummy-dataset",
    "--ckpt-save-path",
    "--ckpt-load-path",
    "--low-cpu-fsdp",
    "--fsdp-activation-checkpointing",
    "--selective-checkpointing",
    "--report-interval",
    "--training-stage",
)
_LLM_BASELINES_DEFAULTS = (
    "--model llama --n-layer 24 --n-head 12 --n-embd 768 --sequence-length 512 --multiple-of 256 "
    "--rmsnorm-eps 1e-5 --init-std 0.02 --dropout 0.0 --vocab-size 50304 --batch-size 50 "
    "--acc-steps 1 --iterations 15000 --opt adamw --lr 1e-3 --beta1 0.9 --beta2 0.95 "
    "--weight-decay 0.1 --grad-clip 1.0 --scheduler cos --final-div-factor 1 --warmup-steps 3000 "
    "--dtype bfloat16 --seed 0 --eval-interval 200 --eval-batches 64 --log-interval 50"
)
"""The defaults of llm-baselines' newest argument parser."""
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
        return NEOX, _select_defaults(NEOX_DEFAULTS, typed, given)
    if typed.keys() & set(_IDENTIFY_LLM_BASELINES) and not _is_model_described_otherwise(
        given, ("--n-layer", "--n-embd", "--n-head")
    ):
        return "llm-baselines", _select_defaults(_LLM_BASELINES_DEFAULTS, typed, given)
    found = typed.keys() & set(_IDENTIFY_FMS)
    # With --model_variant alone, all other flags may be those of this trainer.
    if found == {"--model-variant"} and not find_missing(given):
        return None
    if found and not _is_model_described_otherwise(given, ("--model-variant",)):
        return "fms-fsdp", _select_defaults(FMS_DEFAULTS, typed, given)
    return None


def describe_dropped_defaults(typed: Typed, given: Given) -> str | None:
    """Return the warning that the defaults of another system are not used, or None.

    Its flags are given, but other flags describe the model (`find_defaults`).
    """
    systems = (("llm-baselines", _IDENTIFY_LLM_BASELINES), ("fms-fsdp", _IDENTIFY_FMS))
    for system, flags in systems:
        found = [flag for flag in flags if flag in typed]
        if found and found != ["--model-variant"]:
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
    for trigger, dotted, compute in _DERIVATIONS:
        if (trigger in typed or trigger == system) and dotted not in given:
            value, reason = compute(FlagValues(typed, given))
            if value is not None:
                shown = value
                if value is True:
                    shown = "on"
                elif isinstance(value, float):
                    shown = f"{value:g}"
                elif isinstance(value, tuple):
                    shown = " ".join(map(str, value))
                yield dotted, value, f"{all_fields()[dotted].flag} is {shown}: {reason}"


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


def _compute_megatron_swiglu_width(values: FlagValues) -> Computed:
    hidden = values.get_field("model.hidden_size")
    if hidden is None or hidden < 1:
        return None, ""
    width = int((4 * hidden * 2 / 3) / 64) * 64
    return max(width, 1), "8/3 x hidden size, rounded down to a multiple of 64, as in Megatron-LM"


def _compute_llama_width(values: FlagValues) -> Computed:
    hidden = values.get_field("model.hidden_size")
    multiple = values.get_number("--multiple-of")
    swiglu = values.get_field("model.glu_activation") == "swiglu"
    if hidden is None or not swiglu or not multiple >= 1:
        return None, ""
    width = math.ceil(int(8 * hidden / 3) / int(multiple)) * int(multiple)
    return width, f"8/3 x hidden size, rounded up to a multiple of {int(multiple)}"


def _compute_accumulated_batch(values: FlagValues) -> Computed:
    micro = values.get_field("batch.micro_batch_size")
    steps = values.get_number("--acc-steps")
    if micro is None or not steps >= 1:
        return None, ""
    return micro * int(steps), "the batch size x --acc_steps, over all ranks"


def _set_with(flag: str, word: str, value: Any, reason: str) -> Callable[[FlagValues], Computed]:
    """Return a function that sets a value if a flag of another system is given with a word."""

    def compute(values: FlagValues) -> Computed:
        if values.has(flag, word):
            return value, reason
        return None, ""

    return compute


def _compute_wsd_decay(values: FlagValues) -> Computed:
    iterations = values.get_field("batch.train_iters")
    if not values.has("--scheduler", "wsd") or iterations is None:
        return None, ""
    fraction = values.get_number("--wsd-fract-decay", 0.1)
    if not fraction > 0:
        return None, ""
    return int(fraction * iterations), f"--wsd_fract_decay {fraction:g} x iterations, rounded down"


def _compute_wsd_floor(values: FlagValues) -> Computed:
    peak = values.get_field("optimizer.lr")
    if not values.has("--scheduler", "wsd") or peak is None:
        return None, ""
    scale = values.get_number("--wsd-final-lr-scale", 0.0)
    if not scale >= 0:
        return None, ""
    return scale * peak, f"the peak rate x --wsd_final_lr_scale {scale:g}"


def _compute_wsd_start(values: FlagValues) -> Computed:
    peak = values.get_field("optimizer.lr")
    warmups = ("optimizer.lr_warmup_iters", *OTHER_WARMUPS)
    warm = any(values.get_field(dotted) for dotted in warmups)
    if not values.has("--scheduler", "wsd") or peak is None or not warm:
        return None, ""
    return peak / 100, "a hundredth of the peak rate, as in llm-baselines"


def _compute_one_cycle_floor(values: FlagValues) -> Computed:
    peak = values.get_field("optimizer.lr")
    factor = values.get_number("--final-div-factor")
    decays = values.get_field("optimizer.lr_decay_style") != "constant"
    decays = decays and not values.has("--scheduler", "wsd")
    if peak is None or not decays or not factor > 0:
        return None, ""
    floor = peak / 100 / factor
    if floor > peak:
        return None, ""
    return floor, f"the peak rate / 100 / --final_div_factor {factor:g}"


def _compute_virtual_stage_layers(values: FlagValues) -> Computed:
    layers = values.get_field("model.num_layers")
    ranks = values.get_field("parallel.pipeline_model_parallel_size") or 1
    stages = values.get_number("--num-virtual-stages-per-pipeline-rank")
    if layers is None or not stages > 1:
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
    names_only = any(values.get_words(flag) for flag in _IDENTIFY_LLM_BASELINES)
    if not names_only:
        switches.append("--wandb-project")
    if values.get_field("checkpoint.save") is None:
        return None, ""
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


def _set(value: Any, reason: str) -> Callable[[FlagValues], Computed]:
    """Return a function that always gives a value."""
    return lambda values: (value, reason)


_DERIVATIONS: tuple[Derivation, ...] = (
    ("--use-mup", "model.parametrization", _set("mup", "--use-mup")),
    ("--use-mup", "model.base_width", _compute_base_width),
    ("--use-mup", "model.base_kv_channels", _compute_base_head),
    *CORE_DERIVATIONS,
    *FMS_DERIVATIONS,
    *NEOX_DERIVATIONS,
    ("--swiglu", "model.ffn_hidden_size", _compute_megatron_swiglu_width),
    ("--multiple-of", "model.ffn_hidden_size", _compute_llama_width),
    ("--acc-steps", "batch.global_batch_size", _compute_accumulated_batch),
    ("--final-div-factor", "optimizer.min_lr", _compute_one_cycle_floor),
    *(
        (flag, "logging.tracker", _compute_tracker)
        for flag in ("--wandb", "--use-wandb", "--wandb-project")
    ),
    ("--patch-tokenizer-type", "tokenizer.vocab_size", _compute_pai_vocabulary),
    ("--profile", "logging.profile_iterations", _compute_profiled_iterations),
    ("--profile", "logging.profile_ranks", _compute_profiled_ranks),
    (
        "--scheduler",
        "optimizer.lr_decay_style",
        _set_with("--scheduler", "wsd", "WSD", "--scheduler wsd"),
    ),
    ("--scheduler", "optimizer.min_lr", _compute_wsd_floor),
    ("--scheduler", "optimizer.lr_wsd_decay_iters", _compute_wsd_decay),
    (
        "--scheduler",
        "optimizer.lr_wsd_decay_style",
        _set_with("--scheduler", "wsd", "linear", "the default of --decay_type"),
    ),
    ("--scheduler", "optimizer.lr_warmup_init", _compute_wsd_start),
    (
        "--opt",
        "optimizer.optimizer",
        _set_with("--opt", "ademamix", "ademamix", "--opt ademamix"),
    ),
    (
        "--opt",
        "optimizer.ademamix_beta3",
        _set_with("--opt", "ademamix", 0.9, "the default of --adema_beta3"),
    ),
    (
        "--opt",
        "optimizer.ademamix_alpha",
        _set_with("--opt", "ademamix", 2.0, "the default of --adema_alpha"),
    ),
    *(
        (flag, "parallel.pp_partition_method", _compute_partition_method)
        for flag in _ACCOUNT_FOR_ENDS
    ),
    (
        "--num-virtual-stages-per-pipeline-rank",
        "parallel.num_layers_per_virtual_pipeline_stage",
        _compute_virtual_stage_layers,
    ),
)
