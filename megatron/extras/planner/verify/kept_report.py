"""The report of `megatron-verify` that a run keeps (--verification FILE).

The report is a JSON file. A run copies it into its folder, records its verdict in the chronicle,
and warns about settings that differ from those that were verified.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError, describe_os_error
from megatron.base.outside_file import load_json
from megatron.config.fields import ConfigWithOrigin, all_fields, flatten
from megatron.config.tree import Config
from megatron.plan.rules.finding import Finding, error

COPIED = "verification.json"
"""File name of the copy in the --save folder."""
_COMPARED = re.compile(
    r"(model|batch|curriculum|parallel|optimizer|loss|precision|recompute|kernels)\..*"
)
"""Names of settings that may change numbers."""
_NOT_COMPARED = ("parallel.local_rank", "parallel.distributed_backend", "precision.fp8_emulate")
"""Settings that depend on the machine. A verification emulates float8 in any case."""


def read_report(path: str) -> dict[str, Any]:
    """Return the report in a file.

    Raises:
        ConfigError: The file cannot be read, or is not a report of megatron-verify.
    """
    try:
        report = load_json(path)
    except OSError as error:
        raise ConfigError(f"--verification: {describe_os_error(error)}.") from None
    except ValueError:
        report = None
    # Any JSON file may be named by mistake.
    if not isinstance(report, dict) or not isinstance(report.get("configuration"), dict):
        raise ConfigError(
            f"--verification {path} is not a report of megatron-verify. Write one with "
            "megatron-verify --report FILE."
        )
    return report


def check_report(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the file of --verification is a report."""
    path = settings.config.logging.verification
    try:
        if path is not None:
            read_report(path)
    except ConfigError as failure:
        yield error(str(failure))


def list_differences(report: dict[str, Any], config: Config, world_size: int) -> list[str]:
    """Return the flags whose values differ from those that were verified.

    Args:
        report: A report of `read_report`.
        config: The configuration of the run.
        world_size: Number of processes of the run.
    """
    table = all_fields()
    found = ["the number of processes"] * (report.get("world_size") != world_size)
    for dotted, value in flatten(config).items():
        # Paths and logging change no number.
        if not _COMPARED.fullmatch(dotted) or dotted in _NOT_COMPARED:
            continue
        # The report has what differs from the defaults.
        default = _make_plain(table[dotted].default)
        if _make_plain(value) != report["configuration"].get(table[dotted].flag, default):
            found.append(table[dotted].flag)
    return found


def _make_plain(value: Any) -> Any:
    """Return a value as JSON has it, without tuples."""
    return json.loads(json.dumps(value, default=str))


def keep_verification(
    config: Config, world_size: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Copy the report into the folder of the run, and print warnings about it.

    Args:
        config: The configuration of the run.
        world_size: Number of processes of the run.
        log: Prints a line of the log.

    Returns:
        What the chronicle records about it. Empty without a report.

    Raises:
        ConfigError: See `read_report`.
    """
    path = config.logging.verification
    if path is None:
        return {}
    report = read_report(path)
    found = {
        "verified": report.get("verified") is True,
        "failed": report.get("failed"),
        "not_kept": report.get("lost", []),
        "other_settings": list_differences(report, config, world_size),
    }
    if not found["verified"]:
        log(f"warning: --verification {path}: the verification failed at {found['failed']}")
    if found["other_settings"]:
        others = ", ".join(found["other_settings"])
        log(f"warning: --verification {path} was made with other values of {others}")
    if config.checkpoint.save_folder is not None:
        try:
            copy = Path(config.checkpoint.save_folder) / COPIED
            replace_file(copy, json.dumps(report, indent=1) + "\n")
        except OSError as error:
            # The chronicle has the verdict, so training continues without the copy.
            log(f"warning: the report of --verification is not copied: {describe_os_error(error)}")
    return {"verification": found}
