"""Trace two training steps, and print which kernels take the time and how long the GPU is idle.

    python benchmarks/kernel_shares.py --size 177m --microbatches 2      a shape of step_time.py
    python benchmarks/kernel_shares.py --size 177m -- --use-torch-compile  further flags of the run
    python benchmarks/kernel_shares.py --trace FILE.pt.trace.json.gz     a trace that exists

The trace is that of --profile-iterations of pretrain_gpt.py. Kernels of all streams are counted.
Idle is the share of the time between the first and the last kernel in which no kernel runs. It is
listed by the kernel that came next. The
profiler makes launches slower, so a small model is idle for longer than without it. A trace
of a CPU has only operators. An operator that calls others is counted in addition to them.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from results import add_row
from step_time import Arguments as StepArguments
from step_time import command_line
from worlds import write_random_tokens

ROOT = Path(__file__).resolve().parents[1]
_KINDS = (
    ("attention", ("flash", "fmha", "attention", "cudnn_generated")),
    ("matrix product", ("gemm", "nvjet", "cutlass", "xmma", "addmm", "aten::mm")),
    ("communication", ("nccl",)),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("softmax and loss", ("softmax", "logsumexp", "nll")),
    ("norm", ("layer_norm", "layernorm", "rms_norm", "rmsnorm")),
    ("copy", ("memcpy", "memset", "copy", "catarray", "aten::cat")),
    ("compiled", ("triton",)),
    ("pointwise", ("elementwise", "aten::mul", "aten::add")),
    ("reduction", ("reduce", "aten::sum")),
)
"""Kind -> parts of the names of its kernels, in lower case. The first kind that matches counts."""


_GAP_ROWS = 8
"""Kernels that are printed with the idle time before them."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    trace: Path | None = None
    """A trace of one rank. Default: train, and trace iterations 6 and 7."""
    size: Literal["smallest", "tiny", "125m", "177m", "350m", "1.3b"] = "177m"
    """Shape of the model, see step_time.py."""
    shape: Literal["gpt2", "llama", "nanochat"] = "llama"
    """Architecture."""
    microbatches: int = 2
    """Microbatches of a step."""
    rows: int = 30
    """Kernels to print."""


@dataclass(frozen=True)
class Kernel:
    """One execution of a kernel, in microseconds."""

    name: str
    start: float
    duration: float


def make_trace(arguments: Arguments, further: Sequence[str], folder: Path) -> Path:
    """Train eight iterations, and return the trace of the sixth and seventh.

    Args:
        arguments: The command line.
        further: Further flags of the run.
        folder: Folder for the data and the trace.

    Raises:
        CalledProcessError: The run failed. Its output was printed.
    """
    shape = StepArguments(size=arguments.size, microbatches=arguments.microbatches)
    flags = command_line(shape, arguments.shape, "bf16").split()
    data = folder / "random"
    write_random_tokens(data, shape.get_vocab_size(), 1_000_000)
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
    command += ["--train-iters", "8", "--profile-iterations", "6-7"]
    command += ["--profile-dir", str(folder), "--data-path", str(data)]
    subprocess.run([*command, *further], check=True, cwd=ROOT)
    (path,) = folder.glob("*.pt.trace.json.gz")
    return path


def read_kernels(path: Path) -> list[Kernel]:
    """Return the kernels of a trace, or the operators if it has no kernels."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    for kinds in (("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)):
        kernels = [
            Kernel(event["name"], float(event["ts"]), float(event["dur"]))
            for event in events
            if event.get("cat") in kinds and "dur" in event
        ]
        if kernels:
            return kernels
    return []


def classify(name: str) -> str:
    """Return the kind of a kernel."""
    lower = name.lower()
    for kind, parts in _KINDS:
        if any(part in lower for part in parts):
            return kind
    return "other"


def compute_busy(kernels: Iterable[Kernel]) -> tuple[float, float]:
    """Return the microseconds in which some kernel runs, and those from the first to the last."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    busy = 0.0
    begin = end = ordered[0].start
    for kernel in ordered:
        # Kernels of several streams may overlap. Their common time counts once.
        stop = kernel.start + kernel.duration
        busy += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return busy, end - begin


def find_gaps(kernels: Iterable[Kernel]) -> Counter[str]:
    """Return the microseconds without a kernel, by the name of the kernel that came next.

    A GPU that waits for the host has many short gaps. One long gap is a wait of the host.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    gaps: Counter[str] = Counter()
    end = ordered[0].start
    for kernel in ordered:
        if kernel.start > end:
            gaps[kernel.name] += kernel.start - end  # type: ignore[assignment]
        end = max(end, kernel.start + kernel.duration)
    return gaps


def report_kernels(kernels: Sequence[Kernel], described: dict[str, Any], rows: int) -> None:
    """Print and record the table of kernels, of their kinds, and the idle share.

    Args:
        kernels: The kernels of a trace.
        described: Values of each row: size, shape and flags.
        rows: Kernels to print.
    """
    busy, span = compute_busy(kernels)
    idle = 1 - busy / span
    print(f"span {span / 1e3:.2f} ms, idle {idle:.3f}")
    add_row("idle", **described, ms=span / 1e3, idle=idle)
    for name, gap in find_gaps(kernels).most_common(_GAP_ROWS):
        print(f"{gap / span:7.3f}  {gap / 1e3:10.3f} ms  idle before {name[:120]}")
        add_row("gaps", **described, name=name[:200], ms=gap / 1e3, share=gap / span)
    print()
    total = sum(kernel.duration for kernel in kernels)
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel.name] += kernel.duration  # type: ignore[assignment]
        counts[kernel.name] += 1
        kinds[classify(kernel.name)] += kernel.duration  # type: ignore[assignment]
    for kind, duration in kinds.most_common():
        print(f"{duration / total:7.3f}  {duration / 1e3:10.3f} ms  {kind}")
        add_row("kinds", **described, kind=kind, ms=duration / 1e3, share=duration / total)
    print()
    for name, duration in times.most_common(rows):
        print(f"{duration / total:7.3f}  {duration / 1e3:10.3f} ms  {counts[name]:5}  {name[:120]}")
        add_row(
            "kernels",
            **described,
            name=name[:200],
            kind=classify(name),
            count=counts[name],
            ms=duration / 1e3,
            share=duration / total,
        )


def parse(argv: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Return the arguments of this program, and the flags of the run, which follow `--`."""
    own = list(argv)
    further: list[str] = []
    if "--" in own:
        place = own.index("--")
        own, further = own[:place], own[place + 1 :]
    return tyro.cli(Arguments, args=own, description=__doc__), further


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments, further = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.trace
        if path is None:
            path = make_trace(arguments, further, Path(folder))
        kernels = read_kernels(path)
    if not kernels:
        print(f"{path} has neither kernels nor operators", file=sys.stderr)
        return 1
    described = {"size": arguments.size, "shape": arguments.shape, "flags": " ".join(further)}
    report_kernels(kernels, described, arguments.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
