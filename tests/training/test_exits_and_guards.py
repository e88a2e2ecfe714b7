"""Reasons to stop, NaN losses, evaluation, and errors before training starts."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from process_pool import PerRank, ProcessPool, pretrain, succeed
from training.runs import Runner

from megatron.base.errors import TrainingError
from megatron.config.batch import BatchConfig
from megatron.data.indexed import IndexedDatasetWriter
from megatron.observe.log_line import parse_kill_switch_line, parse_validation_log_line
from megatron.parallel.ranks import Ranks
from megatron.run.exits import Exits
from megatron.run.start.launch import read_launch

ROOT = Path(__file__).resolve().parents[2]


def test_exit_interval_saves_and_exits(run: Runner) -> None:
    output = run("--exit-interval 3")
    assert "successfully saved checkpoint at iteration       3 to" in output
    assert "exiting program at iteration 3" in output
    assert (run.folder / "latest").read_text() == "global_step3"
    assert (run.folder / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_exit_duration(run: Runner) -> None:
    output = run("--exit-duration-in-mins 0.00001")
    assert "exiting program after" in output
    assert sorted(run.losses()) == [1]


def test_kill_switch(run: Runner, tmp_path: Path) -> None:
    switch = tmp_path / "kill"
    run("--exit-interval 2")
    switch.touch()
    error = run.error(f"--kill-switch-path {switch}")
    assert f"Detected kill switch at {switch}" in error
    # tools/slurm_status.py names the file to remove.
    assert parse_kill_switch_line(error) == str(switch)
    assert sorted(run.losses()) == [1, 2]


def send_until_end(process: subprocess.Popen) -> None:
    """Send signals to stop until a process has ended, for less than `_REPEATED_SECONDS`."""
    end = time.monotonic() + 7
    for number in itertools.cycle([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]):
        if process.poll() is not None or time.monotonic() > end:
            return
        process.send_signal(number)
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGHUP, 1), (signal.SIGTERM, 2)])
def test_a_signal_saves_and_ends_all_ranks(run: Runner, number: signal.Signals, ranks: int) -> None:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(ROOT / "pretrain_gpt.py"), *run.argv("--train-iters 100000")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "iteration        3/" in line:
                process.send_signal(number)
                if ranks == 1:
                    # Slurm sends the signal to the tasks, and srun passes it on to them again. Some
                    # scripts let Slurm send SIGUSR1 or SIGUSR2 before the time limit.
                    repeating = threading.Thread(target=send_until_end, args=(process,))
                    repeating.start()
                break
        rest, _ = process.communicate(timeout=60)
        watchdog.cancel()
    output = "".join(lines) + rest
    assert "received a signal to stop" in output
    assert "exiting program at iteration" in output
    last = int((run.folder / "latest_checkpointed_iteration.txt").read_text())
    assert last >= 3
    assert max(run.losses()) == last
    if ranks == 1:
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("launcher", "load", "message"),
    [
        ("TORCHELASTIC_RUN_ID", 0.0, "torchrun kills it 30 s after"),
        ("SLURM_JOB_ID", 1e6, r"as Slurm does \(KillWait\)"),
        ("", 1e6, "Other programs use the cores of this machine. OMP_NUM_THREADS=1"),
        ("", 0.0, ""),
    ],
)
def test_a_slow_step_is_reported_once_with_its_reason(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    load: float,
    message: str,
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    if launcher:
        monkeypatch.setenv(launcher, "1")
    exits = Exits(cast(BatchConfig, None), Ranks(), print, saves=True)
    # The first step of a launch may have compiled the model.
    for iteration, seconds in ((7, 6581.0), (8, 19.0), (9, 22.0), (10, 23.0)):
        exits.warn_about_slow_step(iteration, seconds)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(message)
    assert all(re.match(f"warning: iteration 9 took 22 s.*{message}", line) for line in lines)


def test_signals_that_the_parent_ignores_stay_ignored() -> None:
    """nohup ignores SIGHUP, and a shell ignores SIGINT for jobs in the background."""
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        exits = Exits(cast(BatchConfig, None), Ranks(), print, saves=True)
        exits.catch_signals()
        ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
        assert ignored == [signal.SIGINT, signal.SIGHUP]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_later_signal_ends_a_process_that_reaches_no_iteration() -> None:
    code = """
import time
from megatron.parallel.ranks import Ranks
from megatron.run import exits
exits._REPEATED_SECONDS = 0.5
ranks = Ranks()
ranks.progress.iteration = 1
exits.Exits(None, ranks, print, saves=True).catch_signals()
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for pause in (0.1, 0.1, 0.8):
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            time.sleep(pause)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_named_validation_sets_are_evaluated(run: Runner) -> None:
    data = run.data
    argv = [
        *run.argv("--eval-interval 5 --eval-iters 2"),
        "--train-weighted-split-paths",
        f"train: 1 0:0.8 {data}",
        "--valid-weighted-split-paths",
        f"left: 1 0.8:0.9 {data}",
        f"right: 1 0.9:1 {data}",
    ]
    at = argv.index("--data-path")
    del argv[at : at + 2]
    output = succeed(run.pool.run(1, pretrain, argv))
    found = [entry for entry in map(parse_validation_log_line, output.splitlines()) if entry]
    assert [(entry["name"], entry["iteration"]) for entry in found] == [
        ("left", 5),
        ("right", 5),
        ("left", 10),
        ("right", 10),
    ]
    assert found[0]["lm_loss"] != found[1]["lm_loss"]


def test_end_of_training_is_evaluated_for_any_interval(run: Runner, other: Runner) -> None:
    flags = "--eval-interval 4 --eval-iters 1 --split 60,30,10"
    found = [entry for entry in map(parse_validation_log_line, run(flags).splitlines()) if entry]
    names = [(entry["name"], entry["iteration"]) for entry in found]
    assert names == [("validation", 4), ("validation", 8), ("validation", 10), ("test", 10)]
    # A run that ended earlier and was extended evaluates the same samples as one that was not.
    for iterations in (6, 10):
        other(f"{flags} --train-iters {iterations}")
    assert [e["validation"] for e in other.metrics() if e["iteration"] == 8] == [
        e["validation"] for e in run.metrics() if e["iteration"] == 8
    ]


def test_eval_only_trains_nothing_and_is_repeatable(run: Runner) -> None:
    run("--exit-interval 5 --eval-iters 2 --split 80,10,10")
    weights = (run.folder / "global_step5" / "rank_00000.safetensors").read_bytes()
    first = run("--eval-only --eval-iters 2 --split 80,10,10")
    second = run("--eval-only --eval-iters 2 --split 80,10,10")
    lines = [line for line in first.splitlines() if "loss at iteration 5" in line]
    assert [line.split(" loss")[0].strip() for line in lines] == ["validation", "test"]
    assert all(line in second for line in lines)
    assert (run.folder / "global_step5" / "rank_00000.safetensors").read_bytes() == weights
    assert sorted(run.losses_of_training()) == [1, 2, 3, 4, 5]


def test_eval_only_evaluates_the_same_samples_at_every_checkpoint(run: Runner) -> None:
    """The position in the validation data and the flags of the run do not move the window."""
    evaluation = "--eval-iters 1 --split 50,45,5"
    # Such small steps change no weight, so all checkpoints have the same weights.
    still = f"{evaluation} --lr 1e-30"
    run(f"{still} --exit-interval 2 --eval-interval 1")
    first = run(f"{evaluation} --eval-only")
    run(f"{still} --exit-interval 4 --eval-interval 1")
    second = run(f"{evaluation} --eval-only --train-iters 500 --eval-interval 7")
    assert "evaluating the first 4 samples of each set" in first
    losses = [
        [entry["lm_loss"] for entry in map(parse_validation_log_line, output.splitlines()) if entry]
        for output in (first, second)
    ]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_eval_only_needs_no_schedule_of_the_learning_rate(run: Runner) -> None:
    evaluation = "--eval-iters 1 --split 80,10,10"
    run("--exit-interval 2")
    run("--exit-interval 4 --lr 1e-3 --lr-decay-style cosine --override-lr-scheduler")
    for schedule in ("", "--lr 5e-4", "--lr-warmup-iters 700 --lr-decay-style cosine"):
        output = run(f"{evaluation} --eval-only {schedule}")
        assert "validation loss at iteration 4" in output
        assert "learning rate" not in output


def test_evaluation_does_not_change_training(run: Runner, other: Runner) -> None:
    run("--eval-interval 2 --eval-iters 3 --split 80,10,10")
    other("--split 80,10,10")
    assert run.losses() == other.losses()


def test_evaluation_continues_at_its_position_after_a_resume(run: Runner, other: Runner) -> None:
    flags = "--eval-interval 2 --eval-iters 1 --split 50,45,5"
    run(flags)
    other(f"{flags} --exit-interval 4")
    other(flags)
    validations = [
        [entry.get("validation") for entry in runner.metrics()] for runner in (run, other)
    ]
    assert validations[0] == validations[1]


def poisoned_pretrain(argv: list[str], poison: list[int]) -> None:
    """Run the main job with a weight that is infinite during these iterations."""
    import megatron.run.pretrain as pretrain_module
    from megatron.commands.parts import choose_parts
    from megatron.engine.native import NativeEngine
    from megatron.extras.interop.translators.translator import load_config

    original = NativeEngine.train_batch

    def train_batch(self, microbatches, *, iteration, **options):
        weight = self.stages[0].embedding.word.weight.data
        before = weight.clone()
        if iteration in poison:
            weight.fill_(float("inf"))
        result = original(self, microbatches, iteration=iteration, **options)
        if iteration in poison:
            weight.copy_(before)
        return result

    NativeEngine.train_batch = train_batch  # type: ignore[method-assign]
    try:
        loaded = load_config(argv)
        pretrain_module.pretrain(read_launch(loaded, choose_parts(loaded.config)))
    finally:
        NativeEngine.train_batch = original  # type: ignore[method-assign]


def test_nan_step_is_counted_and_changes_no_weight(run: Runner, pool: ProcessPool) -> None:
    output = succeed(
        pool.run(
            1,
            poisoned_pretrain,
            run.argv("--lr-decay-style linear --lr-decay-iters 20 --split 1,0,0"),
            [4, 5],
        )
    )
    line = next(line for line in output.splitlines() if " iteration        4/" in line)
    assert "number of skipped iterations:   1 | number of nan iterations:   1" in line
    metrics = {entry["iteration"]: entry for entry in run.metrics()}
    # Only an applied step moves the learning rate, but every step consumes its samples.
    assert metrics[4]["learning_rate"] == metrics[3]["learning_rate"]
    assert metrics[4]["consumed_samples"] == metrics[3]["consumed_samples"] + 4
    assert np.isfinite([metrics[i]["lm_loss"] for i in (6, 7, 8, 9, 10)]).all()


def test_too_many_nan_steps_in_a_row_stop_the_run(run: Runner, pool: ProcessPool) -> None:
    outcome = pool.run(
        1, poisoned_pretrain, run.argv("--max-nan-iterations 3"), list(range(3, 11))
    )[0]
    assert outcome.kind == TrainingError.__name__
    assert "3 iterations in a row up to 5" in str(outcome.error)
    assert "--skip-train-iteration-range" in str(outcome.error)


def test_rank_with_a_different_configuration_is_named(run: Runner, pool: ProcessPool) -> None:
    commands = [run.argv(""), run.argv("--seed 99")]
    outcomes = pool.run(2, pretrain, PerRank(commands))
    for outcome in outcomes:
        assert outcome.kind == "LayoutError"
        assert "rank 1 on" in str(outcome.error)
        assert "seed" in str(outcome.error)
        assert "1234" in str(outcome.error)
        assert "99" in str(outcome.error)


def test_token_beyond_the_vocabulary_is_found_while_training(run: Runner, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "late", np.uint16) as writer:
        # The second document is beyond the part that is scanned at the start.
        writer.add_document(np.zeros((1 << 20) + 10, np.uint16))
        writer.add_document(np.full(5000, 4999, np.uint16))
        writer.finalize()
    error = run.error(
        f"--data-path {tmp_path / 'late'} --vocab-size 100 --train-iters 8000 --split 1,0,0"
    )
    assert "4999" in error
    assert "100" in error


def test_checkpoints_without_a_pointer_are_an_error(run: Runner) -> None:
    run("--exit-interval 2")
    (run.folder / "latest").unlink()
    (run.folder / "latest_checkpointed_iteration.txt").unlink()
    error = run.error()
    assert "global_step2" in error
    assert "--allow-fresh-start" in error
    (run.folder / "latest").write_text("global_step7")
    error = run.error()
    assert "global_step7, which is not a finished checkpoint" in error
    assert "global_step2" in error
    (run.folder / "latest").write_text("the newest one")
    assert "names no checkpoint" in run.error()
    (run.folder / "latest").unlink()
    run("--allow-fresh-start --exit-interval 1 --train-iters 1")
    assert (run.folder / "latest").read_text() == "global_step1"


def test_require_load(run: Runner) -> None:
    assert "--require-load" in run.error("--require-load")


def test_empty_folder_starts_from_scratch(run: Runner) -> None:
    output = run("--train-iters 1")
    first = "the first start of a run has no checkpoint to load, which is normal\n"
    line = f"{first}Unable to find latest file at {run.folder}/latest\nstarting from scratch\n"
    assert line in output
