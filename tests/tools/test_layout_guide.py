"""The tables of docs/hsdp_fsdp_or_tp.md have the numbers of the planner."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.commands.plan_estimates import estimate_memory
from megatron.config.cli import load_config
from megatron.plan import resolve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hsdp_fsdp_or_tp.md"
LIMIT = 72e9
"""Bytes of a GPU that may be used, as the page says."""
FRACTIONS = ("none", "1/3", "1/2", "2/3", "3/4", "all")
NODE = 8


@dataclass(frozen=True)
class Setting:
    """A choice of the first table, and its memory in bytes."""

    strategy: str
    recomputed: str
    micro_batch_size: int
    states: int
    activations: int

    def format(self) -> list[str]:
        """Return the cells of the table."""
        sizes = (self.states, self.activations, self.states + self.activations)
        return [
            self.strategy,
            self.recomputed,
            str(self.micro_batch_size),
            *(f"{size / 1e9:.1f}" for size in sizes),
        ]


def read_rows(columns: int) -> list[list[str]]:
    """Return the rows about models of the table with this number of columns."""
    lines = re.findall(r"^\| (\d+B \|.*) \|$", PAGE.read_text(), re.M)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in rows if len(row) == columns]


def estimate(
    model: str, gpus: int, recomputed: str, micro: int, *flags: str, strategy: str = "FSDP"
) -> tuple[int, int]:
    """Return the states and the activations of a GPU in bytes."""
    words = (
        f"--preset llama2-{model.lower()} --seq-length 4096 --bf16 --lr 3e-4 --train-iters 10 "
        f"--sharding-strategy {strategy.lower()} --micro-batch-size {micro}"
    ).split()
    if recomputed != "none":
        fraction = "1" if recomputed == "all" else recomputed
        words += ["--checkpoint-activations", "--checkpoint-fraction", fraction]
    loaded = load_config([*words, *flags])
    plan = resolve(loaded.config, gpus, loaded.origin)
    assert plan.errors == ()
    memory = estimate_memory(plan)
    return memory["rank"]["total"], memory["activations"]


def list_settings(model: str, gpus: int) -> Iterator[Setting]:
    """Yield the settings in the order of the page."""
    strategies = ("FSDP",) if gpus == NODE else ("HSDP", "FSDP")
    for strategy in strategies:
        for micro in (2, 1):
            for recomputed in FRACTIONS:
                memory = estimate(model, gpus, recomputed, micro, strategy=strategy)
                yield Setting(strategy, recomputed, micro, *memory)


ROWS = read_rows(columns=8)


def test_each_model_is_in_the_table() -> None:
    assert [(row[0], int(row[1])) for row in ROWS] == [
        (model, gpus) for model in ("7B", "13B", "34B", "70B") for gpus in (8, 64, 512, 1024)
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_row_has_the_first_setting_that_fits(row: list[str]) -> None:
    model, gpus, *cells = row
    fitting = (
        setting
        for setting in list_settings(model, int(gpus))
        if setting.states + setting.activations <= LIMIT
    )
    first = next(fitting, None)
    if first is None:
        assert cells[0] == "does not fit"
    else:
        assert cells == first.format()


def test_states_of_the_advice() -> None:
    """The sizes that rule out HSDP for the larger models."""
    text = PAGE.read_text()
    for model, gigabytes in (("34B", 76), ("70B", 155)):
        states, _ = estimate(model, NODE, "all", 1)
        assert round(states / 1e9) == gigabytes
        assert f"{gigabytes} GB" in text


@pytest.mark.parametrize("row", read_rows(columns=7), ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_a_row_about_tp(row: list[str]) -> None:
    model, gpus, layout, recomputed, micro, smallest, memory = row
    tensor = 1 if layout == "FSDP" else 8
    flags = ("--tensor-model-parallel-size", "8", "--sequence-parallel") if tensor == 8 else ()
    sizes = estimate(model, int(gpus), recomputed, int(micro), *flags)
    assert f"{sum(sizes) / 1e9:.1f}" == memory
    assert int(smallest.replace(",", "")) == int(gpus) // tensor * int(micro) * 4096
