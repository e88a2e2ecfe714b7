"""Recognises the configuration files of other trainers, and reads those that can be read."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron.base.errors import ConfigError
from megatron.config.normalise import CommandLine, read_argv
from megatron.config.yaml_file import compose, read_flat_flags
from megatron.extras.translators.neox_file import read_neox_files

_KINDS = {
    "nanotron": {"general", "parallelism", "tokens"},
    "picotron": {"distributed", "training", "dataset"},
}
"""Trainer -> groups that its files have, and ours have not."""


def read_foreign_files(paths: Sequence[str]) -> CommandLine | None:
    """Return the configuration in files of GPT-NeoX or llm-baselines, or None for another file.

    Args:
        paths: The files of --config.

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
    flags = read_flat_flags(paths[0])
    if flags is None:
        return None
    return read_argv(flags)


def _refuse_kind(path: str) -> None:
    """Raise ConfigError for a file of nanotron or picotron."""
    try:
        root, _ = compose(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError):
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
