"""A signal to stop, mostly to one rank, while it or another rank waits or works outside of a step.

The right end of each case: all ranks end by themselves with the exit code 0, soon after what cannot
be interrupted (a step, a save). The same command goes on, and its numbers are those of a run
without a signal.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from data.row_files import make_documents, write_dataset
from faults.launches import Launch, NewJob, saved_lines
from faults.test_lease_runs import ELSEWHERE, WAITING, alter_lease, launch_and_kill
from faults.test_spike_guard_kills import FLAGS as ROLLBACK
from faults.test_spike_guard_kills import ITERATIONS, summarise
from faults.test_stop_moments import EXPORTING, SECONDS, read_numbers, stop
from process_pool import ProcessPool, pretrain, succeed
from scoring.local_tasks import write_tasks
from tiny_corpus import MERGES, VOCAB
from training.runs import Runner
from training.spiky_corpus import random_stretch, write_corpus
from training.test_spike_guard_runs import make_argv
from training.test_stream_runs import StreamRunner

ENDLESS = "--train-iters 300000"
SLOW = 4.0
"""Seconds that something takes which no signal interrupts."""


def is_last(rank: int) -> bool:
    return rank == int(os.environ["WORLD_SIZE"]) - 1


def slow_down(kind: type, name: str, call: int, seconds: float, line: str) -> None:
    """Let one call of a method take longer, after it has printed a line."""
    original = getattr(kind, name)
    calls = 0

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            print(line, flush=True)
            time.sleep(seconds)
        return original(self, *arguments, **options)

    setattr(kind, name, slow)


def compile_slowly(rank: int) -> None:
    """Let the first step of the last rank take long, as with a compilation."""
    from megatron.engine.native import NativeEngine

    if is_last(rank):
        slow_down(NativeEngine, "train_batch", 1, SLOW, "the step compiles")


def hang_in_stream(rank: int) -> None:
    """Let a read of streamed data hang on the last rank, as with a server that does not answer."""
    from megatron.extras.samples.stream.source import StreamSource

    if is_last(rank):
        slow_down(StreamSource, "_read", 4, 600, "the stream hangs")


def hang_at_the_next_size(rank: int) -> None:
    """Let the read of the first batch of a larger size hang on the last rank."""
    from megatron.data.indexed_source import IndexedSource

    fill = IndexedSource.fill

    def hang(self: IndexedSource, positions: Any, samples: Any) -> None:
        if len(positions) > 4:
            print("the read hangs", flush=True)
            time.sleep(600)
        fill(self, positions, samples)

    if is_last(rank):
        IndexedSource.fill = hang  # type: ignore[method-assign]


def signal_itself_in_tasks(rank: int) -> None:
    """Send SIGTERM to the last rank when it computes the first likelihoods."""
    from megatron.extras.inference.scoring.likelihood import EngineScorer

    make = EngineScorer._make_microbatches

    def make_and_signal(self: EngineScorer, rows: Any, length: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return make(self, rows, length)

    if is_last(rank):
        EngineScorer._make_microbatches = make_and_signal  # type: ignore[method-assign]


@pytest.mark.full
def test_a_first_step_that_compiles(new_job: NewJob) -> None:
    job = new_job("job", ENDLESS, ranks=2)
    launch = job.launch(prepare=compile_slowly)
    launch.wait_for(lambda: "compiles" in launch.output(1), "the step")
    assert stop(launch, 0) < SLOW + SECONDS
    assert saved_lines(launch.output()) == [1]
    job.check(1, [1])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_that_hangs(ranks: int, pool: ProcessPool, tmp_path: Path) -> None:
    write_dataset(tmp_path / "rows" / "web", make_documents(600, 0))
    write_dataset(tmp_path / "rows" / "code", make_documents(200, 1))
    whole = StreamRunner(pool, str(tmp_path / "rows"), tmp_path / "whole")
    whole("--save-interval 100", ranks=ranks)
    run = StreamRunner(pool, str(tmp_path / "rows"), tmp_path / "run")
    launch = Launch(
        run.argv("--save-interval 100"), ranks, tmp_path / "log", prepare=hang_in_stream
    )
    launch.wait_for(lambda: "hangs" in launch.output(ranks - 1), "the read")
    time.sleep(0.5)
    assert stop(launch, 0) < SECONDS
    assert len(saved_lines(launch.output())) == 1
    run("--save-interval 100", ranks=ranks)
    assert run.losses() == whole.losses()
    assert run.state(10) == whole.state(10)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_first_batch_of_a_larger_size(ranks: int, new_job: NewJob) -> None:
    flags = f"{ENDLESS} --rampup-batch-size 4 8 16 --global-batch-size 12 --micro-batch-size 2"
    job = new_job("job", flags, ranks)
    launch = job.launch(prepare=hang_at_the_next_size)
    launch.wait_for(lambda: "the read hangs" in launch.output(ranks - 1), "the read")
    time.sleep(0.5)
    assert stop(launch, 0) < SECONDS
    saved = saved_lines(launch.output())
    assert len(saved) == 1
    job.check(saved[0], saved)


@pytest.mark.full
def test_an_asynchronous_save(new_job: NewJob) -> None:
    flags = f"{ENDLESS} --async-save --save-interval 3 --micro-batch-size 1 --num-layers 3"
    flags += " --pipeline-model-parallel-size 3"
    job = new_job("job", flags, ranks=3)
    slow = {"megatron.checkpoint.stages.write_shard_file": SLOW}
    launch = job.launch(delays=dict.fromkeys(range(3), slow))
    launch.wait_for_line("takes 4 s")
    assert stop(launch, 2) < SLOW + SECONDS
    saved = saved_lines(launch.output())
    assert saved[0] == 3
    job.check(saved[-1], saved)
    end = f"--exit-interval {saved[-1] + 4}"
    job.succeed(end)
    reference = new_job("reference", flags, ranks=3)
    reference.succeed(end)
    assert read_numbers(job) == read_numbers(reference)


@pytest.mark.full
def test_a_wait_for_a_lease(new_job: NewJob) -> None:
    job = new_job("job", f"{ENDLESS} --save-interval 4", ranks=2)
    launch_and_kill(job)
    alter_lease(job, ELSEWHERE)
    before = job.snapshot()
    launch = job.launch()
    launch.wait_for_line(WAITING)
    assert stop(launch, 1) < SECONDS
    assert "interrupted before training started" in launch.output()
    assert job.snapshot() == before


ROLLING_BACK = "megatron.extras.watch.guard.spike_response.execute_rollback"


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rollback_inside_the_job(ranks: int, pool: ProcessPool, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "data" / "text", ITERATIONS, random_stretch(43, 52))
    flags = f"{ROLLBACK} --num-layers 2 --pipeline-model-parallel-size {ranks}"
    whole, run = tmp_path / "whole", tmp_path / "run"
    succeed(pool.run(ranks, pretrain, make_argv(whole, corpus, ITERATIONS, flags)))
    argv = make_argv(run, corpus, ITERATIONS, flags)
    for number in range(3):
        delays = {0: {ROLLING_BACK: 1.0}} if number == 0 else {}
        launch = Launch(argv, ranks, tmp_path / f"log{number}", delays=delays)
        if number == 0:
            launch.wait_for_line("takes 1 s")
        else:
            launch.wait_for_line("rolled back" if number == 1 else "this run resumes")
            time.sleep(0.1)
        assert launch.running(), launch.all_output()
        assert stop(launch, ranks - 1) < SECONDS
        assert "Error" not in launch.all_output(), launch.all_output()
    succeed(pool.run(ranks, pretrain, argv))
    assert summarise(run) == summarise(whole)


@pytest.mark.full
def test_repeated_signals_within_a_second(new_job: NewJob) -> None:
    job = new_job("job", ENDLESS, ranks=2)
    slow = {"megatron.checkpoint.stages.write_shard_file": SLOW}
    launch = job.launch(delays=dict.fromkeys(range(2), slow))
    launch.wait_for_line("iteration        2/")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for rank in range(2):
            os.kill(launch.pids[rank], number)
        time.sleep(0.25)
    start = time.monotonic()
    assert launch.codes(by_themselves=True) == [0, 0], launch.all_output()
    assert time.monotonic() - start < SLOW + SECONDS
    saved = saved_lines(launch.output())
    job.check(saved[-1], saved)


@pytest.mark.full
@pytest.mark.parametrize(("second", "ends"), [(signal.SIGTERM, False), (signal.SIGUSR1, True)])
def test_a_second_signal_during_a_save(second: int, ends: bool, new_job: NewJob) -> None:
    """SIGTERM at the time limit, after SIGUSR1 before it, does not take the rest of the time."""
    job = new_job("job", ENDLESS, ranks=2)
    slow = {"megatron.checkpoint.stages.write_shard_file": SLOW}
    constants = {"megatron.run.exits._REPEATED_SECONDS": 1.0}
    launch = job.launch(delays=dict.fromkeys(range(2), slow), constants=constants)
    launch.wait_for_line("iteration        2/")
    for number in (signal.SIGUSR1, second):
        for rank in range(2):
            os.kill(launch.pids[rank], number)
        launch.wait_for_line("takes 4 s")
        time.sleep(1.5)
    codes = launch.codes(by_themselves=True)
    assert codes == ([-second] * 2 if ends else [0, 0]), launch.all_output()
    assert len(saved_lines(launch.output())) == (not ends)


@pytest.mark.full
def test_tasks_on_three_stages(
    pool: ProcessPool, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks", documents=8)
    flags = (
        "--num-layers 3 --pipeline-model-parallel-size 3 --micro-batch-size 2 "
        "--global-batch-size 4 --train-iters 4 --save-interval 2 --eval-tasks choose_locally "
        f"--eval-tasks-interval 2 --eval-tasks-folder {tmp_path / 'tasks'} "
        f"--vocab-file {VOCAB} --merge-file {MERGES} --vocab-size None"
    )
    whole = Runner(pool, corpus, tmp_path / "whole")
    first = Launch(whole.argv(flags), 3, tmp_path / "log0")
    assert first.codes() == [0, 0, 0], first.all_output()
    run = Runner(pool, corpus, tmp_path / "run")
    launch = Launch(run.argv(flags), 3, tmp_path / "log1", prepare=signal_itself_in_tasks)
    assert launch.codes(by_themselves=True) == [0, 0, 0], launch.all_output()
    assert "a signal interrupts the tasks" in launch.output()
    assert saved_lines(launch.output()) == [2]
    second = Launch(run.argv(flags), 3, tmp_path / "log2")
    assert second.codes() == [0, 0, 0], second.all_output()

    def read(runner: Runner) -> list[Any]:
        return [(e["iteration"], e.get("lm_loss"), e.get("tasks")) for e in runner.metrics()]

    assert sorted(map(str, read(run))) == sorted(map(str, read(whole)))


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, None)])
def test_a_wait_for_the_last_export(ranks: int, rank: int | None, new_job: NewJob) -> None:
    exporting = EXPORTING.replace("15", "3")
    job = new_job("job", f"--train-iters 3 --save-interval 3 {exporting}", ranks)
    launch = job.launch()
    launch.wait_for_line("waiting for the export of iteration 3")
    children = psutil.Process(launch.pids[0]).children(recursive=True)
    if rank is not None and ranks > 1:
        assert launch.running() == [0, 1]
    assert stop(launch, rank) < SECONDS
    assert not psutil.wait_procs(children, 1)[1]
    assert "the export of iteration 3 was ended with the run" in launch.output()
    assert "Error" not in launch.all_output()
    assert "exported iteration 3 to" in job.succeed()


def load_slowly(rank: int) -> None:
    """Let the last rank read the checkpoint slowly."""
    from megatron.checkpoint.load import Checkpoint

    if is_last(rank):
        slow_down(Checkpoint, "load_into", 1, 60, "the load is slow")


@pytest.mark.full
def test_a_start_that_is_slow_on_one_rank(new_job: NewJob) -> None:
    job = new_job("job", f"{ENDLESS} --save-interval 2", ranks=2)
    job.succeed("--exit-interval 2")
    launch = job.launch(prepare=load_slowly)
    launch.wait_for(lambda: "the load is slow" in launch.output(1), "the load")
    assert stop(launch, 0) < SECONDS
    assert "iteration        3/" not in launch.output()
    job.check(2)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_evaluation_alone(ranks: int, new_job: NewJob) -> None:
    """It has no result, which its exit code says. The ranks do not take each other for lost."""
    job = new_job("job", f"{ENDLESS} --save-interval 2", ranks)
    job.succeed("--exit-interval 2")
    launch = job.launch("--eval-only --eval-iters 20000")
    launch.wait_for_line("--eval-only: evaluating")
    time.sleep(0.5)
    start = time.monotonic()
    os.kill(launch.pids[ranks - 1], signal.SIGTERM)
    assert launch.codes(by_themselves=True) == [128 + signal.SIGINT] * ranks
    assert time.monotonic() - start < SECONDS
    assert "Error" not in launch.all_output()


def close_slowly(rank: int) -> None:
    """Let the end of the run take long on all ranks."""
    from megatron.run.report import Reporter

    slow_down(Reporter, "close", 1, 1.5, "the files are closed slowly")


@pytest.mark.full
def test_a_run_that_is_complete(new_job: NewJob) -> None:
    job = new_job("job", "--train-iters 3", ranks=2)
    launch = job.launch(prepare=close_slowly)
    launch.wait_for_line("closed slowly")
    assert stop(launch, None) < SECONDS
    job.check(3)
