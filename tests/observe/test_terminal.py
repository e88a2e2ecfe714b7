"""The table at the start, and the progress bar on terminals."""

import doctest
import io
from dataclasses import replace

import pytest
from observe.reports import full_report

from megatron.observe.progress_bar import ProgressBar
from megatron.observe.report import LaunchStart
from megatron.run.start import start_table
from megatron.run.start.start_table import format_start_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_start_table_is_aligned_and_complete() -> None:
    rows = [
        ("attention", "sdpa", "no dropout"),
        ("loss", "vocab-parallel cross entropy", "tensor-parallel size 2"),
    ]
    lines = format_start_table(rows).splitlines()
    assert len({line.index("|") for line in lines}) == 1
    assert len({line.rindex("|") for line in lines}) == 1
    cells = [tuple(part.strip() for part in line.split("|")) for line in lines[1:]]
    assert cells == rows
    assert doctest.testmod(start_table).failed == 0


def test_bar_is_drawn_on_a_terminal_that_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    bar = ProgressBar(total=10, initial=4, show=True, stream=terminal)
    bar.write(LaunchStart(2))
    bar.write(replace(full_report(), lm_loss=2.5))
    bar.log(" iteration 5")
    bar.close()
    assert "7/10" in terminal.getvalue()
    assert "loss 2.500" in terminal.getvalue()
    assert capsys.readouterr().out == " iteration 5\n"


@pytest.mark.parametrize(("show", "stream"), [(True, io.StringIO()), (False, Terminal())])
def test_no_bar_without_a_terminal_or_without_asking(
    show: bool, stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar(total=10, show=show, stream=stream)
    bar.write(full_report())
    bar.log(" iteration 1")
    bar.close()
    assert stream.getvalue() == ""
    captured = capsys.readouterr()
    assert captured.out == " iteration 1\n"
    assert captured.err == ""
