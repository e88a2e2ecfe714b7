r"""Report what happened to a run, or add a note to its chronicle.

    python tools/chronicle.py RUN                              # text
    python tools/chronicle.py RUN OTHER --html report.html     # a page that compares two runs
    python tools/chronicle.py RUN --png loss.png               # a picture of the loss
    python tools/chronicle.py note RUN "the data of node 7 were damaged"

RUN is a --save folder. The page is one file, and it needs no network.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron.base.errors import DataError
from megatron.base.plain_text import make_plain, print_line, print_to_stderr
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.operations.chronicle.history import RunHistory, read_history
from megatron.extras.operations.chronicle.page import name_runs, write_page
from megatron.extras.operations.chronicle.picture import draw_loss
from megatron.extras.operations.chronicle.summary import format_text
from megatron.observe.chronicle import CHRONICLE, append_event

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
