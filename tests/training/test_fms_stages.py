"""Command lines of fms-fsdp train in both of its stages, with its learning rate at each step."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from process_pool import ProcessPool, pretrain, succeed

from megatron.config.yaml_file import dump_yaml
from megatron.extras.interop.translators.translator import load_config
from megatron.observe.metrics import read_metrics

COMMON = (
    "--use_dummy_dataset=True --sharding_strategy=fsdp --batch_size=2 --learning_rate=1e-2 "
    "--report_interval=1 --checkpoint_interval=10"
)


def write_tiny_run(path: Path, words: str) -> list[str]:
    """Write the configuration of a command line with a small model. Return the command.

    Flags that give the model's size would turn off the defaults of fms-fsdp.
    """
    config = load_config([*COMMON.split(), *words.split()]).config
    model = replace(
        config.model,
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=88,
        num_attention_heads=2,
        num_query_groups=2,
        seq_length=32,
    )
    tiny = replace(
        config,
        model=model,
        tokenizer=replace(config.tokenizer, vocab_size=512),
        precision=replace(config.precision, bf16=False),
        batch=replace(config.batch, eval_iters=0),
    )
    path.write_text(dump_yaml(tiny))
    return ["--config", str(path), "--distributed-backend", "gloo"]


def read_entries(folder: Path) -> list[dict]:
    """Return one entry for each trained iteration."""
    return [entry for entry in read_metrics(folder / "metrics.jsonl") if "lm_loss" in entry]


def compute_initial_rate(step: int) -> float:
    """Return the rate of 40 steps by the formula of fms-fsdp, whose warm-up has 2 steps."""
    rise = 1 - (1 - min(step, 2) / 2) ** 2
    return 1e-2 * min(rise, 0.1 + 0.45 * (1 + math.cos(step / 40 * math.pi)))


def test_both_stages_have_the_rates_of_fms_fsdp(pool: ProcessPool, tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    initial = f"--num_steps=40 --ckpt_load_path={first} --ckpt_save_path={first}"
    succeed(pool.run(2, pretrain, write_tiny_run(tmp_path / "initial.yaml", initial)))
    entries = read_entries(first)
    rates = {entry["iteration"]: entry["learning_rate"] for entry in entries}
    assert rates == pytest.approx(
        {step: compute_initial_rate(step) for step in range(1, 41)}, rel=1e-9
    )

    annealing = f"--training_stage=annealing --num_steps=20 --ckpt_save_path={second}"
    words = write_tiny_run(tmp_path / "anneal.yaml", f"{annealing} --ckpt_load_path={first}")
    succeed(pool.run(2, pretrain, [*words, "--exit-interval", "10"]))
    words = write_tiny_run(tmp_path / "resume.yaml", f"{annealing} --ckpt_load_path={second}")
    assert "at iteration 10" in succeed(pool.run(2, pretrain, words))
    later = read_entries(second)
    rates = {entry["iteration"]: entry["learning_rate"] for entry in later}
    assert rates == pytest.approx(
        {step: 1e-2 * (1 - step / 20) for step in range(1, 21)}, rel=1e-9, abs=1e-18
    )
    # The second stage begins with the weights of the first one.
    assert later[0]["lm_loss"] < entries[0]["lm_loss"] - 1
