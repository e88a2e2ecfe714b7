"""Tests that runs continue with other numbers of ranks for each sequence."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from equivalence.corpus import EVALUATED, command, curve, validation, worst
from equivalence.corpus import NO_DROPOUT as PLAIN
from equivalence.test_context_layouts import A2A, BOUND, EOD, FIXTURES, TP2
from process_pool import ProcessPool, pretrain, succeed
from tiny_corpus import JSONL

from megatron.extras.operations.commands import rollback
from megatron.observe.metrics import read_metrics


def pretrain_until_killed(argv: list[str], iteration: int) -> None:
    """Train until the ranks are killed at the start of an iteration."""
    from megatron.engine.native import NativeEngine

    train_batch = NativeEngine.train_batch

    def train_or_die(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["iteration"] == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_batch(engine, *args, **kwargs)

    NativeEngine.train_batch = train_or_die  # type: ignore[method-assign, assignment]
    try:
        pretrain(argv)
    finally:
        NativeEngine.train_batch = train_batch  # type: ignore[method-assign]


def read_last(folder: Path) -> dict[int, tuple[float, float]]:
    """Return (loss, gradient norm) of each iteration, as it was trained last."""
    return {
        entry["iteration"]: (entry["lm_loss"], entry["grad_norm"])
        for entry in read_metrics(folder / "metrics.jsonl")
        if "lm_loss" in entry
    }


@pytest.mark.full
def test_a_kill_and_a_rollback_between_other_ranks_of_a_sequence(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """Checkpoints and the position in the data do not know how many ranks share a sequence."""
    phases = tmp_path / "phases.yaml"
    phases.write_text(
        f"- data_path: {corpus}\n"
        f"- from_iteration: 4\n  data_path: [0.3, {corpus}, 0.7, {corpus}]\n  seed: 5\n"
        f"- from_iteration: 8\n  data_path: {corpus}\n  seed: 6\n"
    )

    def make_argv(name: str, flags: str) -> list[str]:
        model = f"--num-layers 2 --micro-batch-size 2 --save-interval 2 {flags} {PLAIN} {EVALUATED}"
        argv = command(tmp_path / name, corpus, "llama", "ramp", model)
        at = argv.index("--data-path")
        return [*argv[:at], "--data-phases", str(phases), *argv[at + 2 :]]

    parts = tmp_path / "parts"
    argv = make_argv("parts", "--context-parallel-size 4")
    outcomes = pool.run(4, pretrain_until_killed, argv, 6)
    assert all("exit code -9" in str(outcome.error) for outcome in outcomes)
    output = succeed(pool.run(1, pretrain, make_argv("parts", "--exit-interval 8 --require-load")))
    assert "at iteration 4" in output
    assert rollback.main([str(parts), "--to", "6", "--reason", "a spike"]) == 0
    layout = f"--context-parallel-size 2 {TP2} {A2A} --require-load"
    output = succeed(pool.run(4, pretrain, make_argv("parts", layout)))
    assert "at iteration 6" in output
    succeed(pool.run(1, pretrain, make_argv("once", "")))
    found, expected = read_last(parts), read_last(tmp_path / "once")
    assert sorted(found) == sorted(expected) == list(range(1, 11))
    numbers = [[each[at] for at in sorted(each)] for each in (found, expected)]
    assert worst(*numbers) < BOUND
    # The evaluation after iteration 4 was before the kill, and that after iteration 8 was repeated.
    assert worst(validation(parts)[-1:], validation(tmp_path / "once")[-1:]) < BOUND


@pytest.mark.full
def test_streamed_text_and_its_position(pool: ProcessPool, tmp_path: Path) -> None:
    """Ranks of a sequence read the same texts, and a resume with other ranks continues there."""
    text = " ".join(
        (
            "--dataset-format jsonl --logical-shards 4 --seq-length 48 --num-layers 2",
            f"--hidden-size 48 --num-attention-heads 4 --data-path {JSONL} {PLAIN} {EOD}",
            f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --micro-batch-size 2 --lr 1e-3",
            f"--merge-file {FIXTURES}/gpt2-tiny-merges.txt --global-batch-size 8 --train-iters 8",
            "--log-interval 1 --eval-iters 0 --split 100,0,0 --spike-guard skip-step",
            f"--hang-timeout 100 --data-cache-path {tmp_path}/cache",
        )
    )
    worlds = (
        ("once", 1, ""),
        ("parts", 4, "--context-parallel-size 2 --exit-interval 3"),
        ("parts", 3, "--context-parallel-size 3 --require-load"),
    )
    for name, ranks, flags in worlds:
        paths = f"--save {tmp_path}/{name} --load {tmp_path}/{name}"
        succeed(pool.run(ranks, pretrain, f"{text} {paths} {flags}".split()))
    assert len(curve(tmp_path / "once")) == 8
    assert worst(curve(tmp_path / "parts"), curve(tmp_path / "once")) < BOUND
