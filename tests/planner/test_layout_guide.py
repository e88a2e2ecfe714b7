"""The tables of docs/hsdp_fsdp_or_tp.md and docs/sharding.md have the numbers of the planner.

UPDATE_GOLDEN=1 writes the tables again. Then check the sentences next to them.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.commands.plan_estimates import (
    choose_strategy,
    estimate_compute_seconds,
    estimate_memory,
    estimate_strategies,
)
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.memory import Verdict
from megatron.extras.planner.prediction import predict_plan
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "hsdp_fsdp_or_tp.md"
SHARDING = DOCS / "sharding.md"
A100 = load_hardware("a100-80g")
FRACTIONS = ("none", "1/3", "1/2", "2/3", "3/4", "all")
NODE = 8


@dataclass(frozen=True)
class Setting:
    """A choice of the first table, and its plan."""

    strategy: str
    recomputed: str
    micro_batch_size: int
    plan: Plan

    @property
    def verdict(self) -> Verdict:
        return predict_plan(self.plan, A100).verdict

    def format(self) -> list[str]:
        """Return the cells of the table."""
        doubt = ", may fit" if self.verdict is Verdict.MAY_FIT else ""
        return [
            self.strategy + doubt,
            self.recomputed,
            str(self.micro_batch_size),
            f"{estimate_states(self.plan) / 2**30:.1f}",
            f"{predict_peak(self.plan) / 2**30:.1f}",
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


def check_row(page: Path, row: list[str], expected: list[str]) -> None:
    """Compare a row of a table with the planner, or write it if UPDATE_GOLDEN is set."""
    if os.environ.get("UPDATE_GOLDEN"):
        before, after = ("| " + " | ".join(cells) + " |" for cells in (row, expected))
        text = page.read_text()
        assert text.count(before) == 1
        page.write_text(text.replace(before, after))
    else:
        assert row == expected


def estimate_states(plan: Plan) -> int:
    """Return the bytes of a GPU's weights, gradients and moments: 18 for each parameter."""
    return estimate_memory(plan)["rank"]["total"]


def predict_peak(plan: Plan) -> float:
    """Return the predicted peak memory of a GPU in bytes."""
    return predict_plan(plan, A100).peak_bytes


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


ROWS = read_rows(columns=10)


def test_each_model_is_in_the_table() -> None:
    assert [(row[0], int(row[1])) for row in ROWS] == [
        (model, gpus) for model in ("7B", "13B", "34B", "70B") for gpus in (8, 64, 512, 1024)
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_row_has_the_first_setting_that_fits(row: list[str]) -> None:
    model, gpus = row[:2]
    settings = list(list_settings(model, int(gpus)))
    fitting = [
        setting
        for verdict in (Verdict.FITS, Verdict.MAY_FIT)
        for setting in settings
        if setting.verdict is verdict
    ]
    cells = fitting[0].format() if fitting else ["does not fit", *[""] * 7]
    check_row(PAGE, row, [model, gpus, *cells])


def test_states_of_the_advice() -> None:
    """The sizes that rule out HSDP for the larger models."""
    text = PAGE.read_text()
    for model, size in (("34B", 71), ("70B", 145)):
        flags = "--seq-length 4096 --micro-batch-size 1 --sharding-strategy fsdp"
        states = estimate_states(plan_run(model, NODE, flags))
        assert round(states / 2**30) == size
        assert f"{size} GiB" in text


def test_the_13b_with_fsdp_instead_of_hsdp() -> None:
    """The sentence below the first table has the numbers and the advice of the planner."""
    flags = "--seq-length 4096 --micro-batch-size 2 --sharding-strategy fsdp"
    plan = plan_run("13B", 64, flags)
    seconds, _ = format_seconds(plan, "fsdp")
    recomputed = plan_run("13B", 64, flags, "1/3")
    text = " ".join(PAGE.read_text().split())
    assert f"then needs {predict_peak(plan) / 2**30:.1f} GiB" in text
    assert f"the computation takes {seconds} s instead of" in text
    assert f"recomputed, a GPU needs {predict_peak(recomputed) / 2**30:.1f} GiB" in text
    estimates = estimate_strategies(plan, A100)
    assert [each.name for each in estimates if each.verdict is Verdict.FITS] == ["fsdp"]
    recommended = choose_strategy(estimates)
    assert recommended is not None
    assert recommended.name == "fsdp"


@pytest.mark.parametrize("row", read_rows(columns=6), ids=lambda row: row[0])
def test_a_row_about_a_constant_batch(row: list[str]) -> None:
    gpus, length, micro = row[:3]
    batch = 2**20 // int(length)
    assert int(gpus) * int(micro) == batch
    flags = f"--seq-length {length} --micro-batch-size {micro} --global-batch-size {batch}"
    plan = plan_run("7B", int(gpus), f"{flags} --sharding-strategy fsdp")
    check_row(PAGE, row, [gpus, length, micro, *format_seconds(plan, "fsdp", "hsdp")])


@pytest.mark.parametrize("row", read_rows(columns=8), ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_a_row_about_tp(row: list[str]) -> None:
    model, gpus, layout, recomputed, smallest = row[:5]
    flags = "--seq-length 4096 --sharding-strategy fsdp --micro-batch-size 2"
    tensor = 1
    if layout != "FSDP":
        tensor = 8
        flags += " --tensor-model-parallel-size 8 --sequence-parallel"
    plan = plan_run(model, int(gpus), flags, recomputed)
    assert int(smallest.replace(",", "")) == int(gpus) // tensor * 2 * 4096
    memory = f"{predict_peak(plan) / 2**30:.1f}"
    check_row(PAGE, row, [*row[:5], memory, *format_seconds(plan, "fsdp")])


@pytest.mark.parametrize("name", ["FSDP", "HSDP, groups of 8", "DDP"])
def test_a_row_of_the_page_on_sharding(name: str) -> None:
    flags = "--seq-length 1024 --micro-batch-size 1 --global-batch-size 1024"
    plan = plan_run("7B", 1024, f"{flags} --grad-reduce-in-bf16")
    found = {each.name.split()[0]: each for each in estimate_strategies(plan, A100)}
    estimate = found[name.split(",")[0].lower()]
    times = estimate.communication
    expected = [
        f"{times.total:.2f}",
        *(f"{each:.2f}" if each else "0" for each in (times.inside_nodes, times.between_nodes)),
        f"{estimate.memory / 2**30:.1f}",
    ]
    (line,) = re.findall(rf"^\| {name} \| ([\d. |]+) \|$", SHARDING.read_text(), re.M)
    check_row(SHARDING, [name, *line.split(" | ")], [name, *expected])
