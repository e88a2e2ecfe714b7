"""Converts a command line to the values of fields, in every spelling that scripts use.

Invariant: if a field is given several times, under any names, the last one wins. Nothing is dropped
silently. A token is read, or a warning or an error names it.

A `Translator` is the interface that reads flags and files of other trainers.
"""

import functools
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.base.plain_text import find_close_names, format_some
from megatron.config.fields import SWITCH, Arity, Field, ValueWithOrigin, all_fields

Given = Mapping[str, ValueWithOrigin]
"""Dotted field -> its value."""
Found = tuple[dict[str, ValueWithOrigin], list[str], list[str]]
"""Fields, errors and warnings."""


@dataclass
class CommandLine:
    """The values, warnings and errors that a command line gave."""

    given: dict[str, ValueWithOrigin] = field(default_factory=dict)
    config_files: tuple[str, ...] = ()
    preset: ValueWithOrigin | None = None
    """Name of the preset, or None as its value if --preset None was given."""
    help: bool = False
    help_group: str | None = None
    """The group that --help names."""
    typed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag of another trainer, with hyphens -> its values. Flags that are off are left out."""
    foreign: str | None = None
    """The first flag in a spelling that only another trainer has, as typed."""
    conditions: list[tuple[str, str, str]] = field(default_factory=list)
    """(flag as typed, dotted field, reason) of flags that are possible only with another field."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the flags that are refused for this reason, as typed."""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Translator(Protocol):
    """Reads what users of other trainers write. Without one, such flags are unknown."""

    def find_arity(self, flag: str) -> Arity | None:
        """Return how many values follow a flag of another trainer, or None for an unknown flag."""

    def read_flag(self, line: CommandLine, typed: str, flag: str, values: list[str]) -> bool:
        """Read a flag with its values into `line`. Return whether it is one of another trainer.

        Args:
            line: It is updated.
            typed: The flag as typed.
            flag: The flag with hyphens.
            values: Its values.
        """

    def explain_values(self, flag: str) -> str | None:
        """Return which values of a flag are possible and why, or None for an unknown flag."""

    def read_files(self, paths: Sequence[str]) -> CommandLine | None:
        """Return the configuration in files of another trainer, or None for other files.

        Raises:
            ConfigError: The files cannot be read as what they seem to be.
        """

    def merge_json(self, path: str, given: Given) -> Found:
        """Return what DeepSpeed's JSON sets beside `given`."""

    def fill(self, line: CommandLine, given: Given) -> Found:
        """Return the fields that the other trainer would set itself beside `given`."""

    def explain_missing(self, line: CommandLine) -> list[str]:
        """Return what to add to the errors about missing fields."""


def read_argv(argv: Sequence[str], translator: Translator | None = None) -> CommandLine:
    """Read a command line, and collect everything that is wrong with it in `.errors`.

    Args:
        argv: The words.
        translator: Reads flags of other trainers. Without one, they are unknown.
    """
    line = CommandLine()
    tokens = deque(argv)
    before: list[str] = []
    while tokens:
        token = tokens.popleft()
        if not is_flag(token):
            # `before` is the flag and values that the message names, since the stray value often
            # belongs there.
            strays = [token, *_take(tokens, "*", 0)]
            line.errors.append(_describe_strays(strays, before))
            continue
        typed, equals, attached = token.partition("=")
        flag = normalise_flag(typed)
        values = []
        if equals:
            values = [attached]
        if flag in ("-h", "--help"):
            line.help = True
            values += _take(tokens, 1, len(values))
            if values:
                line.help_group = values[0]
            continue
        # The arity of the flag decides how many tokens it takes. A further value is reported as a
        # stray one.
        values += _take(tokens, _get_arity(flag, translator), len(values))
        if not values and "_" in typed and tokens and tokens[0].lower() in ("true", "false"):
            # fms-fsdp reads its flags with Python Fire, where a boolean may have its value attached
            # or behind it. All its booleans have underscores.
            values.append(tokens.popleft())
        field = list_known_flags().get(flag)
        if field is not None and field.is_switch and not values:
            values += _take_switch(tokens)
        before = [typed, *values]
        _read_flag(line, typed, flag, values, translator)
    # Equal warnings, as of a flag that is given twice, are kept once. A dict keeps the order.
    line.warnings = list(dict.fromkeys(line.warnings))
    # Refused flags come first. The other errors do not matter if the run is impossible here.
    line.errors = [*_describe_refused(line.refused), *line.errors]
    return line


@functools.cache
def list_known_flags() -> dict[str, Field]:
    """Return the field of each flag of this trainer, including the `--no-` flags of booleans.

    Flags of other systems are not included.
    """
    fields = all_fields().values()
    return {f.flag: f for f in fields} | {f.negative_flag: f for f in fields if f.is_bool}


def _read_flag(
    line: CommandLine, typed: str, flag: str, values: list[str], translator: Translator | None
) -> None:
    """Read one flag with its values into `line`."""
    if flag == "--config":
        if all(values) and values:
            line.config_files = tuple(values)
        else:
            line.errors.append("--config needs the name of a YAML file.")
    elif flag == "--preset":
        if len(values) == 1:
            name = _strip_quotes(values[0])
            # The word None unsets the preset of the --config file.
            line.preset = ValueWithOrigin(None if name == "None" else name, typed)
        else:
            line.errors.append("--preset needs the name of a preset; --list-presets lists all.")
    # The translator comes first. A flag of this trainer may have values that only others have.
    elif translator is not None and translator.read_flag(line, typed, flag, values):
        return
    elif field := list_known_flags().get(flag):
        set_field(line, field, typed, flag, values)
    elif translator is not None and (reason := translator.explain_values(flag)) is not None:
        line.errors.append(f"{' '.join([typed, *values])}: {reason}.")
    else:
        line.errors.append(f"unknown flag {typed}{_suggest_flag(flag, translator)}")


def _describe_refused(refused: dict[str, list[str]]) -> list[str]:
    """Return one message for each reason to refuse flags."""
    return [
        f"{', '.join(shown)} {'is' if len(shown) == 1 else 'are'} not possible here: {reason}."
        for reason, shown in refused.items()
    ]


def set_field(line: CommandLine, field: Field, typed: str, flag: str, values: list[str]) -> None:
    """Convert the values of one field and record them, or record the error."""
    bare = [_strip_quotes(value) for value in values]
    if bare != values:
        line.warnings.append(
            f"{' '.join([typed, *values])} is read as {' '.join([typed, *bare])}: the shell did "
            "not remove the quotes."
        )
        values = bare
    try:
        # A later flag of the same field replaces this entry, so the last one wins.
        line.given[field.dotted] = ValueWithOrigin(_convert_values(field, flag, values), typed)
    except ValueError as error:
        line.errors.append(f"{' '.join([typed, *values])} {error}.")


def _strip_quotes(value: str) -> str:
    """Return a value without the quotes around it.

    A script that keeps its flags in a variable passes `'type:embedding'` with the quotes.
    """
    quoted = len(value) > 2 and value[0] == value[-1] and value[0] in "'\""
    if quoted:
        return value[1:-1]
    return value


def _convert_values(field: Field, flag: str, values: list[str]) -> Any:
    """Return the value that the texts spell, inverted for the negative form of a boolean.

    Raises:
        ValueError: the texts do not fit the field.
    """
    if field.is_bool:
        on = field.convert(values or ["true"])
        if flag == field.flag:
            return on
        if field.is_switch and values and values[0].lower() in SWITCH:
            raise ValueError(f"must be without a value; {field.flag} auto is the default")
        return not on
    if not values:
        raise ValueError(
            "needs at least one value"
            if field.arity == "*"
            else f"needs a value; it must be {field.expected}"
        )
    if values == ["None"] and (field.optional or field.arity == "*"):
        # The word None unsets a value. A list that cannot be None becomes the empty tuple.
        return None if field.optional else ()
    return field.convert(values)


def _get_arity(flag: str, translator: Translator | None) -> Arity:
    """Return how many values follow the flag."""
    if flag == "--preset":
        return 1
    # GPT-NeoX divides a configuration into several files.
    if flag == "--config":
        return "*"
    arity = None if translator is None else translator.find_arity(flag)
    if arity is not None:
        return arity
    # An unknown flag takes all values that follow it, so that they are not reported as errors of
    # their own.
    if flag in list_known_flags():
        return list_known_flags()[flag].arity
    return "*"


def _take(tokens: "deque[str]", arity: Arity, taken: int) -> list[str]:
    """Remove and return the values at the head of `tokens` that belong to a flag.

    The flag has `taken` values already, because one may be attached with `=`.
    """
    values: list[str] = []
    while tokens and not is_flag(tokens[0]) and (arity == "*" or taken + len(values) < arity):
        values.append(tokens.popleft())
    return values


def _take_switch(tokens: "deque[str]") -> list[str]:
    """Remove and return the value of a flag such as `--rope-fusion auto`, if there is one."""
    # The word None is no value. It is taken, so that the message names the values.
    if tokens and tokens[0].lower() in (*SWITCH, "none"):
        return [tokens.popleft()]
    return []


def is_flag(token: str) -> bool:
    """Return whether a token is a flag. Negative numbers and -inf are values."""
    return token.startswith("-") and len(token) > 1 and not re.match(r"-(\d|\.\d|inf$|nan$)", token)


def normalise_flag(typed: str) -> str:
    """Return the flag with hyphens: `--hidden_size` becomes `--hidden-size`."""
    return typed[:2] + typed[2:].replace("_", "-")


def _describe_strays(strays: list[str], before: list[str]) -> str:
    """Return the message for values that follow no flag or exceed a flag's number of values."""
    after = ""
    if before:
        after = f" after {' '.join(before)}"
    attach = ""
    if len(before) == 1 and strays[0].lower() in ("true", "false"):
        attach = f"; write {before[0]}={strays[0]}"
    shown = format_some(f"'{token}'" for token in strays)
    return f"{shown}{after} belongs to no flag{attach}."


_EPOCHS = (
    "this trainer counts iterations, samples or tokens and not epochs: --train-iters N, "
    "--train-samples N or --train-tokens N. The start prints how many epochs these are"
)
_OTHER_NAMES = {
    "--epochs": _EPOCHS,
    "--num-epochs": _EPOCHS,
    "--num-train-epochs": _EPOCHS,
    "--max-steps": "here it is --train-iters",
    "--num-train-steps": "here it is --train-iters",
    "--output-dir": "here it is --save, and --load with the same folder resumes the run",
    "--resume": "give the same folder to --save and --load, and the run resumes by itself",
    "--resume-from-checkpoint": "here it is --load, with the folder of the run",
    "--batch-size": "here it is --global-batch-size, and --micro-batch-size on one device",
    "--learning-rate": "here it is --lr",
    "--ranks-per-node": "the launcher sets them; --hsdp-shard-size sets how many share a model",
}
"""Flags of other programs -> what to do here."""


def _suggest_flag(flag: str, translator: Translator | None) -> str:
    """Return the end of a message about an unknown flag."""
    known = [*list_known_flags(), "--config", "--preset", "--list-presets"]
    # Up to four characters, as in --lr, are the start of too many flags to be a useful hint.
    started = []
    if len(flag) > 4:
        started = [name for name in known if name.startswith(flag)]
    if flag in _OTHER_NAMES:
        return f"; {_OTHER_NAMES[flag]}."
    close = started[:3] or find_close_names(flag, known, most=2, cutoff=0.7)
    hint = f"perhaps you meant {' or '.join(close)}." if close else "--help lists all flags."
    if translator is None:
        hint += (
            " Flags of other trainers need megatron.extras.interop.translators, which this "
            "installation does not have."
        )
    return f"; {hint}"
