r"""Rehearse a change of a run: train recorded steps again with the new command, and compare them.

    python tools/handover.py RUN --from 8400 --steps 5 -- \
        torchrun --nproc-per-node 8 pretrain_gpt.py $ARGUMENTS

RUN is the --save folder of the run, or its address. The command loads the checkpoint of iteration
8400 and trains 5 steps. The run's folder is not changed, and the run may train meanwhile. Nothing
is saved.

Exit code 0 means go. 1 means that a number differs, or that the command failed. 2 means an error in
the arguments. 3 means that the run has too few recorded steps after a checkpoint. 5 means that the
command had too little time.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.commands.parts import load_command_line
from megatron.config.tree import Config
from megatron.console.parse import parse_arguments, split_at_double_dash
from megatron.console.run_tool import run_tool
from megatron.extras.object_store.objects import find_address
from megatron.extras.operations.handover import rehearsal
from megatron.extras.operations.handover.comparison import compare_steps
from megatron.extras.operations.handover.record import TooFewStepsError, read_recorded_steps
from megatron.extras.operations.handover.report import Answer


@dataclass(frozen=True)
class HandoverArguments:
    """The arguments before '--'. The command of the run follows it."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's --save folder, or its s3:// address."""
    from_: Annotated[int | None, tyro.conf.arg(name="from")] = None
    """Iteration of the checkpoint. Default: the newest one with enough recorded steps after it."""
    steps: int = 5
    """Iterations to train again."""
    log: Path | None = None
    """Log with Megatron's lines, if the checkpoint was imported from another trainer. The numbers
    in it are compared."""
    scratch: Path | None = None
    """Folder for the records of the rehearsal, which are removed at its end. Several nodes must
    share it. Default: a folder in memory."""
    time_limit: float | None = None
    """Seconds that the command may take. Default: no limit."""
    json: bool = False
    """Print the answer as JSON."""


def main(argv: list[str] | None = None) -> int:
    """Rehearse the handover that `argv` describes, and return the exit code."""
    own, command = split_at_double_dash(argv)
    options = parse_arguments(HandoverArguments, args=own, prog="handover.py", description=__doc__)
    return run_tool(lambda: _hand_over(options, command or []))


def _hand_over(options: HandoverArguments, command: Sequence[str]) -> int:
    """Train again, compare, and print the answer.

    Raises:
        MegatronError: The arguments have an error, or the run cannot be read.
    """
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} must be 1 or more.")
    if options.scratch is not None and not options.scratch.is_dir():
        raise ConfigError(f"--scratch {options.scratch} is no folder. Create it first.")
    # Mistakes are reported before the command starts.
    arguments = command[rehearsal.find_program(command) :]
    config = load_command_line(arguments, "handover.py").config
    run = find_address(options.run) or str(options.run.absolute())
    try:
        with _open_records(run) as root:
            record = read_recorded_steps(root, options.from_, options.steps, options.log)
    except TooFewStepsError as reason:
        print_to_stderr(f"not rehearsed: {reason}")
        return exit_codes.NOT_DONE
    _refuse_clock(record.config)
    with rehearsal.ScratchFolder(options.scratch) as scratch:
        rehearsal.link_index_caches(config.data, scratch.path / "index")
        same = (scratch, command, record, run, options.time_limit)
        found = rehearsal.rehearse(*same)
        answer = Answer(record, found, compare_steps(record, found.steps, found.changes))
        first = answer.comparison.first
        precision = record.config.precision
        # An amplifying run drifts by more than one rounding error.
        if first is not None and first.bound and (precision.bf16 or precision.fp16):
            print_to_stderr("a second rehearsal shows how far one changed bit drifts")
            other = rehearsal.rehearse(*same, "perturbed").steps
            compared = compare_steps(record, found.steps, found.changes, other)
            answer = Answer(record, found, compared)
    if options.json:
        print_line(json.dumps(answer.to_json(), indent=1))
    else:
        print_line("\n".join(answer.format_lines()))
    if answer.verdict == "go":
        return exit_codes.SUCCESS
    if answer.comparison.first is None and found.code is None:
        return exit_codes.OUT_OF_TIME
    return exit_codes.FOUND


def _refuse_clock(config: Config) -> None:
    """Refuse a run whose learning rate follows the clock.

    Raises:
        ConfigError: It does.
    """
    if config.batch.train_time is not None:
        raise ConfigError(
            f"the run has --train-time {config.batch.train_time}, so its learning rate depends on "
            "the speed, and its steps cannot be trained again."
        )


@contextlib.contextmanager
def _open_records(run: str) -> Iterator[Path]:
    """Return the folder of a run, or a temporary mirror of the records at an address."""
    address = find_address(run)
    if address is None:
        yield Path(run)
        return
    # It imports torch, which a folder does not need.
    from megatron.extras.object_store.addresses import open_for_change

    with open_for_change(address, print_to_stderr, dry_run=True) as (root, _):
        yield root


if __name__ == "__main__":
    sys.exit(main())
