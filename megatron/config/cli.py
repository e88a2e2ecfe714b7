"""The configuration of a run out of a command line and a YAML file, with the origin of each value.

Invariant: precedence is flag, then YAML file, then default. Nothing but --help ends the process: what is wrong is a `ConfigError`
that lists all of it. Rules that connect fields are in `megatron.config.rules`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.compare import compute_config_digest, list_config_differences
from megatron.config.deepspeed_json import merge_json
from megatron.config.fields import ValueWithOrigin, all_fields, build_config, find_missing
from megatron.config.help import print_help
from megatron.config.normalise import read_argv
from megatron.config.tree import Config
from megatron.config.yaml_file import dump_yaml, read_file, read_text
from megatron.errors import ConfigError

__all__ = [
    "LoadedConfig",
    "compute_config_digest",
    "dump_yaml",
    "list_config_differences",
    "load_config",
    "load_yaml",
]


@dataclass(frozen=True)
class LoadedConfig:
    """What was asked, and by whom."""

    config: Config
    origin: dict[str, str]
    """Dotted field -> 'default', 'run.yaml:9', or the flag as it was typed."""
    warnings: list[str]


def load_config(argv: Sequence[str] | None = None, *, prog: str | None = None) -> LoadedConfig:
    """Read flags (`sys.argv` by default) over the YAML file that --config names.

    Raises ConfigError with every unknown flag or key, value of a wrong type and missing field. --help prints and exits.
    """
    line = read_argv(sys.argv[1:] if argv is None else argv)
    if line.help:
        print_help(prog)
        raise SystemExit(0)
    given: dict[str, ValueWithOrigin] = {}
    errors = list(line.errors)
    if line.config_file is not None:
        given, yaml_errors = read_file(line.config_file)
        errors += yaml_errors
    given |= line.given
    warnings = list(line.warnings)
    if _get_value(given, "parallel.deepspeed"):
        path = _get_value(given, "parallel.deepspeed_config")
        if path is not None and Path(path).exists():  # where it does not, the plan says so
            from_json, json_errors, json_warnings = merge_json(path, given)
            given |= from_json
            errors += json_errors
            warnings += json_warnings
    if _get_value(given, "optimizer.use_bnb_optimizer"):  # as in Megatron-DeepSpeed
        given.setdefault(
            "model.embed_layernorm",
            ValueWithOrigin(True, given["optimizer.use_bnb_optimizer"].origin),
        )
    for shown, row in line.conditions:
        field = all_fields()[row.needs]
        if row.needs not in given or given[row.needs].value == field.default:
            errors.append(f"{shown} needs {field.flag} beside it: {row.reason}.")
    if not errors:  # a typing error in a required flag would be reported twice
        errors += find_missing(given)
    if errors:
        raise combine_errors(errors)
    origin = {
        dotted: given[dotted].origin if dotted in given else "default" for dotted in all_fields()
    }
    return LoadedConfig(
        build_config({dotted: item.value for dotted, item in given.items()}), origin, warnings
    )


def _get_value(given: Mapping[str, ValueWithOrigin], dotted: str) -> Any:
    return given[dotted].value if dotted in given else None


def load_yaml(text: str) -> Config:
    """The configuration that `dump_yaml` wrote. Raises ConfigError."""
    given, errors = read_text(text, "<yaml>")
    errors = errors or find_missing(given)
    if errors:
        raise combine_errors(errors)
    return build_config({dotted: item.value for dotted, item in given.items()})


def combine_errors(errors: Sequence[str]) -> ConfigError:
    """One error that reports all of them."""
    if len(errors) == 1:
        return ConfigError(errors[0])
    return ConfigError(
        f"{len(errors)} errors in the configuration:"
        + "".join(f"\n  - {error}" for error in errors)
    )
