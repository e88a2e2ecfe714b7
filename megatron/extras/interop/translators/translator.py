"""The translator of other trainers' flags, files and defaults, and the way to load with it.

Each rank that trains imports this module. What only a command line of another trainer needs is
imported when it is used.
"""

import math
from collections.abc import Sequence

import yaml

from megatron.base.errors import ConfigError
from megatron.base.outside_file import SETTINGS_BYTES, load_text
from megatron.config.cli import FOREIGN_DEFAULT
from megatron.config.cli import load_config as load_with
from megatron.config.fields import Arity, LoadedConfig, ValueWithOrigin, all_fields
from megatron.config.normalise import (
    CommandLine,
    Found,
    Given,
    Translator,
    is_flag,
    list_known_flags,
    read_argv,
    set_field,
)
from megatron.config.presets import read_preset
from megatron.config.yaml_file import PLAIN_TAGS, compose, is_null, read_items
from megatron.extras.interop.translators.compat import NEOX, Row, find_row, find_rows


class OtherTrainers:
    """Reads the flags, files and defaults of all trainers of docs/flags.md. See `Translator`."""

    def find_arity(self, flag: str) -> Arity | None:
        """Return how many values follow a flag of another trainer, or None for an unknown flag."""
        # All rows of one flag take the same number of values.
        return next((row.arity for row in find_rows(flag)), None)

    def read_flag(self, line: CommandLine, typed: str, flag: str, values: list[str]) -> bool:
        """Read a flag with its values into `line`. Return whether it is one of another trainer."""
        row = find_row(flag, values)
        if row is None:
            return False
        read_row(line, typed, flag, row, values)
        return True

    def explain_values(self, flag: str) -> str | None:
        """Return which values of a flag are possible and why, or None for an unknown flag."""
        rows = find_rows(flag)
        if not rows:
            return None
        allowed = " or ".join(value for row in rows for value in row.only)
        return f"only {allowed} is possible here; {rows[0].reason}"

    def read_files(self, paths: Sequence[str]) -> CommandLine | None:
        """Return the configuration in files of another trainer, or None for other files."""
        return read_foreign_files(paths, self)

    def merge_json(self, path: str, given: Given) -> Found:
        """Return what DeepSpeed's JSON sets beside `given`."""
        from megatron.extras.interop.translators.deepspeed_json import merge_json

        return merge_json(path, given)

    def fill(self, line: CommandLine, given: Given) -> Found:
        """Return the fields that another system would set itself, the errors and the warnings."""
        if not line.typed:
            return {}, [], []
        from megatron.extras.interop.translators.compat_derived import (
            derive_values,
            describe_dropped_defaults,
            find_defaults,
        )

        filled: dict[str, ValueWithOrigin] = {}
        typed = dict(line.typed)
        warnings: list[str] = []
        found = find_defaults(typed, given)
        system = ""
        if found is None and (dropped := describe_dropped_defaults(typed, given)):
            warnings.append(dropped)
        if found is not None:
            system, words = found
            defaults = read_argv(words, self)
            typed = defaults.typed | typed
            filled = {
                dotted: ValueWithOrigin(item.value, f"{system}{FOREIGN_DEFAULT}")
                for dotted, item in defaults.given.items()
                if dotted not in given
            }
            listed = ", ".join(
                all_fields()[dotted].spell(item.value) for dotted, item in filled.items()
            )
            warnings.append(
                f"the defaults of {system} are used for flags that are not given: "
                f"{listed or 'none'}."
            )
        try:
            derived = list(dict.fromkeys(derive_values(typed, system, dict(given) | filled)))
        except ValueError as error:
            return filled, [str(error)], warnings
        for dotted, value, reason in derived:
            filled[dotted] = ValueWithOrigin(value, "derived")
            warnings.append(f"{reason}.")
        return filled, [], warnings

    def explain_missing(self, line: CommandLine) -> list[str]:
        """Return what to add to the errors about missing fields."""
        if NEOX not in line.typed:
            return []
        return [
            "GPT-NeoX divides a configuration into several files: give all, as in --config "
            "125M.yml local_setup.yml."
        ]


def load_config(argv: Sequence[str] | None = None, *, prog: str | None = None) -> LoadedConfig:
    """Load a command line that may have the flags and files of other trainers.

    See `megatron.config.cli.load_config`.

    Raises:
        ConfigError: The command line has errors.
    """
    return load_with(argv, prog=prog, translator=OtherTrainers())


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
    elif row.kind != "renamed" and off:
        line.warnings.append(f"{shown} has no effect here: the flag is off.")
    elif row.kind == "refused":
        # A dictionary keeps the order, and has a flag once.
        line.refused[row.reason] = list(dict.fromkeys([*line.refused.get(row.reason, []), shown]))
    elif row.kind == "derived":
        _read_derived(line, shown, row, values)
    elif off:
        _turn_off_renamed(line, typed, row, values[0])
    else:
        _read_renamed(line, typed, row, values)


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


_KINDS = {
    "nanotron": {"general", "parallelism", "tokens"},
    "picotron": {"distributed", "training", "dataset"},
}
"""Trainer -> groups that its files have, and files of this package have not."""


def read_foreign_files(paths: Sequence[str], translator: Translator) -> CommandLine | None:
    """Return the configuration in files of GPT-NeoX or llm-baselines, or None for another file.

    Args:
        paths: The files of --config.
        translator: Reads their flags.

    Raises:
        ConfigError: The file is of a trainer whose files are not read, or several files are not
            those of GPT-NeoX, or a file of flags gives a key twice.
    """
    if not paths:
        return None
    from megatron.extras.interop.translators.neox_file import read_neox_files

    line = read_neox_files(paths)
    if line is not None:
        return line
    if len(paths) > 1:
        raise ConfigError(
            f"--config {' '.join(paths)}: only files of GPT-NeoX are merged, and these are of "
            "another kind; give one file."
        )
    _refuse_kind(paths[0])
    flags = _read_flat_flags(paths[0])
    if flags is None:
        return None
    return read_argv(flags, translator)


def _refuse_kind(path: str) -> None:
    """Raise ConfigError for a file of nanotron or picotron."""
    try:
        root, _ = compose(load_text(path, SETTINGS_BYTES), path)
    except OSError:
        # `read_file` reports it.
        return
    if not isinstance(root, yaml.MappingNode):
        return
    keys = {key.value for key, _ in root.value if isinstance(key, yaml.ScalarNode)}
    for trainer, groups in _KINDS.items():
        if groups <= keys:
            raise ConfigError(
                f"--config {path} is a configuration of {trainer}, which is not read; write its "
                "values under the names in the table of docs/migrating.md, or use a --preset."
            )


def _read_flat_flags(path: str) -> list[str] | None:
    """Return the keys of a file without groups as flags, or None for a file with groups.

    llm-baselines keeps its flags in such files: `n_layer: 10`. At least one key must be a flag of
    another system. Otherwise the user has probably forgotten a group, and `read_file` reports it.

    Raises:
        ConfigError: A file of flags gives a key twice.
    """
    try:
        root = yaml.compose(load_text(path, SETTINGS_BYTES), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, RecursionError):
        # `read_file` reports it.
        return None
    if not isinstance(root, yaml.MappingNode):
        return None
    words: list[str] = []
    errors: list[str] = []
    foreign = False
    for key, value in read_items(root, path, "the file", errors):
        # A tag such as !include is no value of a flag.
        if value.tag not in PLAIN_TAGS:
            return None
        # A file of flags cannot name another file, so this is an ordinary file with an error.
        if key.value == "config":
            return None
        if isinstance(value, yaml.ScalarNode):
            # A key without a value leaves the flag out.
            texts = [] if is_null(value) else [f"--{key.value}={value.value}"]
        elif isinstance(value, yaml.SequenceNode) and all(
            isinstance(item, yaml.ScalarNode) for item in value.value
        ):
            texts = [f"--{key.value}", *(str(item.value) for item in value.value)]
        else:
            return None
        words += texts
        foreign = foreign or bool(find_rows("--" + key.value.replace("_", "-")))
    if not foreign:
        return None
    if errors:
        raise ConfigError("\n".join(errors))
    return words
