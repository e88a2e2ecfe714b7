"""The table at the start of a run, and the lines after it.

The table lists the device, the data, the kernels, the conventions and the checkpoints.
"""

import platform
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron.checkpoint.save import Saver
from megatron.config.parallel import ParallelConfig
from megatron.data.epochs import DatasetUse, describe_epochs, warn_about_many_epochs
from megatron.data.index_helpers import describe_implementation
from megatron.data.source import Sources
from megatron.engine.base import Engine
from megatron.observe.log_line import (
    FIRST_START_LINE,
    FROM_SCRATCH_LINE,
    format_loaded_checkpoint_line,
    format_no_checkpoint_line,
)
from megatron.parallel.mesh import Mesh
from megatron.parallel.rank_progress import (
    FIRST_SECONDS,
    LONG_FACTOR,
    PART_SECONDS,
    PHASE_SECONDS,
    SLOWEST_FACTOR,
)
from megatron.plan.run_plan import Plan
from megatron.run.report import Reporter
from megatron.run.start.job import Job
from megatron.schedule.clock import format_duration


def print_start(
    job: Job,
    mesh: Mesh,
    engine: Engine,
    sources: Sources,
    uses: Sequence[DatasetUse],
    reporter: Reporter,
    saver: Saver | None,
) -> None:
    """Print the table, where the run starts from, and the warnings about its data and device.

    Args:
        job: The plan, and the checkpoint that the run starts from.
        mesh: The ranks.
        engine: It describes its choices of kernels.
        sources: The data.
        uses: The training data and how much of them the run reads. Empty if that is not known.
        reporter: It prints.
        saver: It describes the size of a checkpoint. None if nothing is saved.
    """
    config = job.plan.config
    rows = [
        *_list_device_and_data(job.plan, mesh, sources, uses),
        *engine.describe_choices(),
        *_list_limits_and_helpers(config.parallel, job.plan.world_size),
        *reporter.describe_conventions(),
    ]
    if saver is not None:
        rows.append(
            ("checkpoints", *saver.describe(engine.shards(optimizer=config.checkpoint.save_optim)))
        )
    reporter.log(format_start_table(rows))
    if job.checkpoint is not None:
        reporter.log(
            format_loaded_checkpoint_line(str(config.checkpoint.load), job.checkpoint.iteration)
        )
    elif config.checkpoint.load is not None:
        reporter.log(FIRST_START_LINE)
        reporter.log(format_no_checkpoint_line(config.checkpoint.load))
        reporter.log(FROM_SCRATCH_LINE)
    for note in sources.take_notes():
        reporter.log(note)
    warnings = warn_about_many_epochs(uses)
    # Most CPUs are faster in fp32.
    for name in ("bf16", "fp16"):
        if mesh.device.type == "cpu" and getattr(config.precision, name):
            warnings.append(
                f"no GPU was found, and --{name} computes on the CPU: most CPUs are faster with "
                f"--no-{name}, in fp32"
            )
    for warning in warnings:
        reporter.log(f"warning: {warning}")


def format_start_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Format (what, choice, why) rows as one aligned block of lines.

    Each row gives its reason, so that a user sees why a slow implementation was chosen.

    >>> rows = [("attention", "sdpa", "torch's flash kernel"), ("norm", "torch", "no apex")]
    >>> print(format_start_table(rows))
     in use    | choice | why
     attention | sdpa   | torch's flash kernel
     norm      | torch  | no apex
    """
    table = [("in use", "choice", "why"), *rows]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return "\n".join(
        f" {what:<{widths[0]}} | {choice:<{widths[1]}} | {why}" for what, choice, why in table
    )


def get_device_name(device: torch.device) -> str:
    """Return the product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _list_device_and_data(
    plan: Plan, mesh: Mesh, sources: Sources, uses: Sequence[DatasetUse]
) -> Iterator[tuple[str, str, str]]:
    """Yield the rows about the ranks, the size of the model, the data and the loss."""
    grid = mesh.grid
    layout = str(grid) if grid.world_size > 1 else "one process"
    if mesh.backend:
        layout += f", {mesh.backend}"
    yield "device", f"{grid.world_size} x {get_device_name(mesh.device)}", layout
    yield "model", f"{plan.parameters:,} parameters", "with the padded vocabulary"
    model = plan.config.model
    if model.num_experts is not None and plan.expert_size is not None:
        choice = f"{model.moe_router_topk} of {model.num_experts} for a token"
        share = f"{model.num_experts // plan.expert_size} on a rank"
        yield "experts", choice, f"{share}, expert parallel {plan.expert_size}"
    if uses:
        epochs, _, tokens = describe_epochs(uses).partition(": ")
        yield "training data", epochs, tokens
    described = None if sources.train is None else sources.train.describe()
    if described is not None:
        yield "training data", *described
    if plan.data_phases:
        number = sum(planned.started for planned in plan.data_phases)
        begin = ", ".join(str(planned.first_iteration) for planned in plan.data_phases)
        phases = f"phase {number} of {len(plan.data_phases)}"
        yield "data phases", phases, f"first iterations {begin}"
    # Without masked tokens, the mean has no choice.
    if (loss := plan.describe_loss_mean()) is not None:
        yield "loss mean", f"mean {loss[0]}", loss[1]


def _list_limits_and_helpers(
    parallel: ParallelConfig, world_size: int
) -> Iterator[tuple[str, str, str]]:
    """Yield the rows about --hang-timeout and the helpers of the index."""
    hang_timeout = parallel.hang_seconds
    # A single process has nobody to compare itself with, and no limit without a number.
    if parallel.hang_timeout == "auto" and world_size > 1:
        yield (
            "hang limit",
            f"auto: {SLOWEST_FACTOR:g} x the slowest so far + {PART_SECONDS:g} s in a step, "
            f"+ {PHASE_SECONDS:g} s elsewhere",
            f"{format_duration(FIRST_SECONDS)} for the first of a kind, the start, a compilation "
            "or recording of graphs, while a rank works; a warning at the limit, the end at twice",
        )
    if hang_timeout is not None:
        yield (
            "hang limit",
            f"{format_duration(hang_timeout)} for a step",
            f"{format_duration(LONG_FACTOR * hang_timeout)} for a save, a load, and the first step "
            "or evaluation",
        )
    # The description has the form "name (reason)".
    name, _, why = describe_implementation().partition(" (")
    yield "index helpers", name, why.removesuffix(")") or "built with this installation"
