"""The run of train/llama-7b-2T: its numbers, and a tiny one through all parts of its schedule."""

import json
import math
import re
from pathlib import Path

import pytest
from config.minimal import replace_values
from data.row_files import make_documents, write_rows
from process_pool import ProcessPool, pretrain, succeed

from megatron.extras.interop.translators.launch_script import read_launch_script
from megatron.extras.interop.translators.translator import load_config
from megatron.observe.metrics import read_metrics
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "train" / "llama-7b-2T"
RECIPE = json.loads((ROOT / "tests/fixtures/published_runs/modern.json").read_text())[
    "llama2-7b-fms"
]
LAST = 1_907_348
"""Iterations of the first run: 2e12 // 1,048,576."""


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts name the YAML file relative to the checkout."""
    monkeypatch.chdir(ROOT)


def read_script(name: str) -> list[str]:
    """Return the training command of a script, as a list of words."""
    return list(read_launch_script(FOLDER / f"{name}.slurm").arguments)


def plan_script(name: str) -> Plan:
    loaded = load_config(read_script(name))
    plan = resolve(loaded.config, 128, loaded.origin, consumed_samples=None)
    assert plan.errors == ()
    assert [text for text in plan.warnings if "no effect" in text] == []
    return plan


def read_table() -> dict[int, tuple[int, float]]:
    """Return iteration -> (tokens, learning rate) of the table in the README."""
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\de.-]+) \|$", read_readme(), re.M)
    return {
        int(iteration.replace(",", "")): (int(tokens.replace(",", "")), float(rate))
        for iteration, tokens, rate in rows
    }


def read_readme() -> str:
    return (FOLDER / "README.md").read_text()


def compute_rate(iteration: int) -> float:
    """Return the rate by the formula of the source's main_training_llama.py."""
    done = iteration / (2e12 / 4096 / 256)
    rise = 1 - (1 - min(iteration, 2000) / 2000) ** 2
    return 3e-4 * min(rise, 0.1 + 0.5 * (1 - 0.1) * (1 + math.cos(min(done, 1) * math.pi)))


def test_the_recipe_has_the_published_numbers() -> None:
    plan = plan_script("llama-7b-2T")
    optimizer = plan.config.optimizer
    assert plan.batch_size.final * RECIPE["seq_length"] == RECIPE["tokens_per_step"]
    assert plan.get_num_microbatches(plan.batch_size.final) == 1
    assert plan.parameters == 6_738_415_616
    assert plan.train_samples * RECIPE["seq_length"] == RECIPE["tokens"]
    assert plan.train_iters == LAST == RECIPE["tokens"] // RECIPE["tokens_per_step"]
    assert [optimizer.adam_beta1, optimizer.adam_beta2] == RECIPE["betas"]
    assert optimizer.weight_decay == RECIPE["weight_decay"]
    assert (optimizer.lr, optimizer.min_lr) == (RECIPE["lr"], RECIPE["min_lr"])
    assert not plan.config.recompute.checkpoint_activations


def test_the_rate_at_ten_points_is_that_of_the_table() -> None:
    plan = plan_script("llama-7b-2T")
    table = read_table()
    assert len(table) == 10
    rates = {step: plan.lr_schedule.get_lr(step * 256) for step in table}
    assert rates == pytest.approx({step: rate for step, (_, rate) in table.items()}, rel=3e-7)
    assert rates == pytest.approx({step: compute_rate(step) for step in table}, rel=1e-12)
    assert {step: step * 256 * 4096 for step in table} == {
        step: tokens for step, (tokens, _) in table.items()
    }
    assert table[LAST][0] == 1_999_999_336_448


def test_annealing_begins_where_the_cosine_ends() -> None:
    first = plan_script("llama-7b-2T").lr_schedule
    plan = plan_script("llama-7b-2T-anneal")
    assert plan.train_iters == LAST + 48_000
    assert first.get_lr(LAST * 256) == pytest.approx(3e-5, rel=1e-9)
    parts = {0: 1.0, 1: 1 - 1 / 48_000, 12_000: 0.75, 24_000: 0.5, 48_000: 0.0}
    rates = {step: plan.lr_schedule.get_lr((LAST + step) * 256) for step in parts}
    assert rates == pytest.approx({step: 3e-5 * part for step, part in parts.items()}, abs=1e-18)
    # Nothing else differs between the two scripts.
    changed = {"optimizer", "batch", "checkpoint"}
    one, other = (load_config(read_script(name)).config for name in SCRIPTS)
    assert all(
        getattr(one, group) == getattr(other, group) for group in vars(one) if group not in changed
    )
    assert one.checkpoint == other.checkpoint


SCRIPTS = ("llama-7b-2T", "llama-7b-2T-anneal")
TINY = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 88 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --vocab-size 5000 --micro-batch-size 1 "
    "--global-batch-size 4 --lr-warmup-samples 16 --no-bf16 --log-interval 1 --save-interval 10 "
    "--distributed-backend gloo"
)


def write_tiny_command(name: str, folder: Path) -> list[str]:
    """Return the command of a script with the sizes and paths of a tiny run."""
    output = folder / "output"
    paths: dict[str, list[str] | None] = {
        "--save": [str(output)],
        "--load": [str(output)],
        "--data-path": [str(folder / "data")],
        "--data-cache-path": [str(folder / "cache")],
        "--metrics-file": [str(folder / "metrics.jsonl")],
        # They take seconds in each start.
        "--tensorboard-dir": None,
        "--codecarbon-dir": None,
        "--kill-switch-path": [str(folder / "kill-switch")],
        "--logical-shards": ["8"],
    }
    if name == "llama-7b-2T-anneal":
        # 40 iterations of the first run, and 10 of annealing.
        paths |= {"--train-samples": ["200"], "--lr-wsd-decay-samples": ["40"]}
        paths |= {"--lr": ["1e-3"]}
        return [*replace_values(read_script(name), paths), *TINY.split()]
    words = replace_values(read_script(name), paths)
    return [*words, *TINY.split(), *["--train-samples", "160", "--lr", "1e-2", "--min-lr", "1e-3"]]


def test_a_tiny_run_trains_through_warm_up_cosine_and_annealing(
    pool: ProcessPool, tmp_path: Path
) -> None:
    write_rows(tmp_path / "data" / "part.arrow", "tokens", make_documents(600, 0))
    first, second = (write_tiny_command(name, tmp_path) for name in SCRIPTS)
    # The first array task is interrupted after the warm-up.
    succeed(pool.run(2, pretrain, [*first, "--exit-interval", "15"]))
    output = succeed(pool.run(2, pretrain, first))
    assert "at iteration 15" in output
    assert "training is complete at iteration 40" in output
    output = succeed(pool.run(2, pretrain, second))
    assert "--override-lr-scheduler changes the learning rate" in output
    assert "training is complete at iteration 50" in output

    entries = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "lm_loss" in entry]
    assert [entry["iteration"] for entry in entries] == list(range(1, 51))
    rates = {entry["iteration"]: entry["learning_rate"] for entry in entries}

    def compute_tiny_rate(step: int) -> float:
        if step > 40:
            return 1e-3 * (1 - (step - 40) / 10)
        rise = 1 - (1 - min(step, 4) / 4) ** 2
        return 1e-2 * min(rise, 0.1 + 0.45 * (1 + math.cos(step / 40 * math.pi)))

    assert rates == pytest.approx({step: compute_tiny_rate(step) for step in rates}, abs=1e-15)
    losses = [entry["lm_loss"] for entry in entries]
    assert losses[-1] < losses[0] - 1
