"""Reads DeepSpeed's JSON into the same configuration as the flags.

If the flags and the JSON both set a value, the two must be equal. "auto" leaves a value to the
flags.

Invariant: no key is dropped silently. A key is handled in one of these ways:

- It is a field of the configuration under another name.
- It has a fixed set of accepted values.
- It has no effect, and a warning reports that.
- It is passed on to DeepSpeed unchanged (`select_passed_on`).
- It is an error.

The table is in `tables/deepspeed.toml`. Two blocks have rules of their own. The fp16 block
overrides the loss scale of the flags, as in Megatron-DeepSpeed. The legacy `curriculum_learning`
block, which DeepSpeed itself does not support any more, sets this trainer's own schedule.
"""

import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.outside_file import SETTINGS_BYTES, load_text, parse_json
from megatron.config.fields import ValueWithOrigin, all_fields, describe_value
from megatron.extras.interop.translators.compat import load_table

Convert = Callable[[Any], Any]
"""Converts a value, or raises ValueError with a text that begins with "must be"."""


def keep_value(value: Any) -> Any:
    """Return the value. `Field.convert` checks it later."""
    return value


def read_flag(value: Any) -> bool:
    """Return a boolean. Raise ValueError for any other value."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def read_number(value: Any) -> float:
    """Return a number as a float. Raise ValueError for any other value."""
    # bool is a subclass of int in Python, but true is not a number in JSON.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("must be finite") from None


def read_whole(value: Any) -> int:
    """Return a whole number. Raise ValueError for any other value.

    5e8 is one as well, because templates write sizes in this form.
    """
    # The last condition is true for numbers with a fraction.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError("must be a whole number")
    return int(value)


def read_count(value: Any) -> int:
    """Return a whole number of at least 0. Raise ValueError for any other value."""
    if read_whole(value) < 0:
        raise ValueError("must be at least 0")
    return read_whole(value)


def read_positive(value: Any) -> int:
    """Return a whole number of at least 1. Raise ValueError for any other value."""
    if read_whole(value) < 1:
        raise ValueError("must be at least 1")
    return read_whole(value)


def read_text(value: Any) -> str:
    """Return a text. Raise ValueError for any other value."""
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def read_list(read: Convert) -> Convert:
    """Return a reader for a list whose items another function reads."""

    def take(items: Any) -> list[Any]:
        if not isinstance(items, list):
            raise ValueError("must be a list")
        return [read(item) for item in items]

    return take


def _read_power_of_two(value: Any) -> float:
    """Return two to the power of the value."""
    power = read_whole(value)
    # math.ldexp raises OverflowError above 1023.
    if abs(power) > 1000:
        raise ValueError("must be between -1000 and 1000")
    return math.ldexp(1.0, power)


def _read_of_two(index: int) -> Convert:
    """Return a reader for one of two numbers, such as AdamW's betas."""

    def take(numbers: Any) -> float:
        if not isinstance(numbers, list) or len(numbers) != 2:
            raise ValueError("must be a list of two numbers")
        return read_number(numbers[index])

    return take


READERS: dict[str, Convert] = {
    "value": keep_value,
    "flag": read_flag,
    "number": read_number,
    "number_or_none": lambda value: read_number(value) or None,
    "first": _read_of_two(0),
    "second": _read_of_two(1),
    "whole": read_whole,
    "power_of_two": _read_power_of_two,
    "count": read_count,
    "positive": read_positive,
    "text": read_text,
    "texts": read_list(read_text),
    "text_or_none": lambda value: None if value is None else read_text(value),
    "is_cpu": lambda device: device == "cpu",
}
"""What a table calls them -> the readers of values."""


@dataclass(frozen=True)
class Key:
    """What becomes of a key: a row of `tables/deepspeed.toml`."""

    to: tuple[str, ...] = ()
    """Fields of the configuration that it gives."""
    read: tuple[str, ...] = ("value",)
    """Names of readers, one for each field. A key without a field has one reader."""
    overrides: bool = False
    """Whether its value has priority over the flags. Otherwise both must be equal."""
    passed: bool = False
    """Whether DeepSpeed gets it, as the reader returns it."""
    allowed: tuple[Any, ...] | None = None
    """All values that it may have. None: those that the reader accepts."""
    ignored: bool = False
    """Whether it changes no number here, so that a warning names it."""
    ignored_values: tuple[Any, ...] = ()
    """Allowed values that change no number here although this trainer works otherwise."""
    reason: str = ""
    """Why other values are not allowed, or why the key is ignored."""
    note: str = ""
    """Why `ignored_values` change nothing. Without it, `reason` says why."""

    def convert(self, value: Any) -> Any:
        """Return the value of a key without a field.

        Raises:
            ValueError: it is not possible.
        """
        return READERS[self.read[0]](value)


def _read_keys(table: Mapping[str, Any]) -> dict[str, Key]:
    """Return the rows of the table by their keys. `nullable` allows null, which TOML lacks."""
    found: dict[str, Key] = {}
    for item in table["keys"]:
        names = item.pop("key").split()
        if "because" in item:
            item["reason"] = table["reasons"][item.pop("because")]
        for words in ("to", "read"):
            if words in item:
                item[words] = tuple(item[words].split())
        null = (None,) if item.pop("nullable", False) else ()
        if "allowed" in item:
            item["allowed"] = (*item["allowed"], *null)
        row = Key(**{**item, "ignored_values": tuple(item.get("ignored_values", ()))})
        assert not found.keys() & set(names), f"{names} has two rows in deepspeed.toml"
        found |= dict.fromkeys(names, row)
    return found


_TABLE = load_table("deepspeed")
KEYS: dict[str, Key] = _read_keys(_TABLE)
UNSUPPORTED_BLOCKS: dict[str, str] = _TABLE["unsupported"]
"""Blocks that are accepted only if they request no feature, and what to do instead."""
ALTERNATIVES: dict[str, str] = _TABLE["instead"]
"""What to do instead, for some keys that are not accepted."""
# Every proper prefix of an accepted key that ends before a dot is the name of a block.
BLOCK_NAMES = {key[:index] for key in KEYS for index, letter in enumerate(key) if letter == "."}
ACCUMULATION_STEPS = "gradient_accumulation_steps"
"""Follows from the batch sizes and the number of ranks, so the plan compares it."""
PIPELINE_TIMERS = ("wall_clock_breakdown", "flops_profiler.enabled")
"""Keys that switch on DeepSpeed's timers. The timers fail or hang in DeepSpeed's pipeline, so the
keys are not passed on if there are several stages."""
# DeepSpeed itself accepts "auto" in these blocks.
_AUTO = ("zero_optimization.", "fp16.", "bf16.")


def _can_be_auto(key: str) -> bool:
    """Return whether "auto" is accepted for a key.

    For fields of the configuration it means the value of the flags. In some blocks DeepSpeed
    accepts the word, and it means DeepSpeed's default.
    """
    return bool(KEYS[key].to) or key == ACCUMULATION_STEPS or key.startswith(_AUTO)


def suggest_fix(key: str) -> str:
    """Return what to do about a key that is not accepted."""
    block, _, name = key.rpartition(".")
    siblings = [
        known.rpartition(".")[2]
        for known in KEYS.keys() | BLOCK_NAMES | UNSUPPORTED_BLOCKS.keys()
        if known.rpartition(".")[0] == block
    ]
    # Look for a similar name in the same block first, then for the same name in another block.
    close = difflib.get_close_matches(name.strip().lower(), sorted(siblings), n=2, cutoff=0.75)
    elsewhere = sorted(
        known for known in KEYS.keys() | BLOCK_NAMES if known.rpartition(".")[2] == name
    )[:2]
    if key in ALTERNATIVES:
        return ALTERNATIVES[key]
    if close or elsewhere:
        return f"perhaps you meant {' or '.join(close or elsewhere)}"
    if key.startswith("optimizer."):
        return "see --optimizer and related flags"
    return "leave it out"


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
        row = KEYS[key]
        for dotted, reader in zip(row.to, row.read, strict=False):
            try:
                item = _convert_value(dotted, READERS[reader](value), f"{path}: {key}")
            except ValueError as error:
                errors.append(f"{path}: {key} is {_format_value(value)}, and {error}.")
                continue
            # Two keys of the JSON may give one field, for example under an old and a new name. They
            # must agree as well.
            before = found.get(dotted) or given.get(dotted)
            if before is None or before.value == item.value:
                found[dotted] = item
                continue
            described = describe_value(dotted, before.value, before.origin)
            if row.overrides:
                found[dotted] = item
                warnings.append(
                    f"{described} is not used: {key} {json.dumps(value)} in {path} has priority."
                )
            else:
                errors.append(
                    f"{described} contradicts {path}, where {key} is "
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
        if KEYS[key].passed and value != "auto":
            *blocks, name = key.split(".")
            part = result
            for block in blocks:
                part = part.setdefault(block, {})
            # Convert the value, because DeepSpeed needs an integer where many files have 5e8.
            part[name] = KEYS[key].convert(value)
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
            elif key in KEYS and "." not in name:
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
        row = KEYS[key]
        if row.ignored:
            yield f"{key} has no effect here: {row.reason}"
        # 1 is not true here, although they are equal in Python.
        elif any(value is each for each in row.ignored_values):
            yield f"{key} {json.dumps(value)} has no effect here: {row.note or row.reason}"
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
        row = KEYS[key]
        if value == "auto" and not row.ignored:
            if not _can_be_auto(key):
                yield f'{key} is "auto", which no flag provides; give a value, or leave it out'
        elif not _is_accepted(key, value):
            yield (
                f"{key} is {_format_value(value)}; {row.reason}: use "
                f"{' or '.join(json.dumps(one) for one in row.allowed or ())}"
            )
        # The values of fields are converted in `merge_content`.
        elif not row.to:
            try:
                row.convert(value)
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
    allowed = KEYS[key].allowed
    if allowed is None or value == "auto":
        return True
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


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
