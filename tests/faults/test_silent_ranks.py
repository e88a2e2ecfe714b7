"""A rank that stands still ends the run within --distributed-timeout-minutes and is named; a slow file system does not end it."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import NewJob
from launches import Job, Launch

LIMIT_SECONDS = 15.0
LIMIT = f"--distributed-timeout-minutes {LIMIT_SECONDS / 60}"
GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2"
ENDLESS = "--train-iters 1000000"
LOST = 1
PLACES = ("pipeline 0, data 0, tensor 0", "pipeline 0, data 0, tensor 1", "pipeline 1, data 0, tensor 0", "pipeline 1, data 0, tensor 1")
FULL = pytest.mark.full


def stop_and_wait(launch: Launch, victim: int) -> float:
    """Stop a rank for good; return the seconds until all others have ended by themselves, with the exit code of a lost rank."""
    start = time.monotonic()
    os.kill(launch.pids[victim], signal.SIGSTOP)
    others = [rank for rank in range(len(launch.pids)) if rank != victim]
    launch.wait_for(lambda: launch.running() == [victim], f"the end of all ranks but {victim}")
    seconds = time.monotonic() - start
    assert [launch.processes[rank].exitcode for rank in others] == [LOST] * len(others), launch.all_output()
    return seconds


@pytest.mark.parametrize("victim", [pytest.param(0, marks=FULL), pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3])
def test_a_stopped_rank_is_named_within_the_limit(victim: int, new_job: NewJob) -> None:
    """Rank 0 keeps the store through which ranks answer, as under srun. The stopped rank never comes back."""
    launch = new_job("job", f"{GRID} {ENDLESS} {LIMIT}", 4).launch()
    launch.wait_for_line("iteration        3/")
    seconds = stop_and_wait(launch, victim)
    said = [line for line in launch.all_output().splitlines() if "does not answer" in line]
    print(f"rank {victim}: {seconds:.1f} s")
    assert seconds <= LIMIT_SECONDS, f"{seconds:.1f} s\n{launch.all_output()}"
    # One rank prints it, unless the store is gone through which they agree on that.
    assert len(said) == 1 or (victim == 0 and len(said) > 1), launch.all_output()
    assert re.search(rf"rank {victim} on {os.uname().nodename} \({re.escape(PLACES[victim])}\) does not answer", said[0])
