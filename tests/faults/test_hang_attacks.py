"""Hangs of several ranks at once, of the rank that reports, of a shared disk, and a clock's jump.

All with --hang-timeout auto.
"""

import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest
from faults.launches import Launch, NewJob
from faults.test_hang_limits import BEAT_SECONDS, CONSTANTS, FLAGS, WARNING
from faults.test_hang_limits import PHASE_SECONDS as PHASE
from faults.test_hang_phases import WRITE, break_rank
from faults.test_hangs import LOST, STARTED, VERDICT

pytestmark = pytest.mark.full

END_SECONDS = 8.0
"""Time for the roll call and the end, and for a rank whose answer allows more time."""


def stop(launch: Launch, *ranks: int) -> float:
    """Stop ranks, and return the time."""
    for rank in ranks:
        os.kill(launch.pids[rank], signal.SIGSTOP)
    return time.monotonic()


def wait_for_end(launch: Launch, victims: set[int], limit: float, start: float) -> str:
    """Wait until the others have ended, and return the verdict and what follows."""
    living = set(range(len(launch.pids))) - victims
    launch.wait_for(lambda: not living & set(launch.running()), "the end of the living ranks")
    output = launch.all_output()
    assert time.monotonic() - start < limit, output
    assert [launch.processes[rank].exitcode for rank in living] == [LOST] * len(living), output
    found = re.search(VERDICT, output)
    assert found is not None, output
    return output[found.start() :]


def train(job_flags: str, new_job: NewJob) -> Launch:
    launch = new_job("job", job_flags, 4).launch(constants=CONSTANTS)
    launch.wait_for_line("iteration        6/")
    time.sleep(3 * BEAT_SECONDS)
    return launch


@pytest.mark.parametrize("victims", [(1, 2), (2, 3), (0, 3)])
def test_two_stopped_ranks_are_named(victims: tuple[int, int], new_job: NewJob) -> None:
    launch = train(FLAGS, new_job)
    start = stop(launch, *victims)
    # Between two parts of a step, the limit is that of a phase.
    verdict = wait_for_end(launch, set(victims), 2 * PHASE + END_SECONDS, start)
    for victim in victims:
        if 0 not in victims or victim == 0:
            assert re.search(rf"rank {victim} on .* does not answer", verdict), verdict


def test_rank_that_reports_is_stopped(new_job: NewJob) -> None:
    """The rank that has warned is stopped before it can call the roll."""
    launch = train(FLAGS, new_job)
    stop(launch, 3)
    launch.wait_for(lambda: WARNING in launch.all_output(), "the warning")
    (reporter,) = [rank for rank in range(4) if WARNING in launch.output(rank)]
    start = stop(launch, reporter)
    verdict = wait_for_end(launch, {3, reporter}, 2 * PHASE + END_SECONDS, start)
    if reporter != 0:
        for victim in (3, reporter):
            assert re.search(rf"rank {victim} on .* does not answer", verdict), verdict


def hang_everywhere(rank: int) -> None:
    """Let all ranks hang in the second save, and in the files of the verdict."""
    from megatron.extras.watch.watchdog import watchdog

    def open_pipe(*arguments: object) -> None:
        time.sleep(1000)

    watchdog.write_state = open_pipe  # type: ignore[assignment]
    watchdog.replace_file = open_pipe  # type: ignore[assignment]
    break_rank(rank, WRITE, "file", rank)


def test_shared_disk_that_hangs_in_a_save(new_job: NewJob) -> None:
    """No rank can write, also not the files about the hang. The verdict is printed."""
    job = new_job("job", f"{FLAGS} --save-interval 2", 4)
    launch = job.launch(constants=CONSTANTS, prepare=hang_everywhere)
    launch.wait_for(lambda: STARTED in launch.output(3), "the fault")
    start = time.monotonic()
    verdict = wait_for_end(launch, set(), 2 * PHASE + 4 + END_SECONDS, start)
    assert "saving" in verdict
    assert "is at checkpoint/" in verdict or "are at checkpoint/" in verdict, verdict
    assert not list(Path(job.folder / "hangs").glob("*/rank_*"))


def jump(seconds: float, rank: int) -> None:
    """Let the clock of rank 1 jump after some seconds."""
    if rank != 1:
        return
    clock = time.time
    start = time.monotonic()

    def read() -> float:
        return clock() + (seconds if time.monotonic() - start > 4.0 else 0.0)

    time.time = read


@pytest.mark.parametrize("seconds", [7200.0, -7200.0])
def test_clock_that_jumps_is_no_hang(seconds: float, new_job: NewJob) -> None:
    launch = new_job("job", f"{FLAGS} --save-interval 20", 4).launch(
        constants=CONSTANTS, prepare=functools.partial(jump, seconds)
    )
    launch.wait_for_line("iteration        6/")
    time.sleep(3 * PHASE)
    output = launch.all_output()
    assert WARNING not in output, output
    start = stop(launch, 3)
    verdict = wait_for_end(launch, {3}, 2 * PHASE + END_SECONDS, start)
    assert re.search(r"rank 3 on .* does not answer.*; \d+ s ago, it was at", verdict), verdict
