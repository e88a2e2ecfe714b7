"""Verify that a training command computes what one process computes, before it runs.

    python tools/verify.py --world-size 384 -- <arguments of pretrain_gpt.py>
    python tools/verify.py --world-size 8 --config run.yaml
    python tools/verify.py train/my-run/my-run.slurm --report verification.json
    python tools/verify.py --compare step.json --weights runs/imported
    python tools/verify.py --types --world-size 16384 -- <arguments of pretrain_gpt.py>

The tool makes a reduced copy of the run, with at most 8 processes on this machine (--processes). It
needs no GPU.
The copy has the stages, the sharding, the masks, the optimizer and the schedules of the run, with
small sizes. It trains three steps, with a resume between them. A reference of one process trains
the same steps. Data, weights, gradients and moments of all ranks are compared.

With --compare, it compares one step that another trainer has recorded with the same step here, and
names the first number that differs. docs/verify.md has the form of the file.

With --types, it types one training step at the real size, on fake GPUs. Some ranks are run, and
every gradient and sum must be added up over the right ranks, once.

Exit code 0 means that the copy equals the reference. Exit code 1 means that it differs. Exit code 2
means that the command has errors, or cannot be verified. Exit code 5 means that a launch of the
copy had too little time (--time-limit), and that nothing was seen to differ.
"""

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.base import exit_codes
from megatron.base.errors import ConfigError, combine_errors
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.commands.parts import choose_parts
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_source import (
    explain_errors,
    read_source,
    rename_document,
    split_arguments,
    write_documents,
)
from megatron.plan.resolve import RANKS_PER_NODE, resolve
from megatron.plan.rules.layout import WORLD_SIZE
from megatron.plan.run_plan import Plan
from megatron.run.start.launch import hide_from_collector


@dataclass(frozen=True)
class VerifyArguments:
    """The arguments of this tool. All others belong to pretrain_gpt.py.

    The training arguments may follow '--' or be mixed with these. A .slurm, .sh or .yaml file may
    come first.
    """

    world_size: int | None = None
    """Number of processes (devices) of the run. Default: the number that the script or launcher
    asks for."""
    report: Path | None = None
    """Write the report to this JSON file. A run keeps it with --verification FILE."""
    json: bool = False
    """Print the report as JSON instead of text."""
    time_limit: float | None = None
    """Seconds that each launch of the copy may take. Default: 120, or more if the copy has more
    processes than this machine has idle cores."""
    ranks_per_node: int | None = None
    """Ranks of a node of the run, which --sharding-strategy hsdp shards over. Default: the ranks
    that the script starts on a node, otherwise 8."""
    processes: int | None = None
    """Most processes of the copy. Default: 8. With 12, a copy with tensor and data parallelism has
    a third stage."""
    script_args: str = ""
    """Arguments of the script in one text, as in "8B 4 1e-5"."""
    compare: Path | None = None
    """A JSON file with one step of another trainer, to compare with ours."""
    weights: Path | None = None
    """The checkpoint with the weights of that step, as tools/convert_checkpoint.py imports it."""
    types: bool = False
    """Check types at the real size instead of the numbers of a copy. It needs spmd_types."""
    bound: float = 1e-3
    """Largest relative difference of a number, with --compare. A step in bf16 needs about 0.05."""


def main(argv: list[str] | None = None) -> int:
    """Verify the command in `argv` (default: the command line), and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    own, training = split_arguments(words, VerifyArguments)
    options = parse_arguments(VerifyArguments, args=own, prog="verify.py", description=__doc__)
    if options.compare is not None or options.weights is not None:
        return run_tool(lambda: _compare(options, training))
    if options.types:
        return run_tool(lambda: _check_types(options, training))
    return run_tool(lambda: _verify(options, training))


def train(argv: list[str]) -> None:
    """Run a training command line on this rank."""
    from megatron.run.pretrain import pretrain
    from megatron.run.start.launch import read_launch

    loaded = load_config(argv)
    pretrain(read_launch(loaded, choose_parts(loaded.config)))


def preload() -> None:
    """Import what the ranks need, so that forked ranks start without imports."""
    with hide_from_collector():
        import megatron.engine.native
        import megatron.engine.pipeline_runner
        import megatron.engine.sharding
        import megatron.run.pretrain  # noqa: F401


def resolve_command(options: VerifyArguments, training: list[str]) -> tuple[Plan, list[str]]:
    """Return the plan of a training command, and notes on how it was read.

    Raises:
        ConfigError: The command cannot be read, or its plan has errors.
    """
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world-size {options.world_size} must be at least 1.")
    source = read_source(training, script_args=options.script_args)
    with write_documents(source) as paths:
        # A script may write files, such as DeepSpeed's JSON, before it starts training.
        arguments = [rename_document(word, paths) for word in source.arguments]
        try:
            loaded = load_config(arguments, prog="verify.py")
        except ConfigError as failure:
            _, *listed = str(failure).split("\n  - ")
            raise combine_errors(
                explain_errors(source, listed or [str(failure)], VerifyArguments)
            ) from None
        world_size = options.world_size or source.world_size
        if world_size is None:
            raise ConfigError(
                "the number of processes is not known. Give it, as in --world-size 64."
            )
        plan = resolve(
            loaded.config,
            world_size,
            {**loaded.origin, WORLD_SIZE: "--world-size"},
            # With --load the position is in a checkpoint, and a copy starts from scratch.
            consumed_samples=0 if loaded.config.checkpoint.load is None else None,
            ranks_per_node=options.ranks_per_node or source.ranks_per_node or RANKS_PER_NODE,
        )
    if plan.errors:
        raise combine_errors(explain_errors(source, plan.errors, VerifyArguments))
    return replace(plan, errors=()), [*source.notes, *source.warnings]


def _compare(options: VerifyArguments, training: list[str]) -> int:
    """Compare a recorded step with ours."""
    if training:
        raise ConfigError(f"{training[0]} has no meaning with --compare. Leave it out.")
    if options.compare is None or options.weights is None:
        raise ConfigError("--compare and --weights need each other.")
    if not 0 < options.bound < math.inf:
        raise ConfigError(f"--bound {options.bound:g} must be above 0.")
    # These import torch, see `_verify`.
    from megatron.checkpoint.load import open_checkpoint
    from megatron.console.checkpoint_path import locate_checkpoint
    from megatron.extras.planner.verify import recorded_step

    step = recorded_step.read_step(options.compare)
    checkpoint = open_checkpoint(*locate_checkpoint(options.weights))
    found = recorded_step.compare_step(step, checkpoint, options.bound)
    show = recorded_step.build_json if options.json else recorded_step.describe_step
    print_line(show(found))
    return exit_codes.SUCCESS if found.first is None else exit_codes.FOUND


def _resolve_run(options: VerifyArguments, training: list[str]) -> Plan:
    """Return the plan of the run, and print how it was read."""
    if options.report is not None and not options.report.parent.is_dir():
        # Otherwise the minutes of the verification would be lost.
        raise ConfigError(f"--report {options.report}: its folder does not exist.")
    plan, notes = resolve_command(options, training)
    # Standard output has the report only.
    for note in notes:
        print_to_stderr(f"note: {note}")
    return plan


def _print_report(options: VerifyArguments, report: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the report in the form that was asked for, and write it."""
    if options.report is not None:
        options.report.write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print_line(json.dumps(report, indent=1))
    else:
        print_line("\n".join(lines))


def _check_types(options: VerifyArguments, training: list[str]) -> int:
    """Type a step of the run at its real size."""
    if options.time_limit is not None:
        raise ConfigError("--time-limit has no effect with --types. Leave it out.")
    if options.processes is not None:
        raise ConfigError("--processes has no effect with --types. Leave it out.")
    # These import torch, see `_verify`.
    from megatron.extras.planner.types.check import (
        build_types_report,
        check_in_processes,
        format_types_report,
        require_spmd_types,
    )

    require_spmd_types()
    plan = _resolve_run(options, training)
    check = check_in_processes(plan)
    report = build_types_report(plan, check)
    _print_report(options, report, format_types_report(report))
    return exit_codes.SUCCESS if check.passed else exit_codes.FOUND


def _verify(options: VerifyArguments, training: list[str]) -> int:
    if options.time_limit is not None and not 0 < options.time_limit < math.inf:
        raise ConfigError(f"--time-limit {options.time_limit:g} must be above 0 seconds.")
    # A smaller copy would lack features that all reports are expected to have.
    if options.processes is not None and options.processes < 8:
        raise ConfigError(
            f"--processes {options.processes} must be at least 8, which two stages with tensor and "
            "data parallelism need. A smaller run has a smaller copy."
        )
    plan = _resolve_run(options, training)
    # These import torch, which takes seconds. An error above does not need it.
    from megatron.extras.planner.verify.reduction import MOST_PROCESSES
    from megatron.extras.planner.verify.report import build_report, format_report
    from megatron.extras.planner.verify.verification import verify

    preload()
    most = options.processes or MOST_PROCESSES
    found = verify(plan, train, print_to_stderr, options.time_limit, most)
    report = build_report(plan, found)
    _print_report(options, report, format_report(report))
    if report["verified"]:
        return exit_codes.SUCCESS
    # A difference is a verdict, whatever the time.
    if found.out_of_time and all(row.passed for row in found.rows):
        return exit_codes.OUT_OF_TIME
    return exit_codes.FOUND


if __name__ == "__main__":
    sys.exit(main())
