"""Reads DeepSpeed's JSON into the same configuration as the flags.

If the flags and the JSON both set a value, the two must be equal. "auto" leaves a value to the
flags.

Invariant: no key is dropped silently. A key is handled in one of these ways:

- It is a field of the configuration under another name.
- It has a fixed set of accepted values.
- It has no effect, and a warning reports that.
- It is passed on to DeepSpeed unchanged (`select_passed_on`).
- It is an error.

The tables are in `deepspeed_keys.py`. Two blocks have rules of their own. The fp16 block overrides
the loss scale of the flags, as in Megatron-DeepSpeed. The legacy `curriculum_learning` block, which
DeepSpeed itself does not support any more, sets this trainer's own schedule.
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.outside_file import SETTINGS_BYTES, load_text, parse_json
from megatron.config.fields import ValueWithOrigin, all_fields, describe_value
from megatron.extras.interop.translators.deepspeed_keys import (
    ACCEPTED_KEYS,
    ACCUMULATION_STEPS,
    ALLOWED_VALUES,
    BLOCK_NAMES,
    CHECKED,
    FIELDS,
    LOSS_SCALE,
    PASSED_TO_DEEPSPEED,
    PIPELINE_TIMERS,
    UNSUPPORTED_BLOCKS,
    VALUES_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    can_be_auto,
    suggest_fix,
)


def read_json(path: str) -> dict[str, Any]:
    """Read DeepSpeed's JSON from a file.

    Raises:
        ConfigError: the file is missing, is not JSON (the message has the line), or is not an
            object. Or an object has a key twice, or a number is not finite.
    """
    named = f"--deepspeed-config {path}"
    if Path(path).is_dir():
        raise ConfigError(f"{named} is not a file but a folder; name the JSON in it.")
    try:
        # Editors on Windows write a byte-order mark first.
        text = load_text(path, SETTINGS_BYTES).removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error}.") from error
    content = _parse_json(text, named)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{named} must hold an object, as in {{...}}, not {type(content).__name__}."
        )
    return content


def _parse_json(text: str, named: str) -> Any:
    """Return the value of a JSON text. `named` is how messages name the file.

    Raises:
        ConfigError: the text is not JSON, has a key twice in an object, or a number that is not
            finite or has too many digits.
    """
    parse_number = functools.partial(_parse_finite, named)
    try:
        return parse_json(
            text,
            object_pairs_hook=functools.partial(_refuse_doubled_keys, named),
            parse_float=parse_number,
            parse_constant=parse_number,
        )
    except json.JSONDecodeError as error:
        # The line itself is not shown. A script may name any file, whose content is not for a log.
        raise ConfigError(
            f"{named}:{error.lineno} is not JSON: {error.msg}, at column {error.colno}; JSON has "
            "no comments, no trailing commas and no underscores in numbers, and every bracket is "
            "closed."
        ) from error
    # Python refuses to convert an integer of more than 4300 digits.
    except ValueError as error:
        raise ConfigError(f"{named} has too many digits or levels: {error}.") from error


def _refuse_doubled_keys(named: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict.

    json.loads by itself keeps the last of two equal keys without a message.

    Raises:
        ConfigError: the object has a key twice.
    """
    keys = [key for key, _ in pairs]
    doubled = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if doubled:
        raise ConfigError(
            f"{named} has {_format_key(doubled[0])} twice in one object; remove one of them."
        )
    return dict(pairs)


def _parse_finite(named: str, text: str) -> float:
    """Return a number of the JSON.

    Python's json accepts NaN, Infinity and 1e999. None of them is a valid setting.

    Raises:
        ConfigError: the number is not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ConfigError(
            f"{named} has the number {text}, which is not finite; use another, or leave the key "
            "out."
        )
    return value


def merge_json(
    path: str, given: Mapping[str, ValueWithOrigin]
) -> tuple[dict[str, ValueWithOrigin], list[str], list[str]]:
    """Return the fields that the JSON gives, the errors and the warnings.

    Args:
        path: The JSON file.
        given: What flags and YAML gave.
    """
    try:
        content = read_json(path)
    except ConfigError as error:
        return {}, [str(error)], []
    return merge_content(content, path, given)


def merge_content(
    content: Mapping[str, Any], path: str, given: Mapping[str, ValueWithOrigin]
) -> tuple[dict[str, ValueWithOrigin], list[str], list[str]]:
    """Return the same as `merge_json`, for the content of a file.

    Args:
        content: The content.
        path: The file, for origins and messages.
        given: What flags and YAML gave.
    """
    flat, problems = _flatten(content)
    flat = _drop_disabled_blocks(flat, given)
    found: dict[str, ValueWithOrigin] = {}
    errors = [f"{path}: {problem}." for problem in (*problems, *_find_refusals(flat, given))]
    warnings = [f"{path}: {text}." for text in _find_keys_without_effect(flat, given)]
    for key, value in flat.items():
        # "auto" gives no value, and `_find_refusals` has reported a value that is not accepted.
        if value == "auto" or not _is_accepted(key, value):
            continue
        for dotted, convert in FIELDS.get(key, ()) + LOSS_SCALE.get(key, ()):
            try:
                item = _convert_value(dotted, convert(value), f"{path}: {key}")
            except ValueError as error:
                errors.append(f"{path}: {key} is {_format_value(value)}, and {error}.")
                continue
            # Two keys of the JSON may give one field, for example under an old and a new name. They
            # must agree as well.
            before = found.get(dotted) or given.get(dotted)
            if before is None or before.value == item.value:
                found[dotted] = item
            # Megatron-DeepSpeed takes the loss scale from the JSON, whatever the flags give.
            elif key in LOSS_SCALE:
                found[dotted] = item
                warnings.append(
                    f"{_describe(dotted, before)} is not used: {key} {json.dumps(value)} in "
                    f"{path} has priority."
                )
            else:
                errors.append(
                    f"{_describe(dotted, before)} contradicts {path}, where {key} is "
                    f'{_format_value(value)}; change one of them, or write "auto" there.'
                )
    return found, list(dict.fromkeys(errors)), warnings


def select_passed_on(content: Mapping[str, Any], pipeline_size: int) -> dict[str, Any]:
    """Return the part of the JSON that only DeepSpeed reads, for a JSON without errors.

    `merge_json` must have found no error in it.

    Args:
        content: The JSON.
        pipeline_size: Number of pipeline stages. With several of them DeepSpeed's timers are left
            out.
    """
    result: dict[str, Any] = {}
    for key, value in _flatten(content)[0].items():
        if pipeline_size > 1 and key in PIPELINE_TIMERS and value is True:
            continue
        if key in PASSED_TO_DEEPSPEED and value != "auto":
            *blocks, name = key.split(".")
            part = result
            for block in blocks:
                part = part.setdefault(block, {})
            # Convert the value, because DeepSpeed needs an integer where many files have 5e8.
            part[name] = PASSED_TO_DEEPSPEED[key](value)
    return result


def read_accumulation_steps(content: Mapping[str, Any]) -> int | None:
    """Return the accumulation steps that the JSON gives, or None if it has none or "auto".

    `merge_json` must have found no error in it.
    """
    steps = content.get(ACCUMULATION_STEPS, "auto")
    if steps == "auto":
        return None
    return int(steps)


def _flatten(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by dotted key, and the problems with keys.

    Blocks that switch themselves off are left out.
    """
    flat: dict[str, Any] = {}
    problems: list[str] = []

    def walk(part: Mapping[str, Any], prefix: str) -> None:
        for name, value in part.items():
            key = prefix + name
            if key in UNSUPPORTED_BLOCKS:
                if not _is_switched_off(value):
                    problems.append(f"{key} is not accepted; {UNSUPPORTED_BLOCKS[key]}")
            # A dot in a name would make "a.b" at the top look like b in the block a.
            elif key in BLOCK_NAMES and "." not in name:
                if isinstance(value, Mapping):
                    walk(value, f"{key}.")
                else:
                    problems.append(
                        f"{key} is {_format_value(value)}, and must be an object, as in {{...}}"
                    )
            elif key in ACCEPTED_KEYS and "." not in name:
                flat[key] = value
            else:
                problems.append(f"{_format_key(key)} is not accepted; {suggest_fix(key)}")

    walk(_rename_bfloat16(content, problems), "")
    return flat, problems


def _is_switched_off(block: Any) -> bool:
    """Return whether a block requests no feature.

    Such a block is empty, has "enabled": false, or contains only blocks that are switched off.
    """
    if not isinstance(block, Mapping):
        return False
    if "enabled" in block:
        return block["enabled"] is False
    return all(_is_switched_off(part) for part in block.values())


def _find_keys_without_effect(
    flat: Mapping[str, Any], given: Mapping[str, ValueWithOrigin]
) -> Iterator[str]:
    """Yield a text for each key that is accepted and changes nothing here, with the reason."""
    stages = given.get("parallel.pipeline_model_parallel_size")
    for key, value in flat.items():
        if key in WITHOUT_EFFECT:
            yield f"{key} has no effect here: {WITHOUT_EFFECT[key]}"
        elif key in VALUES_WITHOUT_EFFECT and value is VALUES_WITHOUT_EFFECT[key][0]:
            yield (f"{key} {json.dumps(value)} has no effect here: {VALUES_WITHOUT_EFFECT[key][1]}")
        elif key in PIPELINE_TIMERS and value is True and stages is not None and stages.value > 1:
            yield (
                f"{key} true has no effect here: DeepSpeed's timers fail in its pipeline, so it is "
                "not passed on; --log-timers-to-tensorboard logs the times"
            )


def _rename_bfloat16(content: Mapping[str, Any], problems: list[str]) -> Mapping[str, Any]:
    """Return the JSON with the block bfloat16 renamed to bf16. DeepSpeed reads both names."""
    if "bfloat16" not in content:
        return content
    if "bf16" in content:
        problems.append("bfloat16 and bf16 are the same block; remove one of them")
    return {
        "bf16" if name == "bfloat16" else name: value
        for name, value in content.items()
        if name != "bf16"
    }


def _drop_disabled_blocks(
    flat: dict[str, Any], given: Mapping[str, ValueWithOrigin]
) -> dict[str, Any]:
    """Return the values without those of blocks that are switched off.

    An fp16 block that is switched on and has no loss scale gets a dynamic loss scale.
    """
    fp16 = flat.get("fp16.enabled", False)
    # "auto" leaves the decision to --fp16, so the block counts as switched on only with that flag.
    if fp16 == "auto":
        fp16 = "precision.fp16" in given and given["precision.fp16"].value
    for block, on in (
        ("curriculum_learning", flat.get("curriculum_learning.enabled", False)),
        ("fp16", fp16),
    ):
        if not on:
            flat = {
                key: value
                for key, value in flat.items()
                if key == f"{block}.enabled" or not key.startswith(f"{block}.")
            }
    if fp16:
        # DeepSpeed's default is 0, which means a dynamic scale. It overrides --loss-scale like a
        # value that is written out.
        flat.setdefault("fp16.loss_scale", 0)
    return flat


def _find_refusals(flat: Mapping[str, Any], given: Mapping[str, ValueWithOrigin]) -> Iterator[str]:
    """Yield a message for each value that is not accepted."""
    for key, value in flat.items():
        if value == "auto" and key not in WITHOUT_EFFECT:
            if not can_be_auto(key):
                yield f'{key} is "auto", which no flag provides; give a value, or leave it out'
        elif not _is_accepted(key, value):
            allowed, reason = ALLOWED_VALUES[key]
            yield (
                f"{key} is {_format_value(value)}; {reason}: use "
                f"{' or '.join(json.dumps(one) for one in allowed)}"
            )
        elif key in PASSED_TO_DEEPSPEED or key in CHECKED:
            try:
                (PASSED_TO_DEEPSPEED | CHECKED)[key](value)
            except ValueError as error:
                yield f"{key} is {_format_value(value)}, and {error}"
    # Without a type the curriculum would stay off, although the block switches it on.
    if (
        flat.get("curriculum_learning.enabled") is True
        and "curriculum_learning.schedule_type" not in flat
    ):
        yield (
            "curriculum_learning is enabled and has no schedule_type; use fixed_linear, "
            "fixed_root or fixed_discrete"
        )
    yield from _find_refusals_with_flags(flat, given)


def _find_refusals_with_flags(
    flat: Mapping[str, Any], given: Mapping[str, ValueWithOrigin]
) -> Iterator[str]:
    """Yield a message for each value that does not fit the flags."""
    # DeepSpeed sends activations and gradients between stages either sharded over tensor ranks or
    # not. Both must use the same form.
    partitioned = [flat.get(f"pipeline.{what}_partitioned") for what in ("pipe", "grad")]
    sequence = given.get("parallel.sequence_parallel")
    # Each tensor rank has its own part of the sequence then, so there is nothing left to shard.
    if sequence is not None and sequence.value:
        if True in partitioned:
            yield (
                "pipeline.pipe_partitioned and grad_partitioned must be false with "
                "--sequence-parallel; set them to false, or leave them out"
            )
    elif partitioned.count(False) == 1:
        yield (
            "pipeline.pipe_partitioned and grad_partitioned must be equal, and are true if they "
            "are left out"
        )


def _is_accepted(key: str, value: Any) -> bool:
    """Return whether a value is among those that the key may have.

    1 is not accepted for true, although they are equal in Python.
    """
    if key not in ALLOWED_VALUES or value == "auto":
        return True
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in ALLOWED_VALUES[key][0]
    )


def _convert_value(dotted: str, value: Any, origin: str) -> ValueWithOrigin:
    """Return a JSON value, read by the rules for a flag's text.

    Raises:
        ValueError: the value does not fit the field.
    """
    field = all_fields()[dotted]
    if value is None and field.optional:
        return ValueWithOrigin(None, origin)
    if isinstance(value, list) != (field.arity == "*"):
        raise ValueError(f"must be {field.expected}")
    if isinstance(value, list):
        items = value
    else:
        items = [value]
    # Field.convert reads text, as on the command line. Python's str(True) would be "True".
    return ValueWithOrigin(
        field.convert(
            [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        ),
        origin,
    )


def _describe(dotted: str, item: ValueWithOrigin) -> str:
    return describe_value(dotted, item.value, item.origin)


def _format_value(value: Any) -> str:
    """Return a value as JSON of at most 80 characters."""
    shown = json.dumps(value)
    if len(shown) <= 80:
        return shown
    return f"{shown[:77]}..."


def _format_key(key: str) -> str:
    """Return a key, in quotes if spaces or unusual letters could be overlooked."""
    if re.fullmatch(r"[\w.-]+", key, re.ASCII):
        return key
    return json.dumps(key)
