"""Estimate the time of a training step on an H200 from the bytes and FLOPs of its operators.

    python benchmarks/bytes_per_operator.py
    python benchmarks/bytes_per_operator.py --flags=--gradient-accumulation-fusion

A step runs on a fake GPU (docs/dry_run.md), so it needs no GPU. Each operator is counted with the
bytes that it reads and writes. It takes the time of a copy of these bytes. A product or an
attention kernel takes the time of its FLOPs if that is longer. The rates are arguments.
Nothing is measured: caches, launches of kernels and waiting are not part of the estimate.
"""

from dataclasses import dataclass
from typing import Literal

import tyro
from operator_work import ATTENTION, ATTENTION_BACKWARD, Case, Counts, Work

from megatron.extras.planner.dry_run.process import call_in_pool, open_pool

Preset = Literal["llama2-7b", "lauzhack-177m", "gpt2-124m"]
_CUDNN_SPEED = 631 / 329
"""TFLOPS of cuDNN's attention on an H100 over those of flash attention (pytorch#142132)."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    preset: tuple[Preset, ...] = ("llama2-7b", "lauzhack-177m", "gpt2-124m")
    """Presets of the models."""
    flags: str = ""
    """Further flags of the run, in one argument."""
    copy: float = 3.9
    """Terabytes a second that a copy reads and writes."""
    product: float = 650
    """TFLOPS of matrix products."""
    attention: tuple[float, float] = (380, 330)
    """TFLOPS of flash attention forward and backward, of the causal half."""
    operators: bool = False
    """Whether to print each operator, not only each part of the step."""


_SIZES: dict[Preset, tuple[int, int, str]] = {
    "llama2-7b": (1, 16, ""),
    "lauzhack-177m": (64, 1, ""),
    "gpt2-124m": (16, 1, "--make-vocab-size-divisible-by 128"),
}
"""Preset -> samples of a microbatch, microbatches, further flags."""


def build_case(preset: Preset, further: str) -> Case:
    """Return the step of a preset on one GPU."""
    samples, microbatches, flags = _SIZES[preset]
    return Case(
        f"--preset {preset} --bf16 --micro-batch-size {samples} --train-iters 10 --lr 1e-4 "
        f"--global-batch-size {samples * microbatches} {flags} {further}",
        microbatches,
    )


def estimate_seconds(part: str, work: Work, arguments: Arguments) -> float:
    """Return the time of a part's operator."""
    rates = {
        ATTENTION: arguments.attention[0],
        ATTENTION_BACKWARD: arguments.attention[1],
    }
    rate = rates.get(part, arguments.product)
    moved = (work.reads + work.writes) / (arguments.copy * 1e12)
    return max(moved, work.flops / (rate * 1e12))


def print_table(preset: Preset, counts: Counts, arguments: Arguments) -> None:
    """Print a row for each part or operator of a step, the slowest first."""
    rows: dict[str, tuple[float, Work]] = {}
    attention = 0.0
    for (part, operator), work in counts.items():
        seconds = estimate_seconds(part, work, arguments)
        if part in (ATTENTION, ATTENTION_BACKWARD):
            attention += seconds
        name = part
        if arguments.operators:
            name = f"{part}: {operator}"
        before, earlier = rows.get(name, (0.0, Work()))
        rows[name] = (before + seconds, earlier + work)
    total = sum(seconds for seconds, _ in rows.values())
    samples, microbatches, _ = _SIZES[preset]
    print(f"\n{preset}, {microbatches} x {samples} samples {arguments.flags}".rstrip())
    print("| part | calls | GB read | GB written | TFLOP | ms | share |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, (seconds, work) in sorted(rows.items(), key=lambda row: -row[1][0]):
        print(
            f"| {name} | {work.calls:,} | {work.reads / 1e9:,.1f} | {work.writes / 1e9:,.1f} | "
            f"{work.flops / 1e12:,.1f} | {seconds * 1e3:,.2f} | {seconds / total:.1%} |"
        )
    with_cudnn = total - attention + attention / _CUDNN_SPEED
    print(f"| total | | | | | {total * 1e3:,.1f} | |")
    print(f"| total with cuDNN's attention | | | | | {with_cudnn * 1e3:,.1f} | |")


def main() -> None:
    """Count the operators of each preset, and print the tables."""
    arguments = tyro.cli(Arguments, description=__doc__)
    # The process of the fake GPU imports torch after its guard, so this one does not import it.
    with open_pool(1) as pool:
        for preset in arguments.preset:
            counts = call_in_pool(pool, _count, build_case(preset, arguments.flags))
            print_table(preset, counts, arguments)


def _count(case: Case) -> Counts:
    from operator_counter import count_case

    return count_case(case)


if __name__ == "__main__":
    main()
