"""Compare the losses and gradient norms of layouts with those of one process, with float8 and bf16.

    python benchmarks/float8_layouts.py

Each world trains a small Llama for 10 steps of real text. The table has the difference to one
process as medians over the steps and seeds, with the ratio to the difference in bf16 in brackets.
"""

import statistics
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import tyro
from worlds import Case, LaunchedWorld, Rank

STEPS = 10
MODEL = (
    "--num-layers 3 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 64 --vocab-size 5000 --make-vocab-size-divisible-by 96 "
    "--micro-batch-size 2 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 "
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--untie-embeddings-and-output-weights --lr 1e-3 --lr-decay-style constant "
    f"--train-iters {STEPS} --split 100,0,0 --eval-iters 0 --bf16"
)
LAYOUTS = {
    "TP 2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "CP 2": (2, "--context-parallel-size 2"),
    "ZeRO 3": (2, "--zero-stage 3"),
}
BF16 = "bf16"
RECIPES = {
    BF16: "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate",
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise --fp8-emulate",
}
Numbers = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


class NumbersRank(Rank):
    """A rank that returns the numbers of its steps."""

    def train(self) -> Numbers:
        """Train all steps."""
        self.steps(STEPS)
        return [(step.result.loss, step.result.grad_norm) for step in self._seen]


def train(processes: int, flags: str, folder: str) -> Numbers:
    """Train in a world, and return its numbers."""
    world = LaunchedWorld(Case(flags, f"{MODEL} {flags}", processes), folder, NumbersRank)
    numbers: Any = world.ask("train")[0]
    world.close()
    return numbers


def find_differences(seeds: tuple[int, ...], recipe: str, folder: str) -> dict[str, Numbers]:
    """Return the relative differences to one process for each layout, in all steps and seeds."""
    found: dict[str, Numbers] = {name: [] for name in LAYOUTS}
    for seed in seeds:
        common = f"{RECIPES[recipe]} --seed {seed}"
        alone = train(1, common, folder)
        for name, (processes, flags) in LAYOUTS.items():
            together = train(processes, f"{common} {flags}", folder)
            found[name] += [
                (abs(a[0] / b[0] - 1), abs(a[1] / b[1] - 1))
                for a, b in zip(together, alone, strict=True)
            ]
    return found


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        found = {recipe: find_differences(arguments.seeds, recipe, folder) for recipe in RECIPES}
    print(f"| layout | number | {' | '.join(RECIPES)} |")
    print(f"|---|---|{'--:|' * len(RECIPES)}")
    for name in LAYOUTS:
        for kind, number in enumerate(("loss", "gradient norm")):
            medians = [
                statistics.median(each[kind] for each in found[recipe][name]) for recipe in RECIPES
            ]
            cells = [f"{median:.2g} ({median / medians[0]:.1f})" for median in medians]
            print(f"| {name} | {number} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
