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
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_bytes, make_plain, print_line, print_to_stderr
from megatron.commands.parts import load_command_line
from megatron.console.parse import parse_arguments, split_at_double_dash
from megatron.console.run_tool import run_tool
from megatron.extras.object_store.objects import find_address
from megatron.extras.operations.handover import rehearsal
from megatron.extras.operations.handover.comparison import HandoverComparison, compare_steps
from megatron.extras.operations.handover.record import (
    RecordedSteps,
    Step,
    TooFewStepsError,
    read_recorded_steps,
)

_ROW = "{:>9}  {:<26} {:>14} {:>14} {:>9} {:>8}"


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
    """Log with Megatron's lines, if the checkpoint was imported from another trainer, or its folder
    of TensorBoard events. The numbers in it are compared."""
    scratch: Path | None = None
    """Folder for the records of the rehearsal, which are removed at its end. Several nodes must
    share it. Default: a folder in memory."""
    time_limit: float | None = None
    """Seconds that the command may take. Default: no limit."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True)
class Answer:
    """What a rehearsal has found."""

    record: RecordedSteps
    trained: rehearsal.Rehearsal
    comparison: HandoverComparison

    @property
    def verdict(self) -> str:
        """`go`, or why the run should not go on."""
        first, code = self.comparison.first, self.trained.code
        if first is not None:
            return f"no go: iteration {first.iteration}, {first.name}"
        if code is None:
            return "no verdict: the command had too little time"
        absent = min(self.record.steps.keys() - self.trained.steps.keys(), default=None)
        if code != 0:
            output = self.trained.output or ["It printed nothing."]
            at = next((n for n, line in enumerate(output) if "error: " in line.lower()), -1)
            # A list follows a line that ends with a colon.
            reason = " ".join(output[at:][: 1 + output[at].endswith(":")])
            before = f" before iteration {absent}" * (absent is not None)
            return f"no go: the command ended with exit code {code}{before}. {reason}"
        if absent is not None:
            return f"no go: the command trains no iteration {absent}, which the run has trained"
        return "go"

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of the answer."""
        found = self.comparison
        if not self.record.start:
            yield "the run has no record of its start, so settings and versions were not compared"
        for name, (before, now) in found.changes.items():
            yield make_plain(f"changed: {name} {before or 'unset'} -> {now or 'unset'}")
        yield _ROW.format("iteration", "quantity", "recorded", "now", "differs", "bound")
        for each in found.quantities:
            # What is equal is shown for loss and norm alone.
            if not each.passed or each.name in ("loss", "gradient norm"):
                values = [_format(value) for value in (each.recorded, each.found)]
                values += [f"{number:.1e}" for number in (each.difference, each.bound)]
                row = _ROW.format(each.iteration, each.name, *values)
                yield row + "  DIFFERS" * (not each.passed)
        if found.drift:
            yield f"the perturbed rehearsal drifted by up to {max(found.drift.values()):.1e}"
        if found.missing:
            yield f"not compared, because only one of both recorded it: {', '.join(found.missing)}"
        yield f"record:    {_describe_speed(self.record.steps)}"
        yield f"rehearsal: {_describe_speed(self.trained.steps)}"
        yield self.verdict

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        found = self.comparison
        return {
            "verdict": self.verdict,
            "from": self.record.iteration,
            "changes": found.changes,
            "not_compared": found.missing,
            "drift": max(found.drift.values(), default=None),
            "quantities": [vars(each) for each in found.quantities],
        }


def _format(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _describe_speed(steps: Mapping[int, Step]) -> str:
    """Return the time of a step and the memory. The first step of a launch is slower."""
    times = [float(each["seconds"]) for each in steps.values() if "seconds" in each]
    if not times:
        return "no times"
    text = f"{statistics.median(times[1:] or times):.3g} s for a step"
    peaks = [each["peak_memory_bytes"] for each in steps.values() if each.get("peak_memory_bytes")]
    if peaks:
        text += f", {format_bytes(max(peaks))} of GPU memory"
    return text


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
    if options.time_limit is not None and not 0 < options.time_limit < math.inf:
        raise ConfigError(f"--time-limit {options.time_limit:g} must be above 0 seconds.")
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
    if record.config.batch.train_time is not None:
        raise ConfigError("the run has --train-time, so its learning rate depends on the speed.")
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
