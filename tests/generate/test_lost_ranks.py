"""Ranks of a text generation that fail, are killed, hang or get a signal. None waits forever."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.launches import Launch
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import MERGES, VOCAB

from megatron.base.errors import ConfigError
from megatron.extras.inference.generate.load import join_ranks

SIZES = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 2e-2 --train-iters 1 --eval-iters 0 --mock-data"
)
LIMIT_SECONDS = 12.0
RANKS = 3
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def run(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost") / "run"
    paths = f"--vocab-file {VOCAB} --merge-file {MERGES} --save {folder}"
    succeed(pool.run(1, pretrain, f"{SIZES} {paths}".split()))
    return folder


@pytest.fixture
def launch(run: Path, tmp_path: Path) -> Iterator[Launch]:
    """Start three stages that generate for minutes, and wait for the first text."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n" * 5000)
    flags = (
        f"--load {run} --prompt-file {prompts} --json --batch-size 1 --device cpu "
        f"--pipeline-model-parallel-size {RANKS} --distributed-timeout-minutes {LIMIT_SECONDS / 60}"
    )
    started = Launch(
        flags.split(),
        RANKS,
        tmp_path / "logs",
        program="megatron.extras.inference.commands.generate",
    )
    try:
        started.wait_for_line("new_tokens")
        yield started
    finally:
        started.kill()


def fail_on_rank(failing: int) -> None:
    """Join three stages, one of which raises an error."""
    with join_ranks(1, RANKS, "cpu") as mesh:
        if mesh.rank == failing:
            raise ConfigError("this rank cannot go on")
        import torch.distributed as dist

        dist.barrier(mesh.control)


def test_an_error_of_one_rank_reaches_the_others(pool: ProcessPool) -> None:
    outcomes = pool.run(RANKS, fail_on_rank, 2)
    assert outcomes[2].kind == "ConfigError"
    errors = [str(outcomes[rank].error) for rank in (0, 1)]
    assert {outcomes[rank].kind for rank in (0, 1)} == {"LostRanksError"}
    assert any("has left the run: ConfigError: this rank cannot go on" in each for each in errors)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=FULL), pytest.param(2, marks=FULL)])
def test_the_others_end_after_a_kill(launch: Launch, victim: int) -> None:
    start = time.monotonic()
    launch.kill([victim])
    codes = launch.codes(by_themselves=True)
    assert time.monotonic() - start <= LIMIT_SECONDS
    assert codes[victim] == -signal.SIGKILL
    assert {code for rank, code in enumerate(codes) if rank != victim} == {1}
    assert "Traceback" not in launch.all_output()
    assert f"rank {victim} on " in launch.all_output()


@FULL
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_others_end_if_a_rank_hangs(launch: Launch, victim: int) -> None:
    start = time.monotonic()
    os.kill(launch.pids[victim], signal.SIGSTOP)
    while launch.running() != [victim]:
        assert time.monotonic() - start <= 2 * LIMIT_SECONDS, launch.all_output()
        time.sleep(0.05)
    assert time.monotonic() - start <= LIMIT_SECONDS + 1
    assert "does not answer" in launch.all_output()


@FULL
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(launch: Launch, number: signal.Signals) -> None:
    start = time.monotonic()
    for pid in launch.pids:
        os.kill(pid, number)
    assert launch.codes(by_themselves=True) == [-number] * RANKS
    assert time.monotonic() - start < 3
    assert "Traceback" not in launch.all_output()
