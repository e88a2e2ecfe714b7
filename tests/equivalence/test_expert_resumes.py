"""Tests that runs with experts continue with other ranks, and that overflows keep the bias."""

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.corpus import (
    EVALUATED,
    NO_DROPOUT,
    command,
    count_iterations,
    curve,
    load_from,
    of_suite,
    validation,
    worst,
)
from equivalence.test_context_resumes import pretrain_until_killed, read_last
from equivalence.test_expert_layouts import BOUND, EP, PP2, TP2
from process_pool import ProcessPool, pretrain, start_without_lease, succeed

EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-layer-freq [0,1,1] "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss"
)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adam", "muon --muon-fp32-matmul-prec high"])
def test_kills_and_other_ranks_change_no_number(
    optimizer: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    model = f"--num-layers 3 --micro-batch-size 1 --save-interval 2 {EXPERTS} --optimizer"

    def make_argv(name: str, flags: str) -> list[str]:
        text = f"{model} {optimizer} {flags} {NO_DROPOUT} {EVALUATED}"
        return command(tmp_path / name, corpus, "llama", "ramp", text)

    outcomes = pool.run(4, pretrain_until_killed, make_argv("parts", f"{EP} 4"), 4)
    assert all("exit code -9" in str(outcome.error) for outcome in outcomes)
    argv = make_argv("parts", "--require-load")
    outcomes = pool.run(1, pretrain_until_killed, argv, 8)
    assert "exit code -9" in str(outcomes[0].error)
    layout = f"{EP} 2 {PP2} {TP2} --require-load --exit-interval 9"
    output = succeed(pool.run(4, pretrain, make_argv("parts", layout)))
    assert "at iteration 6" in output
    output = succeed(pool.run(1, pretrain, make_argv("parts", "--require-load")))
    assert "at iteration 9" in output
    succeed(pool.run(1, pretrain, make_argv("once", "")))
    found, expected = read_last(tmp_path / "parts"), read_last(tmp_path / "once")
    assert sorted(found) == sorted(expected) == list(range(1, 11))
    numbers = [[each[at] for at in sorted(each)] for each in (found, expected)]
    assert worst(*numbers) < BOUND
    assert worst(validation(tmp_path / "parts")[-1:], validation(tmp_path / "once")[-1:]) < BOUND


def test_a_resume_in_one_layout_is_equal_bit_by_bit(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    variation = of_suite("ramp")
    iterations = count_iterations(variation)
    half = iterations // 2
    layout = f"--num-layers 3 --micro-batch-size 1 --save-interval {half} {EXPERTS} {EP} 2 --bf16"

    def make_argv(name: str) -> list[str]:
        text = f"{layout} {NO_DROPOUT} {EVALUATED}"
        return command(tmp_path / name, corpus, "llama", variation, text)

    succeed(pool.run(2, pretrain, make_argv("once")))
    resumed = load_from(make_argv("rest"), tmp_path / "once", half)
    succeed(pool.run(2, pretrain, resumed))
    assert len(curve(tmp_path / "once")) == iterations
    assert curve(tmp_path / "rest") == curve(tmp_path / "once")[half:]


def overflow(argv: list[str]) -> dict[str, Any]:
    """Train until a step is applied. Return the outcomes, and this rank's biases after each."""
    run = start_without_lease(argv)
    assert run.sources.train is not None
    outcomes: list[str] = []
    biases = []
    while "APPLIED" not in outcomes:
        batch = run.sources.train.read_batch(4, 64)
        iteration = len(outcomes) + 1
        result = run.engine.train_batch(batch, iteration=iteration, lr=1e-3)
        outcomes.append(result.outcome.name)
        biases.append(
            [
                shard.tensor.clone()
                for shard in run.engine.shards(optimizer=False)
                if shard.name.endswith("router.balance")
            ]
        )
    run.reporter.close()
    run.sources.close()
    return {"outcomes": outcomes, "biases": biases}


def test_an_overflow_keeps_the_bias(pool: ProcessPool, corpus: str, tmp_path: Path) -> None:
    flags = f"{EXPERTS} {PP2} --num-layers 3 --fp16 --initial-loss-scale 1e9 --hysteresis 1"
    flags = f"{flags} --micro-batch-size 1 {NO_DROPOUT}"
    outcomes = pool.run(2, overflow, command(tmp_path, corpus, "llama", "ramp", flags))
    succeed(outcomes)
    for outcome in outcomes:
        steps = outcome.value["outcomes"]
        assert len(steps) > 1
        assert set(steps[:-1]) == {"OVERFLOW"}
        *before, after = outcome.value["biases"]
        assert before[0], "each stage has a layer with experts"
        for biases in before:
            assert all(bool((bias == 0).all()) for bias in biases)
        assert all(bool((bias.abs() > 0).any()) for bias in after)
        assert all(bias.dtype == torch.float32 for bias in after)
