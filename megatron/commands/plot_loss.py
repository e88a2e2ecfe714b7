"""Draw a run's loss curve with training loss, validation losses and learning rate.

The source is the --save folder of a run, a metrics file (JSON lines) or a log with Megatron's
lines. The output is a PNG, or the format that its suffix names. A run that was resumed or rolled
back gives one curve. Iterations that were trained again appear once.
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from megatron.base.errors import DataError
from megatron.base.outside_file import iterate_lines
from megatron.base.plain_text import print_line
from megatron.commands.parse import parse_arguments
from megatron.commands.run_tool import run_tool
from megatron.extras.figure import make_figure, save_figure
from megatron.observe.log_line import parse_log_line, parse_validation_log_line
from megatron.observe.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[list[int], list[float]]


@dataclass(frozen=True)
class PlotLoss:
    """Draw the loss curve of a run."""

    source: Annotated[Path, tyro.conf.Positional]
    """The --save folder of a run, its metrics.jsonl, or its log."""
    output: Path = Path("loss.png")
    """The picture to write."""
    title: str | None = None
    """Title of the picture. Default: the source's path."""
    unigram_entropy: float | None = None
    """Draw a horizontal line at this loss, in nats. It is the loss of a model that knows only the
    tokens' frequencies."""


@dataclass
class Curves:
    """The points (iterations, values) of each quantity.

    Validation losses are keyed by the set's name.
    """

    train: Points = field(default_factory=lambda: ([], []))
    learning_rate: Points = field(default_factory=lambda: ([], []))
    validation: dict[str, Points] = field(default_factory=dict)

    def add(self, iteration: int, loss: float | None, learning_rate: float | None) -> None:
        """Append the values of one iteration. None adds no point."""
        for points, value in ((self.train, loss), (self.learning_rate, learning_rate)):
            if value is not None:
                points[0].append(iteration)
                points[1].append(value)

    def add_validation(self, name: str, iteration: int, loss: float) -> None:
        """Append one validation loss."""
        points = self.validation.setdefault(name, ([], []))
        points[0].append(iteration)
        points[1].append(loss)


def read_curves(source: Path) -> Curves:
    """Read the curves from a run's folder, a metrics file or a log.

    Raises:
        DataError: The file does not exist or has no loss in it.
    """
    if source.is_dir():
        source /= "metrics.jsonl"
    if not source.is_file():
        raise DataError(
            f"{source} is not a file; give the --save folder of a run, its metrics.jsonl or its log"
        )
    if source.suffix == ".jsonl":
        curves = _read_metrics_curves(source)
    else:
        curves = _read_log_curves(source)
    # An empty picture would look like a run that has not started.
    if not curves.train[0] and not curves.validation:
        raise DataError(
            f"{source} has no loss; give a metrics file (.jsonl) or a log with Megatron's lines"
        )
    return curves


def draw(curves: Curves, output: Path, *, title: str, unigram_entropy: float | None = None) -> None:
    """Write the picture, with the losses at the top and the learning rate at the bottom.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write files of this suffix.
        OSError: The picture cannot be written.
    """
    figure = make_figure(8, 5.5)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _draw_losses(loss, curves, unigram_entropy)
    loss.set_title(title, fontsize=11)
    rate.plot(*curves.learning_rate, color="tab:gray", linewidth=1.2)
    rate.set(ylabel="learning rate", xlabel="iteration", ylim=(0, None))
    # Learning rates are near 1e-4. Plain labels would be a row of zeros.
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, output)


def insert_gaps(iterations: list[int], values: list[float]) -> Points:
    """Insert a NaN where iterations are missing, as in a skipped range.

    matplotlib then draws no line over iterations that were not trained.
    """
    steps = [later - earlier for earlier, later in pairwise(iterations)]
    # Logs have one line per --log-interval, so the usual distance is found from the data.
    if steps:
        usual = Counter(steps).most_common(1)[0][0]
    else:
        usual = 1
    found: Points = ([], [])
    for iteration, value, step in zip(iterations, values, [usual, *steps], strict=True):
        if step > usual:
            found[0].append(iteration - step + usual)
            found[1].append(math.nan)
        found[0].append(iteration)
        found[1].append(value)
    return found


def _draw_losses(axes: "Axes", curves: Curves, unigram_entropy: float | None) -> None:
    axes.plot(
        *insert_gaps(*curves.train), color="tab:blue", linewidth=1.0, alpha=0.8, label="training"
    )
    # C0 is the colour of the training loss.
    for number, (name, points) in enumerate(curves.validation.items()):
        axes.plot(
            *points, color=f"C{number + 1}", marker="o", markersize=4, linewidth=1.5, label=name
        )
    if unigram_entropy is not None:
        axes.axhline(
            unigram_entropy,
            color="tab:gray",
            linestyle="--",
            linewidth=1.2,
            label="unigram entropy",
        )
    axes.set_ylabel("loss (nats a token)")
    axes.legend(frameon=False)


def _read_metrics_curves(source: Path) -> Curves:
    curves = Curves()
    for record in read_metrics(source):
        curves.add(record["iteration"], record.get("lm_loss"), record.get("learning_rate"))
        for name, loss in record.get("validation", {}).items():
            curves.add_validation(name, record["iteration"], loss)
    return curves


def _read_log_curves(source: Path) -> Curves:
    """Read the curves from a log. The last line of each iteration counts.

    An earlier iteration after a later one means that the run was resumed or rolled back. The later
    points belong to work that was lost, and they are removed.
    """
    train: dict[int, dict[str, int | float]] = {}
    validation: dict[tuple[int, str], float] = {}
    last = 0
    # Logs of crashed runs may contain bytes that are not UTF-8.
    for raw in iterate_lines(source):
        line = raw.decode("utf-8", "replace")
        if (step := parse_log_line(line)) is not None:
            first = int(step["iteration"])
            if first <= last:
                train = {iteration: old for iteration, old in train.items() if iteration < first}
                validation = {key: old for key, old in validation.items() if key[0] < first}
            train[first] = step
            # The next line with an iteration up to this one means a resume or a rollback.
            last = first
        elif (point := parse_validation_log_line(line)) is not None:
            validation[int(point["iteration"]), str(point["name"])] = float(point["lm_loss"])
    curves = Curves()
    for iteration, step in sorted(train.items()):
        curves.add(iteration, step.get("lm_loss"), step.get("learning_rate"))
    for (iteration, name), loss in validation.items():
        curves.add_validation(name, iteration, loss)
    return curves


def main(argv: list[str] | None = None) -> int:
    """Write the picture that `argv` asks for and return the exit code."""
    options = parse_arguments(PlotLoss, args=argv)

    def work() -> int:
        draw(
            read_curves(options.source),
            options.output,
            title=options.title or str(options.source),
            unigram_entropy=options.unigram_entropy,
        )
        print_line(f"wrote {options.output}")
        return 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
