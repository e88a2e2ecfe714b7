"""The table at the start of a run, and the lines after it.

The table lists the device, the data, the kernels, the conventions and the checkpoints.
"""

import platform
from collections.abc import Sequence

import torch

from megatron.checkpoint.save import Saver
from megatron.config.tree import Config
from megatron.data.epochs import DatasetUse, describe_epochs, warn_of_many_epochs
from megatron.data.index_helpers import describe_implementation
from megatron.data.source import Sources
from megatron.engine.base import Engine
from megatron.observe.log_line import (
    format_first_start_line,
    format_from_scratch_line,
    format_loaded_checkpoint_line,
    format_no_checkpoint_line,
)
from megatron.observe.startup import format_start_table
from megatron.parallel.mesh import Mesh
from megatron.parallel.rank_progress import LONG_FACTOR
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
    plan = job.plan
    config = plan.config
    rows = [
        ("device", *describe_devices(mesh)),
        ("model", f"{plan.parameters:,} parameters", "with the padded vocabulary"),
        *describe_data(uses),
        *describe_source(sources),
        *describe_phases(plan),
        *describe_loss(plan),
        *engine.describe_choices(),
        *describe_hang_limits(config.parallel.hang_timeout),
        ("index helpers", *describe_index_helpers()),
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
        reporter.log(format_first_start_line())
        reporter.log(format_no_checkpoint_line(config.checkpoint.load))
        reporter.log(format_from_scratch_line())
    for note in sources.take_notes():
        reporter.log(note)
    for warning in (*warn_of_many_epochs(uses), *warn_of_slow_precision(config, mesh)):
        reporter.log(f"warning: {warning}")


def get_device_name(device: torch.device) -> str:
    """Return the product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def describe_devices(mesh: Mesh) -> tuple[str, str]:
    """Return the second and third cell of the row "device" in the table at the start."""
    grid = mesh.grid
    if grid.world_size > 1:
        layout = str(grid)
    else:
        layout = "one process"
    if mesh.backend:
        backend = f", {mesh.backend}"
    else:
        backend = ""
    return f"{grid.world_size} x {get_device_name(mesh.device)}", f"{layout}{backend}"


def warn_of_slow_precision(config: Config, mesh: Mesh) -> list[str]:
    """Return a warning if a CPU computes in 16 bits. Most CPUs are faster in fp32."""
    precision = config.precision
    if mesh.device.type != "cpu" or not (precision.bf16 or precision.fp16):
        return []
    name = "bf16" if precision.bf16 else "fp16"
    return [
        f"no GPU was found, and --{name} computes on the CPU: most CPUs are faster with "
        f"--no-{name}, in fp32"
    ]


def describe_data(uses: Sequence[DatasetUse]) -> list[tuple[str, str, str]]:
    """Return the row "training data" of the table at the start, or no row without such data."""
    if not uses:
        return []
    epochs, _, tokens = describe_epochs(uses).partition(": ")
    return [("training data", epochs, tokens)]


def describe_source(sources: Sources) -> list[tuple[str, str, str]]:
    """Return the row "training data" for data that describe themselves, or no row."""
    described = None if sources.train is None else sources.train.describe()
    if described is None:
        return []
    return [("training data", *described)]


def describe_phases(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row "data phases" of the table at the start, or no row without phases."""
    if not plan.data_phases:
        return []
    number = sum(planned.started for planned in plan.data_phases)
    begin = ", ".join(str(planned.first_iteration) for planned in plan.data_phases)
    return [
        ("data phases", f"phase {number} of {len(plan.data_phases)}", f"first iterations {begin}")
    ]


def describe_loss(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row "loss" of the table at the start, or no row if no token can be masked."""
    described = plan.describe_loss_mean()
    if described is None:
        return []
    mean, why = described
    return [("loss", f"mean {mean}", why)]


def describe_index_helpers() -> tuple[str, str]:
    """Return the second and third cell of the row "index helpers" in the table at the start."""
    # The description has the form "name (reason)".
    name, _, why = describe_implementation().partition(" (")
    return name, why.removesuffix(")") or "built with this installation"


def describe_hang_limits(hang_timeout: float | None) -> list[tuple[str, str, str]]:
    """Return the row of the start table for --hang-timeout, if it is given."""
    # Without a limit there is nothing to explain.
    if hang_timeout is None:
        return []
    return [
        (
            "hang limit",
            f"{format_duration(hang_timeout)} for a step",
            f"{format_duration(LONG_FACTOR * hang_timeout)} for a save, a load, and the first step "
            "or evaluation",
        )
    ]
