"""A picture of the loss of one run or several, with matplotlib.

A run that was resumed or rolled back gives one curve. Iterations that were trained again appear
once, and no line is drawn over iterations that were not trained.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.base.errors import DataError
from megatron.base.plain_text import make_plain
from megatron.console.figure import make_figure, save_figure
from megatron.extras.operations.chronicle.charts import find_stretches
from megatron.extras.operations.chronicle.history import Column, RunHistory


def draw_loss(histories: Sequence[RunHistory], names: Sequence[str], path: Path) -> None:
    """Write a picture with the losses at the top and the learning rates at the bottom.

    Args:
        histories: The runs.
        names: Their names, which differ.
        path: The file. Its suffix names the format.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write files of this suffix.
        DataError: No run has a loss. An empty picture would look like a run that has not started.
        OSError: The picture cannot be written.
    """
    figure = make_figure(8, 5.5)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for history, name in zip(histories, names, strict=True):
        prefix = f"{name}: " if len(names) > 1 else ""
        curve = _take_kept(history, "lm_loss")
        if len(curve[0]):
            loss.plot(*curve, linewidth=1.0, alpha=0.8, label=f"{prefix}training")
        rate.plot(*_take_kept(history, "learning_rate"), linewidth=1.2)
        kept = [each for each in history.evaluations if each.kept]
        for of_set in dict.fromkeys(each.name for each in kept):
            points = [(each.iteration, each.loss) for each in kept if each.name == of_set]
            label = f"{prefix}{make_plain(of_set)}"
            loss.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    if not loss.lines:
        folders = ", ".join(str(history.folder) for history in histories)
        raise DataError(f"{folders}: no loss is recorded; give the --save folder of a run")
    loss.set(ylabel="loss (nats a token)", title=", ".join(names))
    loss.legend(frameon=False)
    rate.set(ylabel="learning rate", xlabel="iteration", ylim=(0, None))
    # Learning rates are near 1e-4. Plain labels would be a row of zeros.
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _take_kept(history: RunHistory, field: str) -> tuple[Column, Column]:
    """Return the iterations and the values of the kept rows, with a nan where some are missing."""
    rows = history.kept & np.isfinite(history.columns[field])
    iterations, values = history.columns["iteration"][rows], history.columns[field][rows]
    gaps = np.flatnonzero(np.diff(find_stretches(iterations))) + 1
    return np.insert(iterations, gaps, np.nan), np.insert(values, gaps, np.nan)
