"""argv -> values by field: the pre-pass that makes one command line out of all spellings that scripts and launchers use.

Invariant: of a field given several times, under whatever names, the last wins. Nothing is dropped silently: a token is read, or
there is a warning or an error that names it.
"""

import dataclasses
import difflib
import functools
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.config.compat import find_row, find_rows
from megatron.config.compat_row import Row
from megatron.config.fields import Arity, Field, ValueWithOrigin, all_fields


@dataclasses.dataclass
class CommandLine:
    """What a command line says."""

    given: dict[str, ValueWithOrigin] = dataclasses.field(default_factory=dict)
    config_file: str | None = None
    help: bool = False
    conditions: list[tuple[str, Row]] = dataclasses.field(default_factory=list)
    """Flags that are fine only where another field is given too."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)


def read_argv(argv: Sequence[str]) -> CommandLine:
    """Read a command line; what is wrong with it is in `.errors`, all of it."""
    line = CommandLine()
    tokens = deque(argv)
    before: list[str] = []
    while tokens:
        token = tokens.popleft()
        if not _is_flag(token):
            line.errors.append(_describe_stray(token, before))
            continue
        typed, equals, attached = token.partition("=")
        flag, values = _normalise_flag(typed), [attached] if equals else []
        if flag in ("-h", "--help"):
            line.help = True
            continue
        values += _take(tokens, _get_arity(flag), len(values))
        before = [typed, *values]
        _read_flag(line, typed, flag, values)
    line.warnings = list(dict.fromkeys(line.warnings))
    return line


@functools.cache
def list_known_flags() -> dict[str, Field]:
    """Every flag of the configuration itself, negative forms of booleans included."""
    fields = all_fields().values()
    return {f.flag: f for f in fields} | {f.negative_flag: f for f in fields if f.is_bool}


def _read_flag(line: CommandLine, typed: str, flag: str, values: list[str]) -> None:
    if flag == "--config":
        if len(values) == 1:
            line.config_file = values[0]
        else:
            line.errors.append("--config needs the name of a YAML file.")
    elif row := find_row(flag, values):
        _read_row(line, typed, row, values)
    elif field := list_known_flags().get(flag):
        _set_field(line, field, typed, flag, values)
    elif others := find_rows(flag):
        allowed = ", ".join(value for row in others for value in row.only)
        line.errors.append(
            f"{' '.join([typed, *values])}: only {allowed} is possible here; {others[0].reason}."
        )
    else:
        line.errors.append(f"unknown flag {typed}{_suggest_flag(flag)}")


def _read_row(line: CommandLine, typed: str, row: Row, values: list[str]) -> None:
    shown = " ".join([typed, *values])
    flags = _split_at_flags(row.to)
    if row.arity == 0 and values:
        word = values[0].lower()
        if word == "false" and row.kind == "refused":
            line.warnings.append(f"{shown} has no effect here: it asks for nothing.")
            return
        if word == "true":
            values = []
        elif word != "false" or not all(list_known_flags()[flag].is_bool for flag, *_ in flags):
            line.errors.append(f"{shown} must be true, or left out.")
            return
    if row.kind == "refused":
        line.errors.append(f"{shown} is not possible here: {row.reason}.")
        return
    if row.needs:
        line.conditions.append((shown, row))
    if row.kind == "harmless":
        line.warnings.append(f"{shown} has no effect here: {row.reason}.")
        return
    passed = [] if row.only else values
    if row.arity == 0 and passed:  # "false": it is off, whatever it stands for
        flags = [[flag, *passed] for flag, *_ in flags]
    else:
        flags[-1] += passed
    note = f": {row.reason}" if row.reason and not row.needs else ""
    line.warnings.append(
        f"{shown} is read as {' '.join(word for words in flags for word in words)}{note}."
    )
    for flag, *its_values in flags:
        _set_field(line, list_known_flags()[flag], typed, flag, its_values)


def _split_at_flags(words: Sequence[str]) -> list[list[str]]:
    """`--a 1 --b` as [[--a, 1], [--b]]."""
    cuts: list[list[str]] = []
    for word in words:
        if _is_flag(word):
            cuts.append([])
        cuts[-1].append(word)
    return cuts


def _set_field(line: CommandLine, field: Field, typed: str, flag: str, values: list[str]) -> None:
    bare = [_strip_quotes(value) for value in values]
    if bare != values:
        line.warnings.append(
            f"{' '.join([typed, *values])} is read as {' '.join([typed, *bare])}: the shell left the quotes in."
        )
        values = bare
    try:
        line.given[field.dotted] = ValueWithOrigin(_convert_values(field, flag, values), typed)
    except ValueError as error:
        line.errors.append(f"{' '.join([typed, *values])} {error}.")


def _strip_quotes(value: str) -> str:
    """`'type:embedding'` as a script that keeps its flags in a variable passes it, quotes and all."""
    quoted = len(value) > 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def _convert_values(field: Field, flag: str, values: list[str]) -> Any:
    if field.is_bool:
        on = field.convert(values or ["true"])
        return on if flag == field.flag else not on
    if not values:
        raise ValueError(
            "needs at least one value"
            if field.arity == "*"
            else f"needs a value; it must be {field.expected}"
        )
    if values == ["None"] and (field.optional or field.arity == "*"):
        return None if field.optional else ()
    return field.convert(values)


def _get_arity(flag: str) -> Arity:
    if flag == "--config":
        return 1
    if found := find_rows(flag):
        return found[0].arity
    return list_known_flags()[flag].arity if flag in list_known_flags() else "*"


def _take(tokens: "deque[str]", arity: Arity, taken: int) -> list[str]:
    """The values at the head of `tokens` that belong to a flag which has `taken` of them already."""
    values: list[str] = []
    while tokens and not _is_flag(tokens[0]) and (arity == "*" or taken + len(values) < arity):
        values.append(tokens.popleft())
    return values


def _is_flag(token: str) -> bool:
    return token.startswith("-") and len(token) > 1 and not re.match(r"-(\d|\.\d|inf$|nan$)", token)


def _normalise_flag(typed: str) -> str:
    """`--hidden_size` is `--hidden-size`."""
    return typed[:2] + typed[2:].replace("_", "-")


def _describe_stray(token: str, before: list[str]) -> str:
    """The message for a value that follows no flag, or one flag's values too many."""
    after = f" after {' '.join(before)}" if before else ""
    attach = (
        f"; write {before[0]}={token}"
        if len(before) == 1 and token.lower() in ("true", "false")
        else ""
    )
    return f"'{token}'{after} belongs to no flag{attach}."


def _suggest_flag(flag: str) -> str:
    known = list(list_known_flags())
    begun = [name for name in known if name.startswith(flag)] if len(flag) > 4 else []
    close = begun[:3] or difflib.get_close_matches(flag, known, n=2, cutoff=0.7)
    return f"; perhaps you meant {' or '.join(close)}." if close else "; --help lists all flags."
