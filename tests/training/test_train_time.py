"""Runs whose length is a time (--train-time), as black boxes."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.launches import Job, saved_lines
from process_pool import ProcessPool, pretrain
from tiny_corpus import MERGES, VOCAB
from training.runs import Runner

from megatron.checkpoint.load import open_checkpoint
from megatron.observe.log_line import parse_validation_log_line
from megatron.observe.metrics import read_metrics

WITHOUT_LENGTH = ("--train-iters", "10")
FLAGS = (
    "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-fraction 0.1 --eval-iters 1 --split 9,1,0"
)
TOKENIZER = f"--vocab-file {VOCAB} --merge-file {MERGES}"


def drop_length(argv: list[str]) -> list[str]:
    """Return a command line without the --train-iters of `training.runs`."""
    at = argv.index("--train-iters")
    assert tuple(argv[at : at + 2]) == WITHOUT_LENGTH
    return argv[:at] + argv[at + 2 :]


def pretrain_and_list_rates(argv: list[str]) -> list[str]:
    """Train, and return each learning rate that this rank's engine got, bit for bit."""
    from megatron.engine.native import NativeEngine

    rates: list[str] = []
    original = NativeEngine.train_batch

    def record(self: NativeEngine, *args: object, **kwargs: object) -> object:
        rates.append(float(kwargs["lr"]).hex())  # type: ignore[arg-type]
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    NativeEngine.train_batch = record  # type: ignore[method-assign,assignment]
    try:
        pretrain(argv)
    finally:
        NativeEngine.train_batch = original  # type: ignore[method-assign]
    return rates


def read_state(folder: Path, iteration: int) -> dict:
    return open_checkpoint(folder, iteration).manifest.state


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers 2",
        "--zero-stage 2",
    ],
)
def test_all_ranks_use_the_same_rates_down_to_the_lowest(
    run: Runner, pool: ProcessPool, layout: str
) -> None:
    argv = drop_length(run.argv(f"{FLAGS} {layout} --train-time 3s"))
    outcomes = pool.run(2, pretrain_and_list_rates, argv)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].output
    first, second = (outcome.value for outcome in outcomes)
    assert first == second
    rates = [float.fromhex(rate) for rate in first]
    assert rates[0] == 0.0
    assert max(rates) <= 2e-3
    assert rates[-1] == 1e-4
    output = outcomes[0].output
    assert "training is complete at iteration" in output
    assert "report of the run:" in output
    (saved,) = saved_lines(output)
    assert saved == len(rates)
    state = read_state(run.folder, saved)
    # The limit is generous, because another process may have the CPU during the last step.
    assert state["elapsed_seconds"] < 3 + 5
    assert state["used_train_time"] == 3.0
    # The same command has nothing left to do.
    again = pool.run(2, pretrain_and_list_rates, argv)
    assert [outcome.value for outcome in again] == [[], []]
    assert f"training is complete at iteration {saved}" in again[0].output


@pytest.fixture
def job(corpus: str, tmp_path: Path) -> Iterator[Job]:
    cache = tmp_path / "cache"
    made = Job(corpus, cache, tmp_path / "job", tmp_path / "logs", f"{FLAGS} {TOKENIZER}", 2, None)
    made.argv = drop_length(made.argv)
    vocabulary = made.argv.index("--vocab-size")
    del made.argv[vocabulary : vocabulary + 2]
    yield made
    made.close()


def check_order_of_data(job: Job, pairs: list[tuple[int, int]]) -> None:
    """Check that each iteration continues where the one before it ended."""
    assert [iteration for iteration, _ in pairs] == list(range(1, len(pairs) + 1))
    assert [samples for _, samples in pairs] == [4 * (n + 1) for n in range(len(pairs))]


def test_a_run_that_is_killed_ends_in_the_time_that_is_left(job: Job) -> None:
    flags = "--train-time 8s --save-interval-time 1s --tensor-model-parallel-size 2"
    launch = job.launch(flags)
    launch.wait_for(lambda: saved_lines(launch.output()), "a save")
    assert launch.kill() == [0, 1]
    kept = saved_lines(launch.output())[-1]
    before = read_state(job.folder, kept)["elapsed_seconds"]
    assert 0 < before < 8
    output = job.succeed(flags)
    assert f"at iteration {kept}" in output
    last = saved_lines(output)[-1]
    state = read_state(job.folder, last)
    assert before < state["elapsed_seconds"] < 8 + 5
    assert "training is complete" in output
    entries = read_metrics(job.metrics_file)
    check_order_of_data(job, [(e["iteration"], e["consumed_samples"]) for e in entries])
    assert entries[-1]["learning_rate"] == 1e-4
    # All measures of the last evaluation.
    found = [parse_validation_log_line(line) for line in output.splitlines()]
    assert [entry["iteration"] for entry in found if entry is not None][-1] == last
    measured = [
        entry
        for line in job.metrics_file.read_text().splitlines()
        if (entry := json.loads(line)).get("kind") == "validation"
    ][-1]
    assert 0 <= measured["accuracy"] < 0.5
    # An untrained model has about log2(5000) = 12.3 bits for a token of 3 bytes.
    assert 1 < measured["bits_per_byte"] < 6
    assert "bits per byte" in output
    assert "next-token accuracy" in output


def test_a_signal_saves_the_time_that_was_used(job: Job) -> None:
    launch = job.launch("--train-time 1h --pipeline-model-parallel-size 2 --num-layers 2")
    launch.wait_for_line("consumed samples", 5)
    os.kill(launch.pids[1], signal.SIGTERM)
    assert launch.codes() == [0, 0]
    assert "received a signal to stop" in launch.output()
    assert "report of the run" not in launch.output()
    (saved,) = saved_lines(launch.output())
    state = read_state(job.folder, saved)
    assert 0 < state["elapsed_seconds"] < 3600
    assert state["used_train_time"] == 0.0
    assert 0 < state["lr_seconds"] < 3600


def test_another_time_needs_the_flag_for_another_schedule(run: Runner) -> None:
    def argv(flags: str) -> list[str]:
        return drop_length(run.argv(f"{FLAGS} {flags}"))

    (outcome,) = run.pool.run(1, pretrain, argv("--train-time 1h --exit-interval 2"))
    assert outcome.error is None
    (outcome,) = run.pool.run(1, pretrain, argv("--train-time 2h --exit-interval 2"))
    assert "--train-time in seconds: 7200.0 here, 3600.0 in the checkpoint" in str(outcome.error)
    # Of a run by iterations, nothing is known about its time.
    (outcome,) = run.pool.run(
        1, pretrain, argv("--train-iters 9 --exit-interval 2 --override-lr-scheduler")
    )
    assert outcome.error is None


def test_an_evaluation_that_is_longer_than_the_time(run: Runner) -> None:
    flags = f"{FLAGS} --train-time 2s --eval-iters 400"
    (outcome,) = run.pool.run(1, pretrain, drop_length(run.argv(flags)))
    assert outcome.error is None
    assert "training is complete at iteration 2" in outcome.output
    assert "of --train-time 2s. Lower --eval-iters" in outcome.output


@pytest.mark.full
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_real_corpus_by_time(job: Job, tmp_path: Path, architecture: str, kill: bool) -> None:
    """GPT-2 and Llama at equal parameters, in the time of $MEGATRON_TRAIN_TIME (default 3min)."""
    from megatron.schedule.clock import parse_duration

    text = os.environ.get("MEGATRON_TRAIN_TIME", "3min")
    total = parse_duration(text)
    shape = "--num-layers 4 --hidden-size 128 --num-attention-heads 2 --seq-length 128"
    if architecture == "llama":
        # 3 x 341 columns have the parameters of 2 x 512.
        shape += (
            " --normalization RMSNorm --glu-activation swiglu --position-embedding-type rotary "
            "--ffn-hidden-size 344 --no-add-bias-linear"
        )
    interval = max(1.0, total / 10)
    flags = (
        f"{shape} --train-time {text} --save-interval-time {interval:g}s --eval-interval-time "
        f"{interval:g}s --eval-iters 4 --split 90,5,5 --log-interval 20"
    )
    began = time.monotonic()
    launch = job.launch(flags)
    if kill:
        launch.wait_for(lambda: len(saved_lines(launch.output())) >= 4, "four saves")
        launch.kill()
        began = time.monotonic()
        launch = job.launch(flags)
    while launch.running() and time.monotonic() - began < 2 * total + 120:
        time.sleep(0.5)
    assert launch.codes() == [0, 0], launch.all_output()
    output = launch.output()
    last = saved_lines(output)[-1]
    state = read_state(job.folder, last)
    assert state["elapsed_seconds"] <= total
    entries = read_metrics(job.metrics_file)
    check_order_of_data(job, [(e["iteration"], e["consumed_samples"]) for e in entries])
    assert entries[-1]["learning_rate"] == 1e-4
    report = output[output.index("report of the run:") :]
    # Equal to 2 %. Llama has no table of positions and no biases.
    (parameters,) = re.findall(r"model +([0-9,]+) parameters", report)
    assert int(parameters.replace(",", "")) == pytest.approx(1_450_000, rel=0.02)
    for measure in ("loss", "perplexity", "bits per byte", "next-token accuracy", "tokens/s"):
        assert measure in report
    print(f"\n{architecture}, killed: {kill}\n{report}")
