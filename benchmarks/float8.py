"""Train small models in bf16 and with float8 products, and compare their validation losses.

    python benchmarks/float8.py --corpus PREFIX --output FOLDER

Each run trains a model of GPT-2's or Llama's shape for 300 iterations of real text. The products
are emulated, as with --fp8-emulate. Each evaluation is a row of FOLDER/float8.csv. A run that is in
the file already is not repeated, so the benchmark can be stopped and continued. Several processes
can share the work if each has other --shapes, --recipes or --seeds. At the end it prints a table of
the runs that have all seeds, and draws FOLDER/float8.png.

In the runs `tensorwise, plain`, the gradients of weights are computed from operands that are not
rounded. The trainer has no flag for this.
"""

import contextlib
import csv
import io
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tyro
from torch import Tensor

from megatron.commands.parts import choose_parts
from megatron.extras.figure import make_figure, save_figure
from megatron.extras.translators.translator import load_config
from megatron.observe.metrics import read_metrics
from megatron.run.pretrain import pretrain
from megatron.run.start.launch import read_launch

ITERATIONS = 300
INTERVAL = 50
SEEDS = (1, 2, 3)
MOST_DIFFERENCE = 0.005
COMMON = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 4 --global-batch-size 8 --vocab-size 5000 --hidden-dropout 0 "
    "--attention-dropout 0 --bf16 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    f"--lr-warmup-iters 30 --clip-grad 1.0 --split 95,5,0 --train-iters {ITERATIONS} "
    f"--eval-interval {INTERVAL} --eval-iters 12 --log-interval 100"
)
SHAPES = {
    "GPT-2": "--position-embedding-type absolute --normalization LayerNorm",
    "Llama": (
        "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
        "--ffn-hidden-size 336 --num-query-groups 2 --untie-embeddings-and-output-weights "
        "--disable-bias-linear"
    ),
}
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate"
PLAIN = "tensorwise, plain"
BF16 = "bf16"
RECIPES = {
    BF16: "",
    "tensorwise": TENSORWISE,
    PLAIN: TENSORWISE,
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise --fp8-emulate",
}
"""Name -> flags."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    output: Path
    """Folder of the results."""
    corpus: Path | None = None
    """Indexed data set of real text, with up to 5,000 tokens, without its suffix.

    Without it, nothing is trained.
    """
    shapes: tuple[str, ...] = tuple(SHAPES)
    """The shapes that are trained."""
    recipes: tuple[str, ...] = tuple(RECIPES)
    """The ways to compute that are trained."""
    seeds: tuple[int, ...] = SEEDS
    """The seeds of weights and order of the data that are trained."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    shape: str
    recipe: str
    seed: int


Curve = dict[int, float]
"""Iteration -> validation loss."""


def _multiply_plain(gradients: Any, number: int, x: Tensor) -> Tensor:
    """Return a weight's gradient from operands that are not rounded."""
    return gradients._rows[number].t().mm(x)


@contextlib.contextmanager
def change_weight_gradients() -> Iterator[None]:
    """Compute the gradients of weights from operands that are not rounded."""
    from megatron.extras.float8.products import _Gradients

    with mock.patch.object(_Gradients, "multiply_input", _multiply_plain):
        yield


def train(cell: Cell, arguments: Arguments) -> Curve:
    """Train a run, and return its validation losses."""
    with tempfile.TemporaryDirectory(dir=arguments.output) as name:
        flags = (
            f"{COMMON} {SHAPES[cell.shape]} {RECIPES[cell.recipe]} --seed {cell.seed} "
            f"--data-path {arguments.corpus} --data-cache-path {arguments.output / 'cache'} "
            f"--save {name} --save-interval 100000"
        )
        loaded = load_config(flags.split())
        with contextlib.ExitStack() as changes:
            changes.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if cell.recipe == PLAIN:
                changes.enter_context(change_weight_gradients())
            pretrain(read_launch(loaded, choose_parts(loaded.config)))
        entries = read_metrics(Path(name) / "metrics.jsonl")
    return {e["iteration"]: e["validation"]["validation"] for e in entries if "validation" in e}


def read_curves(path: Path) -> dict[Cell, Curve]:
    """Return the validation losses of the runs that are complete."""
    if not path.exists():
        return {}
    curves: dict[Cell, Curve] = defaultdict(dict)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            cell = Cell(row["shape"], row["recipe"], int(row["seed"]))
            curves[cell][int(row["iteration"])] = float(row["validation_loss"])
    return {cell: curve for cell, curve in curves.items() if ITERATIONS in curve}


def train_all(arguments: Arguments, path: Path) -> None:
    """Train the runs that are not in the file yet."""
    cells = [
        Cell(shape, recipe, seed)
        for seed in arguments.seeds
        for shape in arguments.shapes
        for recipe in arguments.recipes
    ]
    for cell in cells:
        # Read again each time, because several processes may write.
        if cell in read_curves(path):
            continue
        begin = time.monotonic()
        curve = train(cell, arguments)
        seconds = time.monotonic() - begin
        if ITERATIONS not in curve:
            # A run ends early if it gets a signal.
            print(cell, "is not complete")
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for iteration, loss in curve.items():
            writer.writerow([cell.shape, cell.recipe, cell.seed, iteration, repr(loss)])
        # One write: rows of several processes do not mix.
        with open(path, "a") as file:
            file.write(text.getvalue())
        print(cell, f"{curve[ITERATIONS]:.4f}, {seconds:.0f} s", flush=True)


def list_complete(curves: dict[Cell, Curve], shape: str) -> list[str]:
    """Return the recipes that were trained with all seeds."""
    return [
        recipe for recipe in RECIPES if all(Cell(shape, recipe, seed) in curves for seed in SEEDS)
    ]


def format_table(curves: dict[Cell, Curve]) -> str:
    """Return the validation losses at the end in Markdown, and the demands that are not met."""
    lines = [
        f"| shape | products | {' | '.join(f'seed {seed}' for seed in SEEDS)} | mean | to bf16 |",
        f"|---|---|{'--:|' * (len(SEEDS) + 2)}",
    ]
    failures = []
    for shape in SHAPES:
        plain = statistics.mean(curves[Cell(shape, BF16, seed)][ITERATIONS] for seed in SEEDS)
        for recipe in list_complete(curves, shape):
            losses = [curves[Cell(shape, recipe, seed)][ITERATIONS] for seed in SEEDS]
            mean = statistics.mean(losses)
            difference = mean / plain - 1
            numbers = " | ".join(f"{loss:.4f}" for loss in (*losses, mean))
            lines.append(f"| {shape} | {recipe} | {numbers} | {difference:+.2%} |")
            if abs(difference) > MOST_DIFFERENCE:
                failures.append(f"{shape}, {recipe}: {difference:+.2%}")
    return "\n".join([*lines, "", *failures])


def draw(curves: dict[Cell, Curve], path: Path) -> None:
    """Draw the difference to bf16 during the runs: the mean, and the range of the seeds."""
    figure = make_figure(9, 4)
    for axes, shape in zip(figure.subplots(1, len(SHAPES), sharey=True), SHAPES, strict=True):
        axes.axhspan(-100 * MOST_DIFFERENCE, 100 * MOST_DIFFERENCE, color="tab:gray", alpha=0.12)
        axes.axhline(0, color="black", linewidth=0.8)
        plain = [curves[Cell(shape, BF16, seed)] for seed in SEEDS]
        iterations = sorted(plain[0])
        for recipe in list_complete(curves, shape)[1:]:
            own = [curves[Cell(shape, recipe, seed)] for seed in SEEDS]
            values = [
                [100 * (a[at] / b[at] - 1) for a, b in zip(own, plain, strict=True)]
                for at in iterations
            ]
            (line,) = axes.plot(
                iterations, [statistics.mean(each) for each in values], label=recipe
            )
            axes.fill_between(
                iterations,
                [min(each) for each in values],
                [max(each) for each in values],
                color=line.get_color(),
                alpha=0.1,
            )
        axes.set(xlabel="iteration", title=shape)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("validation loss, % above that of bf16")
    figure.axes[0].legend()
    save_figure(figure, path)


def main() -> int:
    """Run the benchmark and return the exit code."""
    arguments = tyro.cli(Arguments, description=__doc__)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "float8.csv"
    if not path.exists():
        path.write_text("shape,recipe,seed,iteration,validation_loss\n")
    if arguments.corpus is not None:
        train_all(arguments, path)
    curves = read_curves(path)
    if any(BF16 not in list_complete(curves, shape) for shape in SHAPES):
        print("the runs in bf16 are not complete, and the others are compared with them")
        return 0
    print(format_table(curves))
    draw(curves, arguments.output / "float8.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
