"""The table at the start, and the progress bar on terminals."""

import doctest
import io
import sys
from dataclasses import replace

import pytest
from observe.reports import full_report

from megatron.config.cli import load_config
from megatron.observe.progress_bar import ProgressBar
from megatron.observe.report import LaunchStart
from megatron.plan.resolve import resolve
from megatron.run.report import wants_bar
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
    bar = ProgressBar(total=10, initial=4, stream=terminal)
    bar.write(LaunchStart(2))
    bar.write(replace(full_report(), lm_loss=2.5))
    bar.log(" iteration 5")
    bar.close()
    assert "7/10" in terminal.getvalue()
    assert "loss 2.500" in terminal.getvalue()
    assert capsys.readouterr().out == " iteration 5\n"


@pytest.mark.parametrize(
    ("flags", "stream", "drawn"),
    [
        ("--show-progress --train-iters 3", Terminal(), True),
        ("--show-progress --train-iters 3", io.StringIO(), False),
        ("--train-iters 3", Terminal(), False),
        ("--show-progress --train-time 3m", Terminal(), False),
    ],
)
def test_bar_needs_a_terminal_the_flag_and_an_end(
    flags: str, stream: io.StringIO, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8"
    loaded = load_config(f"{shape} --micro-batch-size 1 --vocab-size 8 {flags}".split())
    plan = resolve(loaded.config, 1)
    monkeypatch.setattr(sys, "stderr", stream)
    assert wants_bar(plan) is drawn
