"""Reads flags of other trainers as their rows in the compatibility table prescribe."""

import math
from collections.abc import Sequence

from megatron.config.fields import ValueWithOrigin
from megatron.config.normalise import CommandLine, is_flag, list_known_flags, set_field
from megatron.config.presets import read_preset
from megatron.extras.interop.translators.compat import Row


def read_row(line: CommandLine, typed: str, flag: str, row: Row, values: list[str]) -> None:
    """Read a flag of another system as its row in the compatibility table prescribes."""
    shown = " ".join([typed, *values])
    line.foreign = line.foreign or shown
    off = False
    # A row for single values states what each of them means.
    if row.arity == 0 and values and not row.only:
        # The flag takes no value, but =True or =False may be attached to it.
        if values[0].lower() not in ("true", "false"):
            line.errors.append(f"{shown} must be true, or left out.")
            return
        off = values[0].lower() == "false"
    # A flag that is off needs no other one.
    if row.needs and not off:
        line.conditions.append((shown, row.needs, row.reason))
    if not off:
        line.typed[flag] = tuple(values)
    if row.kind == "harmless":
        line.warnings.append(f"{shown} has no effect here: {row.reason}.")
    elif row.kind == "refused":
        _refuse_unless_off(line, shown, row, off)
    elif row.kind == "derived" and off:
        line.warnings.append(f"{shown} has no effect here: the flag is off.")
    elif row.kind == "derived":
        _read_derived(line, shown, row, values)
    elif off:
        _turn_off_renamed(line, typed, row, values[0])
    else:
        _read_renamed(line, typed, row, values)


def _refuse_unless_off(line: CommandLine, shown: str, row: Row, off: bool) -> None:
    """Record an error for a refused flag, or a warning if the flag is off."""
    if off:
        line.warnings.append(f"{shown} has no effect here: the flag is off.")
    else:
        shown_for_reason = line.refused.setdefault(row.reason, [])
        if shown not in shown_for_reason:
            shown_for_reason.append(shown)


def _read_derived(line: CommandLine, shown: str, row: Row, values: list[str]) -> None:
    """Check a flag from which `compat_derived` computes a value."""
    try:
        valid = (
            bool(row.only)
            or row.arity in ("*", 0)
            or (len(values) == 1 and 0 < float(values[0]) < math.inf)
        )
    except ValueError:
        valid = False
    if valid:
        line.warnings.append(f"{shown} is read together with other flags: {row.reason}.")
    else:
        line.errors.append(f"{shown} must be a number above 0.")


def _turn_off_renamed(line: CommandLine, typed: str, row: Row, word: str) -> None:
    """Read a renamed flag with `=False` attached, which is `word`.

    If the flag stands for booleans only, each of them gets the word. Fields of other types have no
    opposite value, so `=False` is then an error.
    """
    flags = [flag for flag, *_ in _split_at_flags(row.to)]
    if all(list_known_flags()[flag].is_bool for flag in flags):
        _set_renamed(line, typed, row, f"{typed} {word}", [[flag, word] for flag in flags])
    else:
        line.errors.append(f"{typed} {word} must be true, or left out.")


def _read_renamed(line: CommandLine, typed: str, row: Row, values: list[str]) -> None:
    """Read a flag that has another name here."""
    flags = _split_at_flags(row.to)
    # If the row is for certain values only, `row.to` already contains what replaces them. A flag
    # that takes no value may have =True attached, which means the same as the flag alone.
    if row.arity != 0 and not row.only:
        flags[-1] += values
    _set_renamed(line, typed, row, " ".join([typed, *values]), flags)


def _set_renamed(
    line: CommandLine, typed: str, row: Row, shown: str, flags: list[list[str]]
) -> None:
    """Set the fields of a renamed flag, and warn about its new name."""
    if row.reason and not row.needs:
        note = f": {row.reason}"
    else:
        note = ""
    line.warnings.append(
        f"{shown} is read as {' '.join(word for words in flags for word in words)}{note}."
    )
    for flag, *its_values in flags:
        if flag == "--preset":
            _set_variant(line, typed, *its_values)
        else:
            set_field(line, list_known_flags()[flag], typed, flag, its_values)


def _set_variant(line: CommandLine, typed: str, preset: str) -> None:
    """Set the fields of the preset that another system's name of a model stands for.

    There, such a name leaves the sequence length to another flag.
    """
    for dotted, item in read_preset(preset).values.items():
        if dotted != "model.seq_length":
            line.given[dotted] = ValueWithOrigin(item.value, typed)


def _split_at_flags(words: Sequence[str]) -> list[list[str]]:
    """Return `--a 1 --b` as [[--a, 1], [--b]]."""
    parts: list[list[str]] = []
    for word in words:
        if is_flag(word):
            parts.append([])
        parts[-1].append(word)
    return parts
