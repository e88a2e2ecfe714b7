"""Ctrl-C: the first SIGINT saves and ends the run, and the second one aborts it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from faults.launches import Job, Launch, NewJob, saved_lines

from megatron.checkpoint.folder import read_pointed_iteration

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = "--train-iters 300000"
NOTICE = "received SIGINT (Ctrl-C): the run saves after this iteration and ends"


def interrupt(launch: Launch, ranks: list[int] | None = None) -> None:
    """Send SIGINT to ranks, by default to all, as a terminal does."""
    for rank in launch.running() if ranks is None else ranks:
        os.kill(launch.pids[rank], signal.SIGINT)


@pytest.mark.parametrize("ranks", [1, 2])
def test_first_interrupt_saves_and_ends(ranks: int, new_job: NewJob) -> None:
    job = new_job("job", ENDLESS, ranks)
    launch = job.launch()
    launch.wait_for_line("iteration        3/")
    interrupt(launch)
    # A launcher that gets the signal, too, passes it on.
    time.sleep(0.02)
    if launch.running():
        interrupt(launch)
    assert launch.codes(by_themselves=True) == [0] * ranks, launch.all_output()
    assert launch.output().count(NOTICE) == 1
    assert "received a signal to stop" in launch.output()
    last = max(job.curve())
    job.check(last, [last])
    resumed = job.launch()
    resumed.wait_for_line(f"at iteration {last}")
    resumed.kill()


def test_interrupt_of_one_rank_stops_all_after_the_same_iteration(new_job: NewJob) -> None:
    job = new_job("job", ENDLESS, ranks=2)
    launch = job.launch()
    launch.wait_for_line("iteration        3/")
    interrupt(launch, [1])
    assert launch.codes(by_themselves=True) == [0, 0], launch.all_output()
    last = max(job.curve())
    job.check(last, [last])
    assert saved_lines(launch.output()) == [last]


def test_second_interrupt_aborts_a_save_that_hangs(new_job: NewJob) -> None:
    job = new_job("job", f"{ENDLESS} --save-interval 3", ranks=2)
    job.succeed("--exit-interval 3")
    hang = {"megatron.checkpoint.stages.write_shard_file": 600.0}
    launch = job.launch("--save-interval 100000", delays={0: hang, 1: hang})
    launch.wait_for_line("iteration        5/")
    interrupt(launch)
    launch.wait_for_line("takes 600 s")
    # Repeated within a second, it is taken for the same signal.
    time.sleep(1.5)
    assert launch.running() == [0, 1]
    interrupt(launch)
    assert launch.codes(by_themselves=True) == [-signal.SIGINT] * 2, launch.all_output()
    assert read_pointed_iteration(job.folder) == 3
    job.succeed("--exit-interval 6")
    job.check(6)


def test_interrupt_before_training_prints_no_traceback(new_job: NewJob) -> None:
    job = new_job("job", ENDLESS)
    launch = job.launch(delays={0: {"megatron.run.pretrain.agree_on_job": 600.0}})
    launch.wait_for_line("takes 600 s")
    interrupt(launch)
    assert launch.codes() == [128 + signal.SIGINT]
    assert "interrupted before training started" in launch.output()
    assert "Traceback" not in launch.output()


def test_interrupt_ends_an_evaluation_immediately(new_job: NewJob) -> None:
    job = new_job("job", ENDLESS)
    job.succeed("--exit-interval 2")
    launch = job.launch("--eval-only --eval-iters 20000")
    launch.wait_for_line("successfully loaded")
    time.sleep(0.5)
    interrupt(launch)
    assert launch.codes() == [128 + signal.SIGINT], launch.output()
    assert "Traceback" not in launch.output()


def without_save(job: Job) -> list[str]:
    """Return the command line of a job without its folder."""
    at = job.argv.index("--save")
    return [*job.argv[:at], *job.argv[at + 4 :]]


def test_run_without_a_folder_says_that_nothing_is_kept(new_job: NewJob, tmp_path: Path) -> None:
    job = new_job("job", ENDLESS, metrics=tmp_path / "metrics.jsonl")
    launch = Launch(without_save(job), 1, tmp_path / "logs")
    try:
        launch.wait_for_line("iteration        2/")
        interrupt(launch)
        assert launch.codes() == [0], launch.output()
    finally:
        launch.kill()
    output = launch.output()
    assert output.count("without --save nothing is kept") == 1
    assert output.index("without --save nothing is kept") < output.index("iteration        1/")
    assert "saves nothing, because --save was not given" in output


def list_children(pid: int) -> list[int]:
    """Return the ids of a process' children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    "also_ranks", [False, pytest.param(True, marks=pytest.mark.full)], ids=["passed_on", "both"]
)
def test_interrupt_of_torchrun_saves(also_ranks: bool, new_job: NewJob, tmp_path: Path) -> None:
    """A terminal sends the signal to torchrun, which passes it on. Ranks may get it twice."""
    job = new_job("job", ENDLESS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    log = tmp_path / "torchrun.txt"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), *job.argv],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        while "iteration        3/" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        ranks = list_children(process.pid)
        process.send_signal(signal.SIGINT)
        if also_ranks:
            for pid in ranks:
                os.kill(pid, signal.SIGINT)
        process.wait(60)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    text = log.read_text()
    assert text.count(NOTICE) == 1, text
    assert "exiting program at iteration" in text
    last = max(job.curve())
    job.check(last, [last])
