"""The report of a verification as plain data, and as text."""

import json
import math
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.base.code_version import get_code_version
from megatron.config.fields import all_fields, flatten
from megatron.extras.planner.verify.verification import VerifiedRun
from megatron.plan.run_plan import Plan

NOT_VERIFIED = (
    "kernels and arithmetic of GPUs, NCCL, and effects that only large sizes have, such as "
    "overflows, memory and speed"
)


def describe_layout(plan: Plan) -> str:
    """Return the sizes of a copy's axes as text."""
    grid = plan.grid
    text = f"tensor {grid.tensor} x pipeline {grid.pipeline} x data {grid.data}"
    return f"{text} x context {grid.context}" if grid.context > 1 else text


def build_report(plan: Plan, found: VerifiedRun) -> dict[str, Any]:
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
            "torch": torch.__version__,
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
        verdict = "" if row["passed"] else "  DIFFERS"
        yield (
            f"{row['comparison']:<42} {row['compared']:>8} {float(row['error']):>13.1e} "
            f"{row['bound']:>8.1g}{verdict}"
        )
    yield ""
    for error in report["errors"]:
        yield f"error: {error}"
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
