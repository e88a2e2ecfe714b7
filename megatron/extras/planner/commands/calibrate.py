"""Write a hardware file for tools/plan.py, from a micro-benchmark or from measured runs.

    python tools/calibrate.py mine.yaml                             # half a minute on this device
    torchrun --nproc-per-node 8 tools/calibrate.py mine.yaml --base h100     # also its links
    python tools/calibrate.py mine.yaml --base mine.yaml --run RUN --world-size 64 -- <...>
    python tools/calibrate.py other.yaml --base h100 --seconds 12.3 --world-size 64 -- <...>

The micro-benchmark measures a large matrix product, a copy in memory and, with several ranks, an
all-reduce. A measured run changes only the share of the peak that matrix products reach, so that
the predicted step has the measured time. After '--' follows the training command.

A file that exists is changed only if --base names it. It keeps the values that are not measured.
The file is used with tools/plan.py --hardware mine.yaml.
"""

import math
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import tyro
import yaml

from megatron.base.durable import replace_file
from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import iterate_lines
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.console.parse import parse_arguments, split_at_double_dash
from megatron.console.run_tool import run_tool
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.operations.chronicle.records import iterate_objects
from megatron.extras.planner.commands.plan_source import read_source
from megatron.extras.planner.cost.calibration import (
    Measured,
    build_measured_hardware,
    fit_gemm_share,
)
from megatron.extras.planner.cost.hardware import Hardware, load_hardware
from megatron.extras.planner.prediction import describe_software, predict_plan
from megatron.plan.resolve import resolve
from megatron.plan.rules.layout import WORLD_SIZE

_SKIPPED = 10
"""First steps of a run that are left out: they compile and allocate."""
_SHOWN_DAMAGED = 10
"""Messages about damaged lines of a run that are printed."""


@dataclass(frozen=True)
class CalibrateArguments:
    """The command line."""

    output: Annotated[Path, tyro.conf.Positional]
    """The hardware file to write."""
    base: str | None = None
    """Hardware whose other values are kept: a name or a file. Default: the file describes this
    device alone, with placeholders for its network."""
    run: Path | None = None
    """A --save folder with metrics.jsonl. The measured time is the median of its steps with the
    final batch size, without the first 10."""
    seconds: float | None = None
    """Measured seconds of a step, instead of --run."""
    world_size: int | None = None
    """Number of devices of the measured run. Default: the number that the script asks for."""


def main(argv: list[str] | None = None) -> int:
    """Write the hardware file of `argv` and return the exit code."""
    own, training = split_at_double_dash(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(
        CalibrateArguments, args=own, prog="calibrate.py", description=__doc__
    )
    return run_tool(lambda: calibrate(options, training or []))


def calibrate(options: CalibrateArguments, training: list[str]) -> int:
    """Write the file and return the exit code.

    Raises:
        ConfigError: The arguments contradict each other, or the run cannot be predicted.
        DataError: The run has no steps.
        OSError: The file cannot be written.
    """
    # A mistake is reported before half a minute of measurements.
    base = None if options.base is None else load_hardware(options.base)
    _check_output(options)
    if options.run is not None or options.seconds is not None:
        hardware = _fit_run(options, training, base)
    elif training or options.world_size is not None:
        raise ConfigError(
            "--world-size and a training command describe a measured run; give --run or --seconds "
            "too. Leave them out to measure this device."
        )
    else:
        hardware = _measure_device(base, options.output.stem)
    hardware = replace(hardware, name=options.output.stem)
    # All ranks of torchrun measure, and one of them writes.
    if int(os.environ.get("RANK", "0")) == 0:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.output, format_hardware(hardware))
        print_line(f"wrote {options.output}")
    return 0


def _check_output(options: CalibrateArguments) -> None:
    """Raise ConfigError if something would be lost that is not the base of the new file."""
    output = options.output
    if not output.exists():
        return
    if not output.is_file():
        raise ConfigError(f"{output} is not a file; give the hardware file to write.")
    if options.base is None or Path(options.base).resolve() != output.resolve():
        raise ConfigError(
            f"{output} exists, and its values would be lost. Give --base {output} to keep those "
            "that are not measured, or another name for the new file."
        )


def format_hardware(hardware: Hardware) -> str:
    """Return the text of a hardware file."""
    # More digits than a measurement has would only look exact.
    values = {
        name: value if isinstance(value, str | int) else float(f"{value:.4g}")
        for name, value in asdict(hardware).items()
        # A device without a base has no peak for fp32.
        if value is not None
    }
    ordered = {field.name: values[field.name] for field in fields(Hardware) if field.name in values}
    return yaml.safe_dump(ordered, sort_keys=False)


def _fit_run(options: CalibrateArguments, training: list[str], base: Hardware | None) -> Hardware:
    """Return the base with the share of the peak that explains a measured step."""
    if base is None:
        raise ConfigError(
            "--base is required with --run and --seconds; name the devices of the run."
        )
    if options.run is not None and options.seconds is not None:
        raise ConfigError("--run and --seconds both give the time of a step; give one of them.")
    if not training:
        raise ConfigError(
            "the training command of the measured run is missing; give it after '--'."
        )
    source = read_source(training)
    world_size = options.world_size
    if world_size is None:
        world_size = source.world_size
    if world_size is None:
        raise ConfigError(
            "--world-size is required, because the command does not have the number of devices."
        )
    if world_size < 1:
        raise ConfigError(f"--world-size {world_size} must be at least 1.")
    loaded = load_config(list(source.arguments), prog="calibrate.py")
    origin = {**loaded.origin, WORLD_SIZE: "--world-size"}
    plan = resolve(loaded.config, world_size, origin, ranks_per_node=base.ranks_per_node)
    plan.raise_on_errors()
    if not describe_software(plan, base).half:
        # gemm_share is that of Tensor Cores, and fp32 does not use them.
        raise ConfigError(
            "the run is in fp32, whose share of the peak says nothing about bf16; calibrate with a "
            "run in bf16 or fp16."
        )
    if options.run is None:
        assert options.seconds is not None, "one of them is given"
        measured = options.seconds
        if not 0 < measured < math.inf:
            raise ConfigError(f"--seconds {measured} must be above 0 and finite.")
    else:
        measured = read_median_seconds(options.run, plan.batch_size.final)
    before = predict_plan(plan, base)
    fitted = fit_gemm_share(before.job, measured)
    print_line(
        f"step: {measured:.4g} s measured, {before.seconds:.4g} s predicted with {base.name}; "
        f"gemm_share {base.gemm_share:.3f} -> {fitted.gemm_share:.3f}"
    )
    return fitted


def read_median_seconds(run: Path, batch_size: int) -> float:
    """Return the median seconds of a run's steps with this batch size.

    Raises:
        DataError: The metrics file is missing or has no such steps.
    """
    path = run / "metrics.jsonl"
    damaged: list[str] = []
    seconds = []
    try:
        for record in iterate_objects(path, iterate_lines(path), damaged):
            value = record.get("seconds")
            # A boolean is an integer in Python. A comparison with NaN is False.
            if record.get("global_batch_size") != batch_size or isinstance(value, bool):
                continue
            if isinstance(value, int | float) and 0 < value < math.inf:
                seconds.append(float(value))
    except OSError as failure:
        raise DataError(f"{path}: {failure.strerror}; give the --save folder of a run.") from None
    # A killed run may leave half a line.
    for message in damaged[:_SHOWN_DAMAGED]:
        print_to_stderr(f"warning: {message}")
    steady = seconds[_SKIPPED:]
    if not steady:
        raise DataError(
            f"{path}: {len(seconds)} steps have batch size {batch_size}, and the first {_SKIPPED} "
            "are left out; let the run train longer."
        )
    return median(steady)


def _measure_device(base: Hardware | None, name: str) -> Hardware:
    """Return the hardware that a micro-benchmark finds on this device."""
    # torch is slow to import, and a fit to a run does not need it.
    from megatron.extras.planner.device_benchmark import measure_device

    measured: Measured = measure_device()
    for label, value, unit in (
        ("matrix product", measured.tflops, "TFLOPs"),
        ("memory", measured.memory_tb_per_second, "TB/s"),
        ("all-reduce", measured.ring_gb_per_second, "GB/s of a device"),
    ):
        if value is not None and int(os.environ.get("RANK", "0")) == 0:
            print_line(f"{label}: {value:.4g} {unit}")
    return build_measured_hardware(measured, base, name)


if __name__ == "__main__":
    sys.exit(main())
