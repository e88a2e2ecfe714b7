r"""Report what happened to a run, or add a note to its chronicle.

    python tools/chronicle.py RUN                              # text
    python tools/chronicle.py RUN OTHER --html report.html     # a page that compares two runs
    python tools/chronicle.py RUN --png loss.png               # a picture of the loss
    python tools/chronicle.py note RUN "the data of node 7 were damaged"

RUN is a --save folder. The page is one file, and it needs no network.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from megatron.base.errors import DataError
from megatron.base.plain_text import make_plain, print_line, print_to_stderr
from megatron.console.figure import make_figure, save_figure
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.operations.chronicle.charts import find_stretches
from megatron.extras.operations.chronicle.history import Column, RunHistory, read_history
from megatron.extras.operations.chronicle.page import name_runs, write_page
from megatron.extras.operations.chronicle.summary import format_text
from megatron.observe.chronicle import CHRONICLE, append_event


def draw_loss(histories: Sequence[RunHistory], names: Sequence[str], path: Path) -> None:
    """Write a picture with the losses at the top and the learning rates at the bottom.

    A run that was resumed or rolled back gives one curve. Iterations that were trained again appear
    once, and no line is drawn over iterations that were not trained.

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
        prefix = f"{name}: " * (len(names) > 1)
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


_SHOWN_DAMAGED = 10
"""Messages about damaged lines that are printed for each run."""


@dataclass(frozen=True)
class ReportArguments:
    """The command line of a report."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """The --save folders of the runs."""
    html: Path | None = None
    """Write a page with charts to this file. Default: print text."""
    png: Path | None = None
    """Draw loss, evaluations and learning rate into this file, with matplotlib. Its suffix names
    the format."""


@dataclass(frozen=True)
class NoteArguments:
    """The command line of a note."""

    run: Annotated[Path, tyro.conf.Positional]
    """The --save folder of the run. It may be training."""
    text: Annotated[str, tyro.conf.Positional]
    """The note."""


def write_report(arguments: ReportArguments) -> int:
    """Print the report of the runs, or write its page or picture, and return the exit code.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write files of this suffix.
        DataError: No run was given, or a folder is not that of a run.
        OSError: A file cannot be read or written.
    """
    if not arguments.runs:
        raise DataError("no run was given; give the --save folder of one run or more")
    histories = [read_history(folder) for folder in arguments.runs]
    for history in histories:
        _print_damaged(history)
    if arguments.png is not None:
        draw_loss(histories, name_runs(histories), arguments.png)
        print_line(f"wrote {arguments.png}")
    if arguments.html is not None:
        write_page(histories, arguments.html)
        print_line(f"wrote {arguments.html}")
    if arguments.html is None and arguments.png is None:
        print_line("\n\n".join(map(format_text, histories)))
    return 0


def _print_damaged(history: RunHistory) -> None:
    """Print which lines of a run's files were left out."""
    for message in history.damaged[:_SHOWN_DAMAGED]:
        print_to_stderr(f"warning: {make_plain(message)}")
    more = len(history.damaged) - _SHOWN_DAMAGED
    if more > 0:
        print_to_stderr(f"warning: {more:,} more lines of {history.folder} are left out")


def add_note(arguments: NoteArguments) -> int:
    """Append a note to a run's chronicle and return the exit code.

    Raises:
        DataError: The folder does not exist.
        OSError: The chronicle cannot be written.
    """
    if not arguments.run.is_dir():
        raise DataError(f"{arguments.run} is not a folder; give the --save folder of a run")
    append_event(arguments.run / CHRONICLE, "note", None, {"text": arguments.text})
    return 0


def main(argv: list[str] | None = None) -> int:
    """Do what `argv` asks for and return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    # A folder of the name `note` can be given as ./note.
    if given[:1] == ["note"]:
        note = parse_arguments(NoteArguments, args=given[1:], description=__doc__)
        return run_tool(lambda: add_note(note))
    report = parse_arguments(ReportArguments, args=given, description=__doc__)
    return run_tool(lambda: write_report(report))


if __name__ == "__main__":
    sys.exit(main())
