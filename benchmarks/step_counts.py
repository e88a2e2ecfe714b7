"""Count the calls, launches and bytes of a training step, without a GPU.

    python benchmarks/step_counts.py                        calls and launches of GPT-2
    python benchmarks/step_counts.py --shape gpt2 nanochat  further shapes of step_time.py
    python benchmarks/step_counts.py --parts                also each part of a microbatch

The first table has the Python calls of a step, as cProfile counts them, and the CPU time of a step
without cProfile. The model has 12 layers of width 32, so its arithmetic is negligible. A step has 4
microbatches, and the trainer adds products to fp32 gradients as on a GPU. Compiled contestants use
the backend aot_eager, which runs the operators of a graph from Python. Calls depend on the versions
of Python and torch, and CPU time also on the machine. Compare counts of one machine only.

The second table has the launches of kernels and the bytes that a microbatch of the size 125m reads
and writes, counted on the fake GPU (docs/dry_run.md). It takes the kernels that a GPU takes without
a flag. Launches of the fake GPU are its operators: a kernel of Triton is one, and so is an operator
of torch on a list of tensors.
"""

import contextlib
import cProfile
import io
import platform
import pstats
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

import tyro
from operator_work import Work
from results import add_row

from megatron.extras.planner.dry_run.process import call_in_pool, open_pool

if TYPE_CHECKING:
    # The process of the fake GPU imports torch after its guard, so this one imports it late.
    from step_time import Contestant

_LAYERS = 12
_HIDDEN = 32
_MICROBATCHES = 4
_SIZE: Literal["125m"] = "125m"
_KERNELS = (
    "--gradient-accumulation-fusion --rope-fusion --bias-swiglu-fusion --residual-norm-fusion "
    "--cross-entropy-loss-fusion --attention-backend fused flash unfused"
)
"""What an H200 takes without a flag."""
_COMPILED = "-compiled"

Shape = Literal["gpt2", "llama", "nanochat"]


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    shape: tuple[Shape, ...] = ("gpt2",)
    """Architectures to count."""
    contestants: tuple[Literal["trainer", "trainer-compiled", "plain", "plain-compiled"], ...] = (
        "trainer",
        "trainer-compiled",
        "plain",
        "plain-compiled",
    )
    """Loops of step_time.py whose calls are counted. The plain ones have the shape gpt2 only."""
    steps: int = 8
    """Steps that are counted. The result is their mean."""
    parts: bool = False
    """Whether to print each part of a microbatch."""
    callers: int = 0
    """Functions to print for each contestant, those with the most calls first."""
    kernels: bool = True
    """Whether the launches are those with the kernels. Otherwise the trainer has no kernel flag."""


@dataclass(frozen=True)
class HostCounts:
    """What a step costs the host."""

    calls: float
    """Python calls, functions in C included."""
    inside: float
    """Those of functions inside of `megatron/`."""
    milliseconds: float
    """CPU time without cProfile."""
    functions: list[tuple[float, str]]
    """Calls of each function, the most first."""


def count_calls(name: "Contestant", shape: Shape, steps: int) -> HostCounts:
    """Count the Python calls of a step.

    Args:
        name: A contestant of step_time.py.
        shape: Its architecture.
        steps: Steps to count.
    """
    import step_time
    import torch

    step_time.SIZES["smallest"] = (_LAYERS, _HIDDEN, 2, 16, 1, 2 * _HIDDEN)
    step_time.TRAINER_FLAGS["trainer"] = ["--gradient-accumulation-fusion"]
    step_time.TRAINER_FLAGS["trainer-compiled"] = [
        "--gradient-accumulation-fusion",
        "--use-torch-compile",
    ]
    compile_model = torch.compile
    # Inductor needs minutes on a CPU, and its kernels are not the subject.
    torch.compile = partial(compile_model, backend="aot_eager")
    arguments = step_time.Arguments(size="smallest", microbatches=_MICROBATCHES)
    flags = step_time.command_line(arguments, shape, "bf16").split()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            data = ["--data-path", str(step_time.CORPUS), "--data-cache-path", f"{folder}/cache"]
            output = ["--metrics-file", f"{folder}/metrics.jsonl", "--tensorboard-dir", folder]
            rank = step_time.ContestantRank([*flags, *data, *output], name=name, shape=shape)
            rank.steps(3)
            start = time.process_time()
            rank.steps(steps)
            seconds = (time.process_time() - start) / steps
            profile = cProfile.Profile()
            profile.enable()
            rank.steps(steps)
            profile.disable()
    finally:
        torch.compile = compile_model
    inside = total = 0
    functions = []
    for (file, line, function), (_, calls, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        total += calls
        if "/megatron/" in file:
            inside += calls
        functions.append((calls / steps, f"{file[-50:]}:{line} {function}"))
    functions.sort(reverse=True)
    return HostCounts(total / steps, inside / steps, 1e3 * seconds, functions)


def print_calls(arguments: Arguments) -> None:
    """Print and record the row of each contestant."""
    print(f"\nOne step: {_LAYERS} layers, width {_HIDDEN}, {_MICROBATCHES} microbatches, bf16")
    print("| shape | contestant | Python calls | inside megatron/ | CPU ms |")
    print("|---|---|--:|--:|--:|")
    for shape in arguments.shape:
        for name in arguments.contestants:
            if name.startswith("plain") and shape != "gpt2":
                continue
            counts = count_calls(name, shape, arguments.steps)
            print(
                f"| {shape} | {name} | {counts.calls:,.0f} | {counts.inside:,.0f} | "
                f"{counts.milliseconds:.1f} |",
                flush=True,
            )
            for calls, function in counts.functions[: arguments.callers]:
                print(f"    {calls:9.1f} {function}")
            add_row(
                "host_calls",
                shape=shape,
                contestant=name,
                calls=counts.calls,
                inside=counts.inside,
                cpu_milliseconds=counts.milliseconds,
                python=platform.python_version(),
                torch=version("torch"),
            )


def count_launches(shape: Shape, flags: str) -> tuple[dict[str, Work], dict[str, Work]]:
    """Count the work of a microbatch and that of the rest of a step. It runs on the fake GPU.

    Args:
        shape: An architecture of step_time.py, in the size 125m.
        flags: Further flags.

    Returns:
        Part -> its work in each further microbatch, and its work once in a step. The first
        microbatch writes gradients and moves less, so the second may be negative.
    """
    from operator_counter import count_step
    from step_time import SIZES, command_line
    from step_time import Arguments as StepArguments

    samples = SIZES[_SIZE][4]
    one, two = (
        count_step(
            f"{command_line(StepArguments(size=_SIZE, microbatches=n), shape, 'bf16')} "
            f"--micro-batch-size {samples} {flags}",
            n,
        )
        for n in (1, 2)
    )
    further: dict[str, Work] = defaultdict(Work)
    once: dict[str, Work] = defaultdict(Work)
    for key in {*one, *two}:
        first = one.get(key, Work())
        more = two.get(key, Work()) - first
        further[key[0]] += more
        once[key[0]] += first - more
    return dict(further), dict(once)


def print_launches(arguments: Arguments) -> None:
    """Print and record the row of each shape."""
    print(f"\nA microbatch of the size {_SIZE}, bf16")
    print("| shape | part | launches | GB | TFLOP | once in a step: launches | GB |")
    print("|---|---|--:|--:|--:|--:|--:|")
    flags = _KERNELS if arguments.kernels else ""
    with open_pool(1) as pool:
        for shape in arguments.shape:
            further, once = call_in_pool(pool, count_launches, shape, flags)
            rows = sorted(further, key=lambda part: -further[part].calls)
            for part in rows if arguments.parts else ():
                _print_launches(shape, part, further[part], once[part])
            total = sum(further.values(), Work())
            rest = sum(once.values(), Work())
            _print_launches(shape, "all", total, rest)
            add_row(
                "launches",
                shape=shape,
                launches=total.calls,
                bytes=total.reads + total.writes,
                gradient_sums=further["sums of gradients"].calls,
                launches_once=rest.calls,
                bytes_once=rest.reads + rest.writes,
                torch=version("torch"),
            )


def _print_launches(shape: str, part: str, further: Work, once: Work) -> None:
    moved, rest = ((work.reads + work.writes) / 1e9 for work in (further, once))
    print(
        f"| {shape} | {part} | {further.calls:,} | {moved:.2f} | {further.flops / 1e12:.2f} | "
        f"{once.calls:,} | {rest:.2f} |",
        flush=True,
    )


def main() -> None:
    """Print both tables."""
    arguments = tyro.cli(Arguments, description=__doc__)
    print(f"Python {platform.python_version()}, torch {version('torch')}")
    # The process of the fake GPU starts before this one imports torch.
    print_launches(arguments)
    print_calls(arguments)


if __name__ == "__main__":
    main()
