"""Recognises the configuration files of other trainers, and reads those that can be read."""

from collections.abc import Sequence

import yaml

from megatron.base.errors import ConfigError
from megatron.base.outside_file import SETTINGS_BYTES, load_text
from megatron.config.normalise import CommandLine, Translator, read_argv
from megatron.config.yaml_file import PLAIN_TAGS, compose, is_null, read_items
from megatron.extras.interop.translators.compat import find_rows
from megatron.extras.interop.translators.neox_file import read_neox_files

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
