"""Runs with masked tokens: what their loss is the mean of, and what a resume keeps."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from process_pool import ProcessPool, succeed
from training.runs import Runner, rewrite_config

from megatron.run.start.launch import read_launch

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
FILES = f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt"
EOD = f"{FILES} --eod-mask-loss --reset-position-ids --reset-attention-mask"
SIZE = "--global-batch-size 8 --seq-length 64 --train-iters 4"
EVALUATED = "--eval-interval 2 --eval-iters 2 --split 80,20,0"


def read_numbers(run: Runner) -> list[float]:
    """Return loss and gradient norm of each iteration, and the losses of the evaluations."""
    return [
        number
        for entry in run.metrics()
        for number in (
            *(entry[key] for key in ("lm_loss", "grad_norm") if key in entry),
            *entry.get("validation", {}).values(),
        )
    ]


GOLDFISH = (
    "--goldfish-loss --goldfish-k 4 --goldfish-h 5 --curriculum-schedule-type fixed_discrete "
    "--curriculum-difficulties 32 64 --curriculum-max-steps 2 --train-tokens 1000000 "
    "--lr-decay-tokens 10000"
)


@pytest.mark.parametrize("masks", [EOD, GOLDFISH], ids=["eod", "goldfish and curriculum"])
def test_the_micro_batch_size_changes_no_number(masks: str, run: Runner, other: Runner) -> None:
    flags = f"{masks} {SIZE} {EVALUATED}"
    log = run(f"{flags} --micro-batch-size 1")
    assert "mean over all counted tokens of a step" in log
    assert "the default of a new run" in log
    other(f"{flags} --micro-batch-size 8")
    assert len(read_numbers(run)) == 2 * 4 + 2
    assert read_numbers(run) == pytest.approx(read_numbers(other), rel=1e-5)


def test_a_resume_keeps_the_mean_of_its_checkpoint(run: Runner, other: Runner) -> None:
    flags = f"{EOD} {SIZE} --micro-batch-size 1"
    log = other(f"{flags} --loss-mean microbatch")
    assert "mean of microbatch means" in log
    assert "given by --loss-mean" in log
    run(f"{flags} --loss-mean microbatch --exit-interval 1")
    log = run(f"{flags} --exit-interval 2")
    assert "as in the checkpoint" in log
    assert "changed since the checkpoint" not in log
    # A version without the field knew one mean only.
    rewrite_config(run.folder / "global_step2", r"  loss_mean:.*\n", "")
    log = run(f"{flags} --exit-interval 3")
    assert "mean of microbatch means" in log
    assert "as in the checkpoint" in log
    # A flag of the command line has priority.
    log = run(f"{flags} --calculate-per-token-loss")
    assert "given by --calculate-per-token-loss" in log
    assert ["--loss-mean", '"microbatch"', '"step"'] in [line.split() for line in log.splitlines()]
    assert read_numbers(run)[:6] == read_numbers(other)[:6]
    assert read_numbers(run)[6] != read_numbers(other)[6]


def test_an_evaluation_is_a_mean_over_its_tokens(run: Runner) -> None:
    """Its loss is the same however its samples are divided into batches."""
    flags = f"{EOD} --split 80,20,0 --lr 1e-2"
    run(flags)
    losses = []
    for sizes in ("--global-batch-size 64 --eval-iters 2", "--global-batch-size 2 --eval-iters 64"):
        log = run(f"{flags} {sizes} --eval-only")
        losses.append(float(log.partition("lm loss value: ")[2].split()[0]))
    assert losses[0] == pytest.approx(losses[1], rel=3e-7)


def pretrain_without_tokens(argv: list[str], empty: tuple[int, ...]) -> None:
    """Run the main job with data of which nothing counts in some iterations and in evaluations."""
    import torch

    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts
    from megatron.engine.native import NativeEngine
    from megatron.extras.interop.translators.translator import load_config

    def mask_all(microbatches: Any) -> Any:
        mask = torch.zeros(microbatches[0].tokens.shape)
        return [dataclasses.replace(each, loss_mask=mask) for each in microbatches]

    train = NativeEngine.train_batch
    evaluate = NativeEngine.eval_batch

    def train_batch(self: Any, microbatches: Any, *, iteration: int, **options: Any) -> Any:
        if iteration in empty:
            microbatches = mask_all(microbatches)
        return train(self, microbatches, iteration=iteration, **options)

    def eval_batch(self: Any, microbatches: Any, tally: Any) -> float:
        return evaluate(self, mask_all(microbatches), tally)

    NativeEngine.train_batch = train_batch  # type: ignore[method-assign]
    NativeEngine.eval_batch = eval_batch  # type: ignore[assignment, method-assign]
    try:
        loaded = load_config(argv)
        pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))
    finally:
        NativeEngine.train_batch = train  # type: ignore[method-assign]
        NativeEngine.eval_batch = evaluate  # type: ignore[method-assign]


def test_steps_without_tokens_are_reported_and_change_nothing(
    pool: ProcessPool, run: Runner
) -> None:
    """They do not count as steps that are not finite."""
    argv = run.argv(
        f"{EOD} --train-iters 8 --lr-decay-style linear --log-params-norm --max-nan-iterations 1 "
        "--eval-iters 1 --split 80,20,0"
    )
    log = succeed(pool.run(2, pretrain_without_tokens, argv, (4, 5, 6)))
    assert log.count("counts in the loss, so it changes no weights") == 3
    assert "no token of the evaluation counts" in log
    entries = {entry["iteration"]: entry for entry in run.metrics() if "lm_loss" in entry}
    norms = {entry["params_norm"] for number, entry in entries.items() if 3 <= number <= 6}
    rates = {entry["learning_rate"] for number, entry in entries.items() if 3 <= number <= 6}
    assert len(norms) == len(rates) == 1
    empty = [number for number, entry in entries.items() if entry["lm_loss"] is None]
    assert empty == [4, 5, 6]
    assert sum(entry["skipped_iterations"] for entry in entries.values()) == 3
    assert sum(entry["nan_iterations"] for entry in entries.values()) == 0
    assert entries[7]["params_norm"] not in norms
    assert entries[8]["consumed_samples"] == 32
