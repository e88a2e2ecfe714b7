"""What is shown at the start and on terminals."""

import doctest
import io

import pytest

from megatron.observe import startup
from megatron.observe.progress import ProgressBar
from megatron.observe.startup import format_start_table


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
    assert [cell for line in lines[1:] for cell in (part.strip() for part in line.split("|"))] == [
        cell for row in rows for cell in row
    ]
    assert doctest.testmod(startup).failed == 0


def test_the_bar_is_for_terminals_that_want_it(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    bar = ProgressBar(total=10, initial=4, show=True, stream=terminal)
    bar.update(3, "loss 2.50")
    bar.say(" iteration 5")
    bar.close()
    assert "7/10" in terminal.getvalue()
    assert "loss 2.50" in terminal.getvalue()
    assert capsys.readouterr().out == " iteration 5\n"


@pytest.mark.parametrize(("show", "stream"), [(True, io.StringIO()), (False, Terminal())])
def test_otherwise_there_are_lines_only(
    show: bool, stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar(total=10, show=show, stream=stream)
    bar.update()
    bar.say(" iteration 1")
    bar.close()
    assert stream.getvalue() == ""
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (" iteration 1\n", "")
