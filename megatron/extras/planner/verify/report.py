"""The report of a verification as plain data and as text, and the copy that a run keeps.

The report is a JSON file. With --verification FILE, a run copies it into its folder, records its
verdict in the chronicle, and warns about settings that differ from those that were verified. This
module imports no torch, because a start checks the file before torch is imported.
"""

import json
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.base.code_version import get_code_version
from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError, describe_os_error
from megatron.base.outside_file import load_json
from megatron.config.fields import ConfigWithOrigin, all_fields, flatten
from megatron.config.tree import Config
from megatron.plan.rules.finding import Finding, error
from megatron.plan.run_plan import Plan

if TYPE_CHECKING:
    from megatron.extras.planner.verify.verification import VerifiedRun

NOT_VERIFIED = (
    "kernels and arithmetic of GPUs, NCCL, and effects that only large sizes have, such as "
    "overflows, memory and speed"
)


def describe_layout(plan: Plan) -> str:
    """Return the sizes of a copy's axes as text."""
    grid = plan.grid
    text = f"tensor {grid.tensor} x pipeline {grid.pipeline} x data {grid.data}"
    return f"{text} x context {grid.context}" if grid.context > 1 else text


def build_report(plan: Plan, found: "VerifiedRun") -> dict[str, Any]:
    """Return the report as values of JSON.

    Args:
        plan: The plan of the run.
        found: The result of its verification.
    """
    copy = found.reduction.plan
    table = all_fields()
    report = {
        "verified": found.failed is None,
        "failed": found.failed,
        "world_size": plan.world_size,
        "configuration": {
            table[name].flag: value
            for name, value in flatten(plan.config).items()
            # The defaults are those of the version above.
            if value != table[name].default
        },
        "versions": {
            "megatron": get_code_version(),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        "copy": {
            "processes": copy.world_size,
            "layout": describe_layout(copy),
            "layers_of_stages": copy.layers_per_stage,
            "parameters": copy.parameters,
        },
        "data": found.data,
        "kept": found.reduction.kept,
        "lost": found.reduction.lost,
        "reduced": [
            {"flag": table[name].flag, "run": run, "copy": reduced}
            for name, run, reduced in found.reduction.changes
        ],
        "comparisons": [
            {
                "comparison": row.comparison,
                "compared": row.compared,
                # JSON has no infinity.
                "error": row.error if math.isfinite(row.error) else "inf",
                "bound": row.bound,
                "passed": row.passed,
                "failure": row.failure and str(row.failure),
            }
            for row in found.rows
        ],
        "first_difference": found.first_difference,
        "note": found.note,
        "float8_flips": found.flips,
        "errors": found.errors,
        "seconds": round(found.seconds, 1),
    }
    # Tuples become lists, so that the report equals the one that is read from the file.
    plain: dict[str, Any] = json.loads(json.dumps(report, default=str))
    return plain


def format_report(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a report of `build_report`."""
    copy = report["copy"]
    yield (
        f"copy: {copy['processes']} processes ({copy['layout']}), layers of the stages "
        f"{' '.join(map(str, copy['layers_of_stages']))}, {copy['parameters']:,} parameters"
    )
    yield f"data: {report['data']}"
    yield f"kept: {', '.join(report['kept']) or 'nothing, the run has one process'}"
    yield f"not kept: {', '.join(report['lost']) or 'nothing'}"
    yield f"never verified here: {NOT_VERIFIED}"
    yield f"\n{'comparison':<42} {'compared':>8} {'largest error':>13} {'bound':>8}"
    for row in report["comparisons"]:
        verdict = "  DIFFERS" * (not row["passed"])
        yield (
            f"{row['comparison']:<42} {row['compared']:>8} {float(row['error']):>13.1e} "
            f"{row['bound']:>8.1g}{verdict}"
        )
    yield ""
    for text in report["errors"]:
        yield f"error: {text}"
    for row in report["comparisons"]:
        if row["failure"] is not None:
            yield f"first difference of {row['comparison']}: {row['failure']}"
    if report["first_difference"] is not None:
        yield f"the first activation that differs: {report['first_difference']}"
    if report["float8_flips"] is not None:
        flipped, values = report["float8_flips"]
        yield (
            f"float8: in its first step, at least {flipped:,} of {values:,} values differ from "
            "those of one process, because other sums before them are rounded"
        )
    if report["note"] is not None:
        yield f"note: {report['note']}"
    if report["verified"]:
        yield f"verified in {report['seconds']:g} seconds: the copy equals one process"
    else:
        yield f"NOT verified after {report['seconds']:g} seconds: {report['failed']}"


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
