"""The part of the plan that is measured on fake GPUs: `tools/plan.py --dry-run`."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_bytes
from megatron.extras.planner.dry_run.process import (
    call_on_fake_gpu,
    choose_fake_kernels,
    choose_microbatches,
    list_rank_kinds,
    open_pool,
)
from megatron.extras.planner.dry_run.record import RankReport
from megatron.plan.run_plan import Plan


def run_dry(plan: Plan, microbatches: int | None, imbalance: float = 1.0) -> list[RankReport]:
    """Run a training step of a rank of each kind on fake GPUs.

    If ranks divide experts, the last report is that of the rank that needs most, with all tokens
    for its experts.

    Args:
        plan: A plan without errors.
        microbatches: Number of microbatches. None: as many as `choose_microbatches` returns.
        imbalance: Rows of a rank's experts, in multiples of the mean.

    Raises:
        ConfigError: The number of microbatches does not fit the plan, or there is no C++ compiler.
        TrainingError: The step fails on fake GPUs.
    """
    if microbatches is None:
        microbatches = choose_microbatches(plan)
    else:
        _check_microbatches(plan, microbatches)
    # The operators of a compiled graph run one by one on a fake GPU. A kernel that fuses them needs
    # less memory, so without compilation the memory is closer to the real one.
    # The compiler's choice of other kernels stays.
    plan = choose_fake_kernels(plan)
    kernels = replace(plan.config.kernels, use_torch_compile=False)
    plan = replace(plan, config=replace(plan.config, kernels=kernels))
    reports = run_ranks(plan, list_rank_kinds(plan), microbatches, imbalance)
    worst = plan.expert_size or 1
    if worst > 1:
        fullest = max(reports, key=lambda report: report.step.peak_bytes)
        reports += run_ranks(plan, [fullest.rank], microbatches, worst)
    return reports


def run_ranks(
    plan: Plan, ranks: Sequence[int], microbatches: int, imbalance: float = 1.0
) -> list[RankReport]:
    """Run a step of each rank, and return the reports in the order of `ranks`.

    Args:
        plan: A plan without errors.
        ranks: Ranks of the plan's world.
        microbatches: Number of microbatches of a step.
        imbalance: Rows of a rank's experts, in multiples of the mean.

    Raises:
        ConfigError: There is no C++ compiler, a process ended, or torch is too old for the flags.
        TrainingError: The step raised.
    """
    plan = choose_fake_kernels(plan)
    # The ranks are independent of each other, so each process takes the next one when it is free.
    # Each process takes some seconds to start, so there are no more than there is work.
    workers = min(len(ranks), len(os.sched_getaffinity(0)))
    others = set(multiprocessing.active_children())
    with open_pool(workers) as pool:
        try:
            steps = [
                pool.submit(call_on_fake_gpu, _run_one, plan, rank, microbatches, imbalance)
                for rank in ranks
            ]
            return [step.result() for step in steps]
        except BrokenProcessPool as error:
            raise ConfigError(
                f"--dry-run: a process of it ended ({error}); the host may be out of memory, so "
                "give --dry-run-microbatches a smaller number. If that does not help, a compiled "
                "file may be damaged: remove the folder megatron-3d in ~/.cache"
            ) from error
        except KeyboardInterrupt:
            # Leaving the pool would wait for the steps that run.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


def _run_one(plan: Plan, rank: int, microbatches: int, imbalance: float) -> RankReport:
    """Run a step of one rank in a process of the pool."""
    # Not at the top, because the guard must be loaded before torch is imported.
    from megatron.extras.planner.dry_run.fake_rank import run_rank

    return run_rank(plan, rank, microbatches, imbalance=imbalance)


def _check_microbatches(plan: Plan, microbatches: int) -> None:
    if microbatches < 1:
        raise ConfigError(f"--dry-run-microbatches {microbatches} must be at least 1.")
    if plan.stages_per_rank > 1 and microbatches % plan.pipeline_size:
        raise ConfigError(
            f"--dry-run-microbatches {microbatches} must be a multiple of "
            f"--pipeline-model-parallel-size {plan.pipeline_size}, because the stages are "
            f"interleaved. Use {plan.pipeline_size} or {2 * plan.pipeline_size}."
        )


def build_dry_run_json(reports: list[RankReport]) -> list[dict[str, Any]]:
    """Return the reports as plain data. Sizes are in bytes."""
    return [
        {
            "rank": report.rank,
            "coordinate": report.coordinate,
            "microbatches": report.microbatches,
            "expert_imbalance": report.imbalance,
            "peak_bytes": {**report.step.peak, "total": report.step.peak_bytes},
            "kept_bytes": report.step.kept,
            "collectives": _add_counts(report.step.collectives),
            "products": _add_counts(report.step.products),
            "synchronisations": _add_counts(report.step.synchronisations),
            "copies": _add_counts(report.step.copies),
        }
        for report in reports
    ]


def _add_counts(counted: dict[Any, int]) -> list[dict[str, Any]]:
    return [{**asdict(each), "count": count} for each, count in counted.items()]


def format_dry_run(plan: Plan, reports: list[RankReport]) -> list[str]:
    """Return the lines of the report: tables for each rank."""
    of_step = plan.get_num_microbatches(plan.batch_size.final)
    lines = ["", "Dry run: one training step on fake GPUs (docs/dry_run.md)"]
    if plan.config.parallel.deepspeed:
        lines.append("  The command has --deepspeed. This is the step of the native engine.")
    if plan.config.kernels.use_torch_compile:
        lines.append("  The command has --use-torch-compile. Nothing is compiled here.")
    for report in reports:
        step = report.step
        lines += [
            "",
            f"rank {report.rank} of {plan.world_size} ({report.coordinate}), "
            f"{report.microbatches} of {of_step} microbatches{_describe_loads(plan, report)}",
            *_format_memory(report),
        ]
        if any(each.left.startswith("float8") for each in step.products):
            lines += _format_counted(_PRODUCTS, step.products)
        if step.collectives:
            lines += _format_counted(_COLLECTIVES, step.collectives)
        else:
            # One rank sends nothing. A table with a head only would look like an error.
            lines.append("  no collectives")
        lines += _format_counted(_WAITS, step.synchronisations)
        lines += _format_counted(_COPIES, step.copies)
    return lines


def _describe_loads(plan: Plan, report: RankReport) -> str:
    size = plan.expert_size or 1
    if size == 1:
        return ""
    if report.imbalance == size:
        return ", all tokens for the experts of this rank (an upper bound)"
    if report.imbalance == 1:
        return ", experts in perfect balance"
    return f", {report.imbalance:g} times the mean number of tokens for its experts"


def _format_memory(report: RankReport) -> list[str]:
    rows = [("memory", "at the peak", "between steps")]
    rows += [
        (kind, _format_gib(size), _format_gib(report.step.kept[kind]))
        for kind, size in report.step.peak.items()
    ]
    kept = sum(report.step.kept.values())
    # Kinds have different peaks. These are their sizes at the peak of the sum.
    rows.append(("total", _format_gib(report.step.peak_bytes), _format_gib(kept)))
    return _format_table(rows)


def _format_gib(size: float) -> str:
    """Return a size as the rest of the plan does, and with digits for small models."""
    return f"{size / 2**30:,.4g} GiB"


_PRODUCTS = {"product of": "left", "and": "right", "result": "result"}
_COLLECTIVES = {
    "collective": "kind",
    "group": "group",
    "ranks": "ranks",
    "dtype": "dtype",
    "each": "size",
    "stream": "stream",
}
_WAITS = {"the host waits": "cause", "at": "line"}
_COPIES = {"copy": "direction", "at": "line", "each": "size", "waits": "blocking"}


def _format_counted(columns: dict[str, str], counted: dict[Any, int]) -> list[str]:
    """Return the table of what was counted.

    Args:
        columns: Head of a column -> the field that it shows.
        counted: What happened -> how often.
    """
    rows = [(*columns, "count")]
    for each, count in counted.items():
        cells = (_format_cell(field, getattr(each, field)) for field in columns.values())
        rows.append((*cells, str(count)))
    return _format_table(rows)


def _format_cell(field: str, value: Any) -> str:
    if field == "size":
        return format_bytes(value)
    if field == "blocking":
        return "yes" if value else "no"
    return str(value)


def _format_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return aligned lines of a table whose first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
