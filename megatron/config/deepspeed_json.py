"""DeepSpeed's JSON, read into the same configuration as the flags: what both give must agree, "auto" is left to the flags.

Invariant: no key is dropped in silence. A key is a field of the configuration under another name, or is refused, or has no effect
and a warning says so, or goes on to DeepSpeed as it is (`passed_on`). Two blocks have their own rule: of the loss scale the fp16
block decides, as in Megatron-DeepSpeed; and the legacy `curriculum_learning` block, which DeepSpeed itself has dropped, describes
our own schedule.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.fields import Given, all_fields
from megatron.errors import ConfigError

Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


_FIELDS: dict[str, tuple[tuple[str, Convert], ...]] = {
    "train_micro_batch_size_per_gpu": (("batch.micro_batch_size", _same),),
    "train_batch_size": (("batch.global_batch_size", _same),),
    "gradient_clipping": (("optimizer.clip_grad", _same),),
    "zero_optimization.stage": (("parallel.zero_stage", _same),),
    "zero_optimization.offload_optimizer.device": (("optimizer.cpu_optimizer", {"cpu": True, "none": False}.__getitem__),),
    "fp16.enabled": (("precision.fp16", _same),),
    "bf16.enabled": (("precision.bf16", _same),),
    "optimizer.params.lr": (("optimizer.lr", _same),),
    "optimizer.params.betas": (
        ("optimizer.adam_beta1", lambda betas: betas[0]),
        ("optimizer.adam_beta2", lambda betas: betas[1]),
    ),
    "optimizer.params.eps": (("optimizer.adam_eps", _same),),
    "optimizer.params.weight_decay": (("optimizer.weight_decay", _same),),
    "activation_checkpointing.partition_activations": (("recompute.partition_activations", _same),),
    "activation_checkpointing.cpu_checkpointing": (("recompute.checkpoint_in_cpu", _same),),
    "curriculum_learning.min_difficulty": (("curriculum.curriculum_min_difficulty", _same),),
    "curriculum_learning.max_difficulty": (("curriculum.curriculum_max_difficulty", _same),),
    "curriculum_learning.schedule_type": (("curriculum.curriculum_schedule_type", _same),),
    "curriculum_learning.schedule_config.total_curriculum_step": (("curriculum.curriculum_total_step", _same),),
    "curriculum_learning.schedule_config.difficulty_step": (("curriculum.curriculum_difficulty_step", _same),),
    "curriculum_learning.schedule_config.root_degree": (("curriculum.curriculum_root_degree", _same),),
    "curriculum_learning.schedule_config.difficulty": (("curriculum.curriculum_difficulties", _same),),
    "curriculum_learning.schedule_config.max_step": (("curriculum.curriculum_max_steps", _same),),
}
_LOSS_SCALE: dict[str, tuple[tuple[str, Convert], ...]] = {
    "fp16.loss_scale": (("precision.loss_scale", lambda value: float(value) or None),),
    "fp16.initial_scale_power": (("precision.initial_loss_scale", lambda value: 2.0**value),),
    "fp16.loss_scale_window": (("precision.loss_scale_window", int),),
    "fp16.hysteresis": (("precision.hysteresis", int),),
    "fp16.min_loss_scale": (("precision.min_loss_scale", float),),
}
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.type": (("Adam", "AdamW"), "there is AdamW only"),
    "optimizer.params.adam_w_mode": ((True,), "weight decay is decoupled, as AdamW's"),
    "optimizer.params.bias_correction": ((True,), "AdamW corrects"),
    "optimizer.params.torch_adam": ((True,), "it is torch's AdamW"),
    "fp16.consecutive_hysteresis": ((False,), "--hysteresis counts all overflows"),
    "data_types.grad_accum_dtype": (("fp32", None), "gradients are accumulated in fp32"),
    "curriculum_learning.curriculum_type": (("seqlen",), "the length of the sequences is what changes"),
    "zero_optimization.offload_optimizer.device": (("cpu", "none"), "checkpoints are read from memory"),
    "zero_optimization.offload_param.device": (
        ("none",),
        "weights stay on the device; --cpu-optimizer moves master weights and moments",
    ),
    "amp.enabled": ((False,), "say --fp16 or --bf16"),
    "elasticity.enabled": ((False,), "--global-batch-size and --rampup-batch-size say the batch sizes"),
    "data_efficiency.enabled": ((False,), "the order of the data is this trainer's, and part of its checkpoints"),
}
"""Where DeepSpeed could do what this trainer does not: the values that are taken, and why."""
_WITHOUT_EFFECT = {
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.number_checkpoints",
    "activation_checkpointing.synchronize_checkpoint_boundary",
    "activation_checkpointing.profile",
}
_OURS = ("curriculum_learning", "optimizer", "activation_checkpointing", "data_types", "scheduler")
"""Blocks of which DeepSpeed sees nothing."""
_STEPS = "gradient_accumulation_steps"
"""Follows from the batch sizes and the number of ranks: the plan's to compare."""


def read_json(path: str) -> dict[str, Any]:
    """
    Raises:
        ConfigError: it is missing, no JSON (naming the line), or no object.
    """
    try:
        content = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1].strip() if error.doc else ""
        raise ConfigError(
            f"--deepspeed-config {path}:{error.lineno} is not JSON: {error.msg}, at {line!r}; JSON has no comments, no trailing "
            "commas and no underscores in numbers."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--deepspeed-config {path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--deepspeed-config {path} must hold an object, as in {{...}}, not {type(content).__name__}.")
    return content


def merge(path: str, given: Mapping[str, Given]) -> tuple[dict[str, Given], list[str], list[str]]:
    """(fields that the JSON gives, errors, warnings); `given`: what flags and YAML say."""
    try:
        flat = _in_force(_flatten(read_json(path)))
    except ConfigError as error:
        return {}, [str(error)], []
    found: dict[str, Given] = {}
    errors, warnings = list(_refusals(flat, path)), [f"{path}: {key} has no effect here." for key in flat if key in _WITHOUT_EFFECT]
    for key, value in flat.items():
        if value == "auto" or (key in _ONLY and value not in _ONLY[key][0]):
            continue
        for dotted, convert in _FIELDS.get(key, ()) + _LOSS_SCALE.get(key, ()):
            try:
                item = _given(dotted, convert(value), f"{path}: {key}")
            except (TypeError, ValueError, OverflowError, LookupError):
                errors.append(f"{path}: {key} is {json.dumps(value)}, and must be as for {all_fields()[dotted].flag}.")
                continue
            before = given.get(dotted)
            if before is None or before.value == item.value:
                found[dotted] = item
            elif key in _LOSS_SCALE:
                found[dotted] = item
                warnings.append(f"{_shown(dotted, before)} is not used: {path} says {key} {json.dumps(value)}, which decides.")
            else:
                errors.append(
                    f"{_shown(dotted, before)} contradicts {path}, where {key} is {json.dumps(value)}; change one of them, or say "
                    '"auto" there.'
                )
    fp16 = found.get("precision.fp16") or given.get("precision.fp16")
    if fp16 is not None and fp16.value and flat.get("data_types.grad_accum_dtype") == "fp32":
        errors.append(
            f'{path}: data_types.grad_accum_dtype is "fp32", but in fp16 DeepSpeed adds microbatches up in fp16; leave it out, '
            "or choose --bf16, or run without --deepspeed: there the sums are in fp32."
        )
    return found, errors, warnings


def passed_on(content: Mapping[str, Any]) -> dict[str, Any]:
    """What is DeepSpeed's own business: all keys but those that this trainer answers itself."""

    def rest(part: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in part.items():
            dotted = prefix + key
            if dotted in _FIELDS or dotted in _LOSS_SCALE or dotted == _STEPS or dotted in _OURS:
                continue
            if isinstance(value, Mapping):
                if inner := rest(value, f"{dotted}."):
                    result[key] = inner
            else:
                result[key] = value
        return result

    return rest(content, "")


def accumulation_steps(content: Mapping[str, Any]) -> int | None:
    """What the JSON says of them; None: nothing, or "auto"."""
    steps = content.get(_STEPS, "auto")
    return None if steps == "auto" else int(steps)


def _in_force(flat: dict[str, Any]) -> dict[str, Any]:
    """Without blocks that are switched off; an fp16 block that names no loss scale means a dynamic one."""
    for block in ("curriculum_learning", "fp16"):
        if not flat.get(f"{block}.enabled", False):
            flat = {key: value for key, value in flat.items() if key == f"{block}.enabled" or not key.startswith(f"{block}.")}
    if flat.get("fp16.enabled"):
        flat.setdefault("fp16.loss_scale", 0)
    return flat


def _refusals(flat: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in flat.items():
        block = key.partition(".")[0]
        if key in _ONLY:
            allowed, reason = _ONLY[key]
            if value not in allowed and value != "auto":
                yield f"{path}: {key} is {json.dumps(value)}; {reason}: say {' or '.join(json.dumps(one) for one in allowed)}."
        elif block == "optimizer" and key not in _FIELDS:
            yield f"{path}: {key} is not taken; see --optimizer and the flags beside it."
        elif key == _STEPS and value != "auto" and (not isinstance(value, int) or isinstance(value, bool)):
            yield f"{path}: {key} is {json.dumps(value)}, and must be an integer."
    if flat.get("curriculum_learning.enabled") and "curriculum_learning.schedule_type" not in flat:
        yield f"{path}: curriculum_learning is enabled and has no schedule_type; say fixed_linear, fixed_root or fixed_discrete."
    if any(key.partition(".")[0] == "scheduler" for key in flat):
        yield f"{path}: scheduler is not taken; the learning rate follows --lr-decay-style and the flags beside it."


def _given(dotted: str, value: Any, origin: str) -> Given:
    """Read as a flag's text is. Raises ValueError."""
    field = all_fields()[dotted]
    if value is None and field.optional:
        return Given(None, origin)
    items = value if isinstance(value, list) else [value]
    return Given(field.convert([str(item).lower() if isinstance(item, bool) else str(item) for item in items]), origin)


def _shown(dotted: str, item: Given) -> str:
    field = all_fields()[dotted]
    note = "" if item.origin.startswith("-") else f" ({item.origin})"
    if isinstance(item.value, bool):
        return (field.flag if item.value else field.negative_flag) + note
    return f"{field.flag} {' '.join(map(str, item.value)) if isinstance(item.value, tuple) else item.value}{note}"


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
