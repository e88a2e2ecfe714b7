"""Measure layouts, pipeline bubbles, recomputation, ZeRO, compiling and statistics of layers.

    python benchmarks/layouts.py                      everything, in less than 6 minutes on
                                                      2 cores without other load
    python benchmarks/layouts.py --part bubble        one comparison
    python benchmarks/layouts.py --quick              check that it runs, in less than a minute
    python benchmarks/layouts.py --losses             correctness only: losses of several ranks
                                                      against one process

The predictions are those of the pipeline schedule and of the planner. Numbers of --quick mean
nothing. Worlds of real processes, one thread each, train real text by the loop of pretrain_gpt.py.
All worlds of a comparison stay active and take turns, so a drift of the machine's speed affects all
of them. The first round warms up, and medians are quoted. With GPUs, only layouts with a GPU for
each rank are measured, by NCCL. The output is a block for docs/benchmarks.md.
"""

import contextlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from results import add_row
from worlds import (
    CORES,
    Case,
    LaunchedWorld,
    MemoryRank,
    Rank,
    Serving,
    WorldFailedError,
)

from megatron.schedule.pipeline_schedule import compute_bubble_fraction

ROOT = Path(__file__).resolve().parents[1]
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)
PIPELINE = "--pipeline-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2"
CONTEXT = "--context-parallel-size 2"
Part = Literal["steps", "bubble", "memory", "compile", "statistics"]


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    part: tuple[Part, ...] = ("steps", "bubble", "memory", "compile", "statistics")
    """Comparisons to run."""
    rounds: int = 5
    """Interleaved rounds, after one that warms up."""
    quick: bool = False
    """Small shapes and a single round, without the compiler."""
    losses: bool = False
    """Compare losses, not times. Layouts with a GPU for each rank use NCCL. The ranks of the others
    share the GPUs, or the CPU, and use gloo."""


def shape_flags(layers: int, hidden: int, seq: int, micro: int, batch: int) -> str:
    """Return the flags of GPT-2's shape with heads of 64 and without dropout.

    `batch` is in samples.
    """
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64} "
        f"--seq-length {seq} "
        f"--micro-batch-size {micro} --global-batch-size {batch} --train-iters 2000 --lr 3e-4 "
        "--hidden-dropout 0 "
        f"--attention-dropout 0 --eval-iters 0 --vocab-size 5120 --log-interval 1000000"
    )


@contextlib.contextmanager
def worlds_of(
    cases: Sequence[Case], folder: str, serve: Serving = Rank
) -> Iterator[dict[str, LaunchedWorld]]:
    """Yield the worlds of all cases that run on CPUs or have a GPU for each rank."""
    with ExitStack() as stack:
        worlds = {}
        for case in cases:
            # NCCL refuses two ranks on one GPU.
            if 0 < torch.cuda.device_count() < case.processes:
                print(
                    f"\nSKIPPED: {case.name}: {case.processes} ranks need as many GPUs for NCCL",
                    flush=True,
                )
                continue
            worlds[case.name] = world = LaunchedWorld(case, folder, serve)
            stack.callback(world.close)
        yield worlds


def planned(case: Case) -> dict[str, Any]:
    """Return the plan of a case as tools/plan.py prints it."""
    command = [
        sys.executable,
        str(ROOT / "tools/plan.py"),
        "--json",
        "--world-size",
        str(case.processes),
        "--",
    ]
    done = subprocess.run(
        [*command, *case.flags.split()], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, f"{case.name}: {done.stdout}{done.stderr}"
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def spread(seconds: Sequence[float]) -> str:
    """Format minimum, median and maximum in milliseconds."""
    return " / ".join(f"{1e3 * of(seconds):.0f}" for of in (min, statistics.median, max))


def table(head: str, rows: Sequence[str], name: str | None = None) -> None:
    """Print a Markdown table, and add its rows to the table `name` of the results."""
    columns = split_cells(head)
    print(f"\n{head}\n|---|{'--:|' * (len(columns) - 1)}", *rows, sep="\n", flush=True)
    for row in rows if name else ():
        add_row(str(name), **dict(zip(columns, split_cells(row), strict=True)))


def split_cells(row: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


def measure_steps(arguments: Arguments, folder: str) -> None:
    """Measure the same batch, in the same microbatches, on several layouts."""
    shape = shape_flags(4, 128, 64, 1, 4) if arguments.quick else shape_flags(7, 384, 256, 1, 8)
    base = "one process, one thread"
    many = f"one process, {CORES} threads"
    layouts = (
        ("TP 2", TENSOR, 2),
        ("DP 2", "", 2),
        ("CP 2, allgather", CONTEXT, 2),
        ("CP 2, a2a", f"{CONTEXT} --cp-comm-type a2a", 2),
        ("PP 2", PIPELINE, 2),
        ("TP 2 x PP 2", f"{TENSOR} {PIPELINE}", 4),
    )
    cases = [Case(base, shape)] + ([Case(many, shape, 1, CORES)] if CORES > 1 else [])
    cases += [Case(name, f"{shape} {flags}", processes) for name, flags, processes in layouts]
    seconds: dict[str, list[float]] = {}
    with worlds_of(cases, folder) as worlds:
        for number in range(arguments.rounds + 1):
            for name, world in worlds.items():
                # The slowest rank decides how long a step takes.
                took = max(measured.seconds for measured in world.ask("steps", 1))
                if number:
                    seconds.setdefault(name, []).append(took)
        rows = [
            _steps_row(world.case, seconds[name], seconds[base]) for name, world in worlds.items()
        ]
    print(
        f"\n### Step time by layout\n\n`{shape}`: {planned(cases[0])['parameters'] / 1e6:.1f} "
        "million parameters."
    )
    print(
        f"{CORES} cores: layouts with more processes take turns on them and cannot be faster "
        "than that many times the first row. "
        "*at most* also has the pipeline's idle share, where each process has a core; "
        "*core-seconds* are step time x cores used."
    )
    table(
        "| layout | processes x threads | cores used | ms | speed | at most | core-seconds |",
        rows,
        "layouts",
    )


def _steps_row(case: Case, seconds: Sequence[float], base: Sequence[float]) -> str:
    speed = statistics.median(b / s for b, s in zip(base, seconds, strict=True))
    pipeline = (
        planned(case)["pipeline"][-1]["idle"]
        if PIPELINE in case.flags and case.processes <= CORES
        else 0.0
    )
    used = f"{case.processes} x {case.threads} | {case.cores}"
    bound = case.cores * (1 - pipeline)
    core_seconds = case.cores * statistics.median(seconds)
    return (
        f"| {case.name} | {used} | {spread(seconds)} | {speed:.2f} | {bound:.2f} | "
        f"{core_seconds:.2f} |"
    )


def measure_bubble(arguments: Arguments, folder: str) -> None:
    """Measure two pipeline ranks with several numbers of microbatches of one size."""
    hidden, seq, counts = (128, 64, (2, 4)) if arguments.quick else (384, 128, (2, 4, 8, 16))
    # 7 layers balance the stages. The first stage has four. The last one has three and the output
    # projection, which costs about one layer.
    plain = Case("1F1B", f"{shape_flags(7, hidden, seq, 1, 2)} {PIPELINE}", 2)
    virtual = (
        f"{shape_flags(8, hidden, seq, 1, 2)} {PIPELINE} --num-layers-per-virtual-pipeline-stage 2"
    )
    interleaved = Case("interleaved, v = 2", virtual, 2)
    seen: dict[tuple[str, int], list[tuple[float, list[float]]]] = {}
    with worlds_of((plain, interleaved), folder) as worlds:
        for number in range(arguments.rounds + 1):
            for name, world in worlds.items():
                for m in counts:
                    ranks = world.ask("steps", 1, m)
                    if number:
                        # The first stage starts first and ends last, so its time is the time of the
                        # step.
                        whole = ranks[0].forward_backward
                        idle = [(rank.seconds - rank.cpu_seconds) / whole for rank in ranks]
                        seen.setdefault((name, m), []).append((whole, idle))
    if not seen:
        return
    print(
        f"\n### Pipeline bubble\n\nPP 2, microbatches of one sample of {seq} tokens, hidden "
        f"{hidden}, forward and backward pass.\n"
    )
    print(
        "- *1F1B*: 4 layers on the first stage, 3 and the output projection on the second.\n"
        "- *interleaved*: 4 stages of 2 layers. The last one also has the output projection.\n"
        "- *by the fit*: `1 - m w / t(m)`.\n"
        "- *by the clock*: the share of the time in which a rank used no CPU (rank 0 / 1). This "
        "includes the wait for uneven stages and for messages."
    )
    rows = []
    fits = []
    for name, v in ((plain.name, 1), (interleaved.name, 2)):
        medians = {m: statistics.median(whole for whole, _ in seen[name, m]) for m in counts}
        # A step of m microbatches takes t(m) = m w + c. So t(m) / m is linear in 1 / m, and its
        # intercept w is the time of one microbatch without idle time.
        slope, w = statistics.linear_regression(
            [1 / m for m in counts], [medians[m] / m for m in counts]
        )
        fits.append(
            f"{name}: t(m) / m = {1e3 * w:.1f} ms x (1 + {slope / w:.2f} / m); the schedule "
            f"says (p - 1) / v = {1 / v:.2f}"
        )
        for m in counts:
            idle = [statistics.median(idle[rank] for _, idle in seen[name, m]) for rank in (0, 1)]
            # CPU time cannot show the idle time of a GPU.
            clock = (
                "-" if torch.cuda.is_available() else " / ".join(f"{share:.3f}" for share in idle)
            )
            cells = (
                spread([whole for whole, _ in seen[name, m]]),
                f"{1e3 * medians[m] / m:.1f}",
                f"{1 - m * w / medians[m]:.3f}",
            )
            rows.append(
                f"| {name} | {m} | {' | '.join(cells)} | {clock} | "
                f"{compute_bubble_fraction(m, 2, v):.3f} |"
            )
    head = "| schedule | m | ms | ms / m | idle by the fit | idle by the clock | idle in theory |"
    table(head, rows, "bubble")
    print("\n" + "\n".join(f"- {fit}" for fit in fits), flush=True)


def measure_memory(arguments: Arguments, folder: str) -> None:
    """Measure the peak memory of one process per case, next to the planner's estimate.

    Each row has the difference to the first case of its comparison. Memory that all cases have in
    common cancels.
    """
    precision = " --bf16" if torch.cuda.is_available() else ""
    small = shape_flags(4, 128, 128, 4, 4) if arguments.quick else shape_flags(8, 384, 256, 4, 4)
    large = (
        shape_flags(4, 256, 64, 1, 4) if arguments.quick else shape_flags(8, 512, 64, 1, 4)
    ) + precision
    some = small + precision
    threads = CORES
    # Attention dropout needs the score matrix [b, n, s, s]. Only then recomputing the attention
    # core saves memory.
    scores = f"{some} --attention-dropout 0.1"
    again = "--checkpoint-activations"
    kept = [
        Case("no recomputation", some, 1, threads),
        Case("1/2 of the layers", f"{some} {again} --checkpoint-fraction 1/2", 1, threads),
        Case("all layers", f"{some} {again}", 1, threads),
    ]
    core = [
        Case("no recomputation, attention dropout", scores, 1, threads),
        Case(
            "attention core, attention dropout", f"{scores} --recompute-attention-core", 1, threads
        ),
    ]
    zero = [Case("DP 2, ZeRO 1", f"{large} --zero-stage 1", 2)]
    zero += [Case(f"DP 2, ZeRO {stage}", f"{large} --zero-stage {stage}", 2) for stage in (2, 3)]
    zero += [Case("one process", large)]
    if arguments.quick:
        kept = kept[::2]
        core = []
        zero = zero[::2]
    print("\n### Memory")
    print(
        "\nPeak MiB of a rank over two steps, in a fresh process each. Recomputation: "
        f"`{some}`. ZeRO: `{large}`."
    )
    print(
        "The last two columns are differences to the first row of a group (+0), measured and by "
        "`tools/plan.py`, which leaves buffers out."
    )
    rows = [
        *_memory_rows(kept, lambda memory: memory["activations"], folder),
        *_memory_rows(core, lambda memory: memory["activations_with_scores"], folder),
        *_memory_rows(zero, lambda memory: memory["rank"]["total"], folder),
    ]
    table("| case | measured | difference | difference by the planner |", rows)


def _memory_rows(
    cases: Sequence[Case], by_planner: Callable[[dict[str, Any]], int], folder: str
) -> list[str]:
    peaks: dict[str, tuple[int, int]] = {}
    for case in cases:
        # Each case gets fresh processes, because an allocator keeps the peak of an earlier case.
        with worlds_of([case], folder, MemoryRank) as worlds:
            for name, world in worlds.items():
                # The first step allocates optimizer states, buffers and the libraries' own memory.
                world.ask("steps", 1)
                peaks[name] = (
                    max(world.ask("peak_bytes", 2)),
                    by_planner(planned(case)["memory_bytes"]),
                )
    rows = []
    for name, (peak, prediction) in peaks.items():
        first_peak, first_prediction = next(iter(peaks.values()))
        against = (
            f"{(peak - first_peak) / 2**20:+.0f} | {(prediction - first_prediction) / 2**20:+.0f}"
        )
        rows.append(f"| {name} | {peak / 2**20:.0f} | {against} |")
    return rows


def measure_compile(arguments: Arguments, folder: str) -> None:
    """Measure a Llama shape with and without torch.compile."""
    if arguments.quick:
        print("\nSKIPPED: compile: --quick leaves it out")
        return
    shape = f"{shape_flags(6, 384, 256, 4, 4)} {LLAMA} --ffn-hidden-size 1024"
    shape += " --bf16" if torch.cuda.is_available() else ""
    cases = [Case("off", shape, 1, CORES), Case("on", f"{shape} --use-torch-compile", 1, CORES)]
    seconds: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    with worlds_of(cases, folder) as worlds:
        for number in range(arguments.rounds + 1):
            for name, world in worlds.items():
                # The first step waits for the compiler, so it is recorded on its own.
                took = world.ask("steps", 1)[0].seconds
                if number:
                    seconds.setdefault(name, []).append(took)
                else:
                    first[name] = took
    print(
        f"\n### Compiling\n\nLlama's shape, `{shape}`, {CORES} threads. The first step waits "
        "for the compiler."
    )
    ratio = [
        statistics.median(off / s for off, s in zip(seconds["off"], times, strict=True))
        for times in seconds.values()
    ]
    rows = [
        f"| {n} | {spread(seconds[n])} | {r:.2f} | {first[n]:.1f} |"
        for n, r in zip(seconds, ratio, strict=True)
    ]
    table("| `--use-torch-compile` | ms | speed | first step, s |", rows)


def measure_statistics(arguments: Arguments, folder: str) -> None:
    """Measure steps with and without the statistics of layers."""
    layouts = [("one process", 256, "", 1), ("one process", 1024, "", 1)]
    layouts += [("TP 2 x PP 2", 256, f"{TENSOR} {PIPELINE}", 4)]
    print("\n### Statistics of layers\n\n`--log-layer-stats-interval 1`, one thread a process.")
    rows = []
    for name, length, flags, processes in layouts:
        if arguments.quick:
            length = length // 8
        shape = shape_flags(6, 384, length, 1, max(2, 1024 // length))
        off = Case("off", f"{shape} {flags}", processes)
        on = Case("on", f"{off.flags} --log-layer-stats-interval 1", processes)
        seconds: dict[str, list[float]] = {"off": [], "on": []}
        used: dict[str, list[float]] = {"off": [], "on": []}
        with worlds_of([off, on], folder) as worlds:
            for number in range(arguments.rounds + 1):
                for case, world in worlds.items():
                    measured = world.ask("steps", 2)
                    if number:
                        seconds[case].append(max(m.seconds for m in measured))
                        used[case].append(sum(m.cpu_seconds for m in measured))
            if not worlds:
                continue
        elapsed, cpu = (
            statistics.median(b / a for a, b in zip(times["off"], times["on"], strict=True))
            for times in (seconds, used)
        )
        rows.append(
            f"| {name} | {length} | {spread(seconds['off'])} | {spread(seconds['on'])} | "
            f"{elapsed:.3f} | {cpu:.3f} | {1 + (cpu - 1) / 100:.4f} |"
        )
    table(
        "| layout | sequence | off, ms | on, ms | time on / off | CPU time on / off | every 100 |",
        rows,
    )


LOSS_LAYOUTS = (
    ("TP 2", TENSOR, 2),
    ("CP 2, allgather", CONTEXT, 2),
    ("CP 2, a2a", f"{CONTEXT} --cp-comm-type a2a", 2),
    ("PP 2", PIPELINE, 2),
    ("DP 2, ZeRO 1", "--zero-stage 1", 2),
    ("DP 2, ZeRO 3", "--zero-stage 3", 2),
    ("PP 2, 2 virtual stages", f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1", 2),
    ("TP 2 x PP 2, tied ends", f"{TENSOR} {PIPELINE}", 4),
    ("TP 2 x DP 2, SP, ZeRO 3", f"{TENSOR} --sequence-parallel --zero-stage 3", 4),
    ("HSDP 2 x 2", "--sharding-strategy hsdp --hsdp-shard-size 2", 4),
    ("PP 4", "--pipeline-model-parallel-size 4", 4),
    ("TP 2 x PP 2 x DP 2, ZeRO 2", f"{TENSOR} {PIPELINE} --zero-stage 2", 8),
    (
        "PP 2 x HSDP 2 x 2",
        f"{PIPELINE} --sharding-strategy hsdp --hsdp-shard-size 2",
        8,
    ),
)
"""Name, flags and ranks of the layouts of --losses."""


def compare_losses(folder: str, *, quick: bool) -> int:
    """Train ten steps of each layout, and compare the losses with those of one process.

    Returns:
        The number of layouts that fail or whose losses differ by more than 1e-5.
    """
    gpus = torch.cuda.device_count()
    shape = shape_flags(4, 128, 64, 1, 8)
    steps = 10
    world = LaunchedWorld(Case("one process", shape), folder)
    expected = world.ask("steps", steps)[0].losses
    world.close()
    rows = []
    wrong = 0
    for name, flags, processes in LOSS_LAYOUTS:
        if quick and processes > 2:
            continue
        # NCCL refuses two ranks on one GPU.
        backend = "nccl" if gpus >= processes else "gloo"
        flags = f"{flags} --distributed-backend {backend}"
        difference: float | None = None
        try:
            world = LaunchedWorld(Case(name, f"{shape} {flags}", processes), folder)
            losses = world.ask("steps", steps)[0].losses
            world.close()
        except WorldFailedError as failure:
            lines = [line.strip() for line in str(failure).strip().splitlines()]
            # Errors above the last line may name further groups of ranks.
            groups = [line for line in lines if "Error" in line and "group" in line]
            outcome = "; ".join(dict.fromkeys([*groups, lines[-1]]))
            right = False
        else:
            # Losses of the layouts differ by rounding only, because sums have another order.
            difference = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
            # `max` passes over a NaN that is not the first value.
            right = all(map(math.isfinite, losses)) and difference < 1e-5
            outcome = f"{difference:.1e}" if right else f"{difference:.1e}: MORE THAN 1e-5"
        wrong += not right
        rows.append(f"| {name} | {backend} | {outcome} |")
        print(rows[-1], flush=True)
        add_row(
            "losses", layout=name, ranks=processes, backend=backend, difference=difference,
            right=right, outcome=outcome[:1000],
        )  # fmt: skip
    where = f"{gpus} GPUs" if gpus else "CPU (no GPU here)"
    print(
        f"\n### Losses of several ranks\n\n{steps} losses in fp32, {where}: largest relative "
        "difference to one process's."
    )
    table("| layout | backend | difference |", rows)
    return wrong


def describe_machine(arguments: Arguments) -> str:
    """Return date, machine, versions and rounds as one line."""
    if torch.cuda.is_available():
        name = (
            f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, CUDA "
            f"{torch.version.cuda}"
        )
    else:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else platform.machine()
    load = f"load average at the start {os.getloadavg()[0]:.1f}"
    rounds = f"{arguments.rounds} interleaved rounds after one of warm-up; min / median / max"
    return f"{date.today()}, {name}, {CORES} cores ({load}), torch {torch.__version__}. {rounds}."


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    # The worlds set their own number of threads. More threads in each process would compete for
    # cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.quick:
        arguments = replace(arguments, rounds=1)
    parts = {
        "steps": measure_steps,
        "bubble": measure_bubble,
        "memory": measure_memory,
        "compile": measure_compile,
        "statistics": measure_statistics,
    }
    failed = 0
    command = " ".join(["python benchmarks/layouts.py", *sys.argv[1:]])
    print(f"## Layouts\n\n`{command}`\n\n{describe_machine(arguments)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.losses:
            return 1 if compare_losses(folder, quick=arguments.quick) else 0
        for part in arguments.part:
            try:
                parts[part](arguments, folder)
            except WorldFailedError as failure:
                print(f"\nSKIPPED: {part}: {failure}", flush=True)
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
