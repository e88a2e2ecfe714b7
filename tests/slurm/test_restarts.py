"""Restarts within a job on a real Slurm: killed and hanging ranks, bad and lost nodes, the budget.

`test_array_task.py` has a killed rank in the short suite.
"""

# ruff: noqa: F811 (fixtures are imported by their names)

import os
import re
import signal
import time
from datetime import datetime

import pytest
from slurm.test_array_task import (  # noqa: F401
    SAVED,
    TWO_RANKS,
    Curve,
    TinyRun,
    tiny,
    uninterrupted,
)

from megatron.extras.operations.chronicle.history import read_history
from megatron.extras.operations.chronicle.records import Event, read_events
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.metrics import read_metrics

pytestmark = pytest.mark.full

HANG_SECONDS = 8
AGAIN = "starts the training again"


def read_chronicle(tiny: TinyRun, kind: str) -> list[Event]:
    """Return the events of one kind."""
    return [event for event in read_events(tiny.checkpoints / CHRONICLE) if event.kind == kind]


def check_records(tiny: TinyRun, iterations: int) -> None:
    """Check that each iteration is in the records of the run once."""
    expected = list(range(1, iterations + 1))
    metrics = tiny.folder / "tiny-logs" / "logs" / "metrics.jsonl"
    assert [entry["iteration"] for entry in read_metrics(metrics)] == expected
    history = read_history(tiny.checkpoints)
    assert list(history.columns["iteration"][history.kept]) == expected
    saves = [event.iteration for event in read_chronicle(tiny, "save")]
    assert len(saves) == len(set(saves))


def kill_rank(tiny: TinyRun, job: str, node: str, number: int = signal.SIGKILL) -> None:
    os.kill(tiny.pids(job, node)[0], number)


@pytest.mark.parametrize("ranks", [4, 8])
def test_restart_is_about_as_fast_as_a_start(ranks: int, tiny: TinyRun) -> None:
    """A rank is killed twice. Each time the next step comes within 1.2 times a plain start."""
    tasks = f"--ntasks-per-node={ranks // 2}"
    job = tiny.submit(tasks, TRAIN_SAMPLES="1600", EXIT_INTERVAL="100000")
    seconds = []
    for number in (1, 2):
        tiny.wait_for_line(SAVED, 2 * number)
        killed = time.time()
        kill_rank(tiny, job, "n2")
        tiny.wait_for_line("successfully loaded checkpoint", number)
        tiny.wait_for_line(SAVED, 2 * number + 1)
        metrics = tiny.folder / "tiny-logs" / "logs" / "metrics.jsonl"
        times = [
            datetime.fromisoformat(entry["time"]).timestamp() for entry in read_metrics(metrics)
        ]
        seconds.append(min(moment for moment in times if moment > killed + 0.5) - killed)
    tiny.wait_for_end(job)
    start, *_ = tiny.attempts()
    first = datetime.fromisoformat(read_metrics(metrics)[0]["time"]).timestamp() - start["began"]
    print(f"plain start {first:.1f} s, from the kill to the next step {seconds}")
    assert max(seconds) < 1.2 * first
    check_records(tiny, 104)
    assert [attempt["is_restart"] for attempt in tiny.attempts()] == [False, True, True]
    assert len(read_chronicle(tiny, "restart")) == 2


def test_rank_is_killed_during_a_restart(tiny: TinyRun, uninterrupted: Curve) -> None:
    """The restart is restarted, from the same checkpoint and with the same curve."""
    job = tiny.submit(TWO_RANKS, TRAIN_SAMPLES="480", EXIT_INTERVAL="100000")
    tiny.wait_for_line(SAVED)
    kill_rank(tiny, job, "n2")
    tiny.wait_for_line(AGAIN)
    tiny.wait_for(lambda: tiny.pids(job, "n2"), "the ranks of the restart")
    time.sleep(1.0)
    kill_rank(tiny, job, "n2")
    tiny.wait_for_line(AGAIN, 2)
    assert "iteration" not in tiny.main_log().split(AGAIN)[1].split("starts on")[1]
    tiny.wait_for_end(job)
    assert "training is complete at iteration 34" in tiny.main_log()
    assert [attempt["is_restart"] for attempt in tiny.attempts()] == [False, True, True]
    check_records(tiny, 34)
    assert tiny.curve() == uninterrupted(2, 480)


def test_used_budget_ends_the_job_with_the_reason(tiny: TinyRun) -> None:
    job = tiny.submit(
        "--no-requeue",
        TRAIN_SAMPLES="64000",
        EXIT_INTERVAL="100000",
        ELEMENT_ARGS="--max-restarts 1",
    )
    for number in (1, 3):
        tiny.wait_for_line(SAVED, number)
        kill_rank(tiny, job, "n1")
        if number == 1:
            tiny.wait_for_line("successfully loaded checkpoint")
    tiny.wait_for_end(job)
    assert re.search(
        r"ALERT.* has used its 1 restarts within 6 h: the training ended with code", tiny.main_log()
    )
    # srun names the rank that was killed, and the reason repeats it.
    assert re.search(r"no rank reported an error \(n1: task \d: Killed\)", tiny.main_log())
    assert "could not be requeued" in tiny.main_log()
    assert len(tiny.attempts()) == 2


def test_spare_node_replaces_a_bad_one(tiny: TinyRun) -> None:
    """The node check finds n1 bad, and the same start trains on the other two nodes."""
    for node in ("n2", "n3", "n4"):
        (tiny.folder / "disks" / node).mkdir(parents=True)
    checks = f"--check-nodes --disk {tiny.folder}/disks/%h --memory-gib 0.1 --slower-than 0"
    job = tiny.submit(
        "--nodes=3",
        ELEMENT_ARGS=f"--train-nodes 2 {checks}",
        TRAIN_SAMPLES="224",
        EXIT_INTERVAL="100",
    )
    tiny.wait_for_line("node n1 is not used any more")
    tiny.wait_for_line("iteration")
    assert tiny.pids(job, "n1") == []
    tiny.wait_for_end(job)
    assert "training is complete at iteration 18" in tiny.main_log()
    assert len(tiny.attempts()) == 1
    (event,) = read_chronicle(tiny, "exclusion")
    assert event.details["host"] == "n1"
    check_records(tiny, 18)


def test_spare_node_replaces_a_lost_one(tiny: TinyRun) -> None:
    """With --no-kill, the job goes on after Slurm has marked one of its nodes as down."""
    job = tiny.submit(
        "--nodes=3",
        "--no-kill",
        ELEMENT_ARGS="--train-nodes 2",
        TRAIN_SAMPLES="960",
        EXIT_INTERVAL="100000",
    )
    tiny.wait_for_line(SAVED, 1)
    tiny.wait_for_line("the spare node n3 has read the environment and 1 files of the index")
    tiny.cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    tiny.wait_for_line("successfully loaded checkpoint")
    assert tiny.pids(job, "n3") != []
    tiny.wait_for_end(job)
    assert [attempt["is_restart"] for attempt in tiny.attempts()] == [False, True]
    assert "training is complete at iteration 64" in tiny.main_log()
    check_records(tiny, 64)


def test_host_is_excluded_after_the_second_hang(tiny: TinyRun) -> None:
    """A rank on n2 is stopped twice. The third start and the next array task run without n2."""
    job = tiny.submit(
        "--nodes=3",
        "--array=1-2%1",
        ELEMENT_ARGS="--train-nodes 2",
        INTERVENTION_ARGS=f"--hang-timeout {HANG_SECONDS}",
        TRAIN_SAMPLES="1600",
        EXIT_INTERVAL="60",
    )
    for number in (1, 2):
        tiny.wait_for_line(SAVED, 2 * number)
        running = tiny.cluster.run("squeue", "--noheader", "--states=R", "--format=%A").split()
        kill_rank(tiny, running[0], "n2", signal.SIGSTOP)
        tiny.wait_for_line(AGAIN, number)
        tiny.wait_for_line("successfully loaded checkpoint", number)
    pending = tiny.cluster.run("scontrol", "show", "job", f"{job}_2")
    assert "ExcNodeList=n2" in pending
    running = tiny.cluster.run("squeue", "--noheader", "--states=R", "--format=%A").split()
    assert tiny.pids(running[0], "n2") == []
    tiny.wait_for_end(job)
    log = tiny.main_log()
    assert re.search(r"rank [23] on n2 .*does not answer", log)
    assert log.count("node n2 is not used any more: 2 hangs") == 1
    assert f"scontrol update jobid={job} ExcNodeList= allows it again" in log
    hangs = read_chronicle(tiny, "hang")
    assert [event.details["hosts"] for event in hangs] == [["n2"], ["n2"]]
    (event,) = read_chronicle(tiny, "exclusion")
    assert event.details["host"] == "n2"
    assert "n2" not in tiny.attempts()[-1]["nodes"]
    assert "training is complete" in log
    check_records(tiny, 104)
