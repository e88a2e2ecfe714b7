"""Compares configurations, and reads those that a checkpoint or another rank has written.

Invariants:
- Fields that differ between ranks by their nature (`_PER_RANK`) are left out.
- Every warning about an accepted flag or key that changes nothing contains `PHRASE`. Such warnings
  come from the compatibility table, from DeepSpeed's JSON and from the rules.
"""

import hashlib
import json
from collections.abc import Iterable

from megatron.base.errors import combine_errors
from megatron.config.fields import ValueWithOrigin, build_config, find_missing, flatten
from megatron.config.loss import LOSS_MEAN
from megatron.config.presets import read_chosen_preset
from megatron.config.tree import Config
from megatron.config.yaml_file import read_text


def load_yaml(text: str, *, fast: bool = False) -> Config:
    """Return the configuration that `dump_yaml` wrote.

    Args:
        text: The text.
        fast: See `read_text`.

    Raises:
        ConfigError: the text is not YAML, or has an unknown key, a wrong value or a missing field.
    """
    contents = read_text(text, "<yaml>", fast=fast)
    given, errors = read_chosen_preset(contents.preset)
    given |= contents.given
    # Versions without this field averaged the means of the microbatches.
    given.setdefault(
        LOSS_MEAN, ValueWithOrigin("microbatch", "the configuration of an older version")
    )
    # A text that cannot be parsed gives no values, so each required field would be reported as
    # missing too.
    errors = contents.errors or errors or find_missing(given)
    if errors:
        raise combine_errors(errors)
    return build_config({dotted: item.value for dotted, item in given.items()})


PHRASE = " has no effect"


def split_off_flags_without_effect(warnings: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return two lists: the warnings about flags and keys without effect are in the second one."""
    others: list[str] = []
    without_effect: list[str] = []
    for warning in warnings:
        if PHRASE in warning:
            without_effect.append(warning)
        else:
            others.append(warning)
    return others, without_effect


def format_warnings(warnings: Iterable[str]) -> list[str]:
    """Return the warnings as lines. Flags without effect are listed separately at the end."""
    others, without_effect = split_off_flags_without_effect(warnings)
    lines = [f"warning: {warning}" for warning in others]
    if without_effect:
        lines.append("flags without effect:")
        lines += [f"  {text}" for text in without_effect]
    return lines


_PER_RANK = {"parallel.local_rank"}


def compute_config_digest(config: Config) -> str:
    """Return the SHA-256 of all fields that must agree between ranks, as 64 hexadecimal digits."""
    values = {dotted: value for dotted, value in flatten(config).items() if dotted not in _PER_RANK}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def find_config_differences(a: Config, b: Config) -> list[tuple[str, str, str]]:
    """Return the dotted name, the value in `a` and the value in `b` of each field that differs.

    The values are JSON. The list is empty if the digests are equal.
    """
    left = flatten(a)
    right = flatten(b)
    # Compare as JSON, as the digest does. There nan equals itself, and 1 differs from 1.0.
    shown = [
        (dotted, json.dumps(left[dotted]), json.dumps(right[dotted]))
        for dotted in left
        if dotted not in _PER_RANK
    ]
    return [(dotted, x, y) for dotted, x, y in shown if x != y]


def list_config_differences(a: Config, b: Config) -> list[str]:
    """Return one line for each field that differs: its dotted name and both values.

    The value in `a` comes first. The list is empty if the digests are equal.
    """
    return [f"{dotted}: {x} and {y}" for dotted, x, y in find_config_differences(a, b)]
