"""The tables of docs/hsdp_fsdp_or_tp.md have the numbers of the planner."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.commands.plan_estimates import estimate_memory
from megatron.commands.plan_strategies import (
    choose_strategy,
    estimate_compute_seconds,
    estimate_strategies,
)
from megatron.config.cli import load_config
from megatron.cost.hardware import load_hardware
from megatron.plan import Plan, resolve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hsdp_fsdp_or_tp.md"
A100 = load_hardware("a100-80g")
LIMIT = 0.9 * 80e9
"""Bytes of a GPU that may be used, as the page says."""
FRACTIONS = ("none", "1/3", "1/2", "2/3", "3/4", "all")
NODE = 8


@dataclass(frozen=True)
class Setting:
    """A choice of the first table, and its plan."""

    strategy: str
    recomputed: str
    micro_batch_size: int
    plan: Plan

    def fits(self) -> bool:
        return sum(estimate_bytes(self.plan)) <= LIMIT

    def format(self) -> list[str]:
        """Return the cells of the table."""
        sizes = estimate_bytes(self.plan)
        return [
            self.strategy,
            self.recomputed,
            str(self.micro_batch_size),
            *(f"{size / 1e9:.1f}" for size in (*sizes, sum(sizes))),
            *format_seconds(self.plan, "fsdp", "hsdp"),
        ]


def read_rows(columns: int) -> list[list[str]]:
    """Return the rows with numbers of the table that has this number of columns."""
    lines = re.findall(r"^\| (\d+B? \|.*) \|$", PAGE.read_text(), re.M)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in rows if len(row) == columns]


def plan_run(model: str, gpus: int, flags: str, recomputed: str = "none") -> Plan:
    words = f"--preset llama2-{model.lower()} --bf16 --lr 3e-4 --train-iters 10 {flags}".split()
    if recomputed != "none":
        fraction = "1" if recomputed == "all" else recomputed
        words += ["--checkpoint-activations", "--checkpoint-fraction", fraction]
    loaded = load_config(words)
    plan = resolve(loaded.config, gpus, loaded.origin)
    assert plan.errors == ()
    return plan


def estimate_bytes(plan: Plan) -> tuple[int, int]:
    """Return the states and the activations of a GPU in bytes."""
    memory = estimate_memory(plan)
    return memory["rank"]["total"], memory["activations"]


def format_seconds(plan: Plan, *strategies: str) -> list[str]:
    """Return the seconds of computation, and those of communication of some strategies."""
    found = {
        each.name.split()[0]: f"{each.communication.total:.2f}"
        for each in estimate_strategies(plan, A100)
    }
    # On one node there is no hsdp.
    times = [found.get(name, "") for name in strategies]
    return [f"{estimate_compute_seconds(plan, A100):.2f}", *times]


def list_settings(model: str, gpus: int) -> Iterator[Setting]:
    """Yield the settings in the order of the page."""
    for strategy in ("FSDP",) if gpus == NODE else ("HSDP", "FSDP"):
        for micro in (2, 1):
            for recomputed in FRACTIONS:
                flags = f"--seq-length 4096 --sharding-strategy {strategy.lower()}"
                flags += f" --micro-batch-size {micro}"
                plan = plan_run(model, gpus, flags, recomputed)
                yield Setting(strategy, recomputed, micro, plan)


ROWS = read_rows(columns=11)


def test_each_model_is_in_the_table() -> None:
    assert [(row[0], int(row[1])) for row in ROWS] == [
        (model, gpus) for model in ("7B", "13B", "34B", "70B") for gpus in (8, 64, 512, 1024)
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_row_has_the_first_setting_that_fits(row: list[str]) -> None:
    model, gpus, *cells = row
    fitting = (setting for setting in list_settings(model, int(gpus)) if setting.fits())
    first = next(fitting, None)
    if first is None:
        assert cells == ["does not fit", *[""] * 8]
    else:
        assert cells == first.format()


def test_states_of_the_advice() -> None:
    """The sizes that rule out HSDP for the larger models."""
    text = PAGE.read_text()
    for model, gigabytes in (("34B", 76), ("70B", 155)):
        flags = "--seq-length 4096 --micro-batch-size 1 --sharding-strategy fsdp"
        states, _ = estimate_bytes(plan_run(model, NODE, flags))
        assert round(states / 1e9) == gigabytes
        assert f"{gigabytes} GB" in text


def test_the_13b_needs_no_recomputation_with_fsdp() -> None:
    flags = "--seq-length 4096 --micro-batch-size 2 --sharding-strategy fsdp"
    plan = plan_run("13B", 64, flags)
    text = " ".join(PAGE.read_text().split())
    seconds, _ = format_seconds(plan, "fsdp")
    assert f"{sum(estimate_bytes(plan)) / 1e9:.1f} GB on 64 GPUs, and {seconds} s" in text
    recommended = choose_strategy(
        estimate_strategies(plan, A100), estimate_compute_seconds(plan, A100)
    )
    assert recommended is not None
    assert recommended.name == "fsdp"


@pytest.mark.parametrize("row", read_rows(columns=6), ids=lambda row: row[0])
def test_a_row_about_a_constant_batch(row: list[str]) -> None:
    gpus, length, micro, *seconds = row
    batch = 2**20 // int(length)
    assert int(gpus) * int(micro) == batch
    flags = f"--seq-length {length} --micro-batch-size {micro} --global-batch-size {batch}"
    plan = plan_run("7B", int(gpus), f"{flags} --sharding-strategy fsdp")
    assert seconds == format_seconds(plan, "fsdp", "hsdp")


@pytest.mark.parametrize("row", read_rows(columns=8), ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_a_row_about_tp(row: list[str]) -> None:
    model, gpus, layout, recomputed, smallest, memory, *seconds = row
    flags = "--seq-length 4096 --sharding-strategy fsdp --micro-batch-size 2"
    tensor = 1
    if layout != "FSDP":
        tensor = 8
        flags += " --tensor-model-parallel-size 8 --sequence-parallel"
    plan = plan_run(model, int(gpus), flags, recomputed)
    assert f"{sum(estimate_bytes(plan)) / 1e9:.1f}" == memory
    assert int(smallest.replace(",", "")) == int(gpus) // tensor * 2 * 4096
    assert seconds == format_seconds(plan, "fsdp")
