"""The shortest command line, configurations near it, and the command lines of published runs."""

import json
from collections.abc import Mapping
from pathlib import Path

from megatron.config.fields import ConfigWithOrigin, build_config, flatten
from megatron.config.tree import Config
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.rules.finding import apply_rules, list_errors, list_warnings
from megatron.plan.rules.lists import CONFIG_RULES

_REQUIRED = {
    "num-layers": 2,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 16,
    "micro-batch-size": 1,
}
REQUIRED = [word for name, value in _REQUIRED.items() for word in (f"--{name}", str(value))]
TRAINABLE = [*REQUIRED, "--train-iters", "10", "--lr", "1e-3"]
PUBLISHED_RUNS = ("tr1-13B", "tr8-104B", "tr11-176B-ml")


def check_rules(config: Config, origin: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the errors and the warnings of all rules that need only the configuration."""
    findings = apply_rules(CONFIG_RULES, ConfigWithOrigin(config, origin))
    return list_errors(findings), list_warnings(findings)


def published_arguments(run: str, folder: Path | None = None) -> list[str]:
    """Return the command line of a published run, unchanged.

    With a folder, its DeepSpeed configuration is written there and the command line names it.
    """
    file = Path(__file__).resolve().parents[1] / "fixtures" / "published_runs" / f"{run}.json"
    record = json.loads(file.read_text())
    if folder is None:
        return list(record["arguments"])
    path = folder / "ds_config.json"
    path.write_text(json.dumps(record["ds_config"]))
    return [str(path) if word == "./ds_config.0.json" else word for word in record["arguments"]]


def replace_values(arguments: list[str], changed: Mapping[str, list[str] | None]) -> list[str]:
    """Return a command line with other values for some of its flags. None removes a flag."""
    result = []
    at = 0
    while at < len(arguments):
        flag = arguments[at]
        values = []
        at += 1
        while at < len(arguments) and not arguments[at].startswith("--"):
            values.append(arguments[at])
            at += 1
        new = changed.get(flag, values)
        if new is not None:
            assert len(new) == len(values), flag
            result += [flag, *new]
    return result


def config_with(**changes: object) -> Config:
    """Return the configuration of TRAINABLE with fields changed, by their names without group."""
    values = flatten(load_config(TRAINABLE).config)
    by_name = {dotted.partition(".")[2]: dotted for dotted in values}
    return build_config(values | {by_name[name]: value for name, value in changes.items()})
