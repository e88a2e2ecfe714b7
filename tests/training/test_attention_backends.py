"""Runs with --attention-backend."""

import pytest
from training.runs import Runner


def test_an_impossible_kernel_ends_the_run_before_training(run: Runner) -> None:
    error = run.error("--attention-backend flash --attention-dropout 0.1")
    assert error.startswith("ConfigError: --attention-backend flash: none of these kernels")
    assert "--attention-dropout 0.1" in error
    assert "Add unfused at the end" in error
    assert not (run.folder / "metrics.jsonl").exists()


def test_another_kernel_trains_the_same_model(run: Runner, other: Runner) -> None:
    run("--num-layers 2")
    grid = "--tensor-model-parallel-size 2 --zero-stage 3 --checkpoint-activations"
    # The name of Megatron-LM for its own implementation.
    log = other(f"--num-layers 2 {grid} --attention-backend local", ranks=4)
    assert "--attention-backend local is read as --attention-backend unfused" in log
    assert "the first possible kernel of: unfused" in log
    assert other.losses() == pytest.approx(run.losses(), rel=1e-5)
