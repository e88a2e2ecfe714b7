"""40 failures of six kinds: each run ends with the curve of an uninterrupted one, bit for bit.

A launch is killed as a launcher does it: when one rank has ended, so do the others. The ranks that
wait for a stopped one end by themselves, through `--hang-timeout auto`.
"""

# ruff: noqa: F811 (fixtures are imported by their names)

import os
import random
import re
import signal
import time
from collections.abc import Callable

import pytest
from faults.launches import ERROR, Job, Launch, NewJob, Uninterrupted
from faults.test_disk import Disk, disk, new_disk, on_disk, switch  # noqa: F401
from faults.test_hang_limits import CONSTANTS, WATCH
from faults.test_kills import check_after_kill

FLAGS = (
    "--num-layers 2 --micro-batch-size 1 --train-iters 60 --save-interval 2 "
    "--keep-latest-checkpoints 2 --max-save-failures 1 --log-interval 1"
)
LOST = 1
# The first save has no history, and a stopped rank must not be waited for that long.
LIMITS = {**CONSTANTS, f"{WATCH}FIRST_SECONDS": 30.0}


def kill_rank(launch: Launch, chance: random.Random, disk: Disk) -> None:
    launch.kill([chance.randrange(len(launch.pids))])


def kill_host(launch: Launch, chance: random.Random, disk: Disk) -> None:
    """Kill half of the ranks, which share a host."""
    half = len(launch.pids) // 2
    first = chance.choice((0, half))
    launch.kill(range(first, first + half))


def stop_rank(launch: Launch, chance: random.Random, disk: Disk) -> None:
    os.kill(chance.choice(launch.pids), signal.SIGSTOP)


def fill_disk(launch: Launch, chance: random.Random, disk: Disk) -> None:
    # What the run writes at the same time would change the size that is left.
    with launch.frozen():
        disk.fill()


def kill_one_and_stop_another(launch: Launch, chance: random.Random, disk: Disk) -> None:
    stopped, killed = chance.sample(range(len(launch.pids)), 2)
    os.kill(launch.pids[stopped], signal.SIGSTOP)
    launch.kill([killed])


def kill_in_start(launch: Launch, chance: random.Random, disk: Disk) -> None:
    """Kill ranks at a random time of a start. The others may still wait for them to join."""
    time.sleep(chance.uniform(0.0, 2.5))
    launch.kill(chance.choice((range(len(launch.pids)), [chance.randrange(len(launch.pids))])))
    launch.kill()


Failure = Callable[[Launch, random.Random, Disk], None]
KINDS: tuple[Failure, ...] = (
    kill_host,
    kill_in_start,
    fill_disk,
    kill_rank,
    stop_rank,
    kill_one_and_stop_another,
    kill_in_start,
    fill_disk,
)
SHORT = 4
"""The first failures, which the short suite has."""
LAYOUTS = (
    (4, ""),
    (2, "--tensor-model-parallel-size 2"),
    (2, "--pipeline-model-parallel-size 2 --async-save"),
    (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1"),
    (4, "--sharding-strategy hsdp --hsdp-shard-size 2"),
)


def fail_once(job: Job, failure: Failure, chance: random.Random, disk: Disk) -> Launch:
    """Launch, let the failure happen, and wait until all ranks have ended."""
    launch = job.launch(constants=LIMITS)
    if failure is not kill_in_start:
        steps = chance.randint(3, 5)
        launch.wait_for(
            lambda: len(re.findall(r"^ iteration ", launch.output(), re.MULTILINE)) >= steps,
            f"{steps} iterations",
        )
        time.sleep(chance.uniform(0.0, 0.1))
    failure(launch, chance, disk)
    codes = launch.codes()
    assert any(codes), f"{failure.__name__} ended nothing\n{launch.all_output()}"
    if failure is fill_disk:
        assert set(codes) <= {ERROR, -signal.SIGKILL}, launch.all_output()
        assert "No space left" in launch.output() or "room" in launch.output(), launch.output()
        disk.make_room()
    if failure is stop_rank:
        assert LOST in codes, launch.all_output()
        assert "does not answer" in launch.all_output(), launch.all_output()
    return launch


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (1, SHORT),
        *(pytest.param(layout, len(KINDS), marks=pytest.mark.full) for layout in range(5)),
    ],
)
def test_failures_change_no_bit_of_the_curve(
    layout: int, count: int, disk: Disk, on_disk: NewJob, uninterrupted: Uninterrupted
) -> None:
    chance = random.Random(layout)
    ranks, flags = LAYOUTS[layout]
    job = on_disk(f"{FLAGS} {flags}", ranks)
    safe = 0
    for number, failure in enumerate(KINDS[:count]):
        launch = fail_once(job, failure, chance, disk)
        safe = check_after_kill(job, launch, safe, f"failure {number}, {failure.__name__}")
    assert safe > 0
    last = max(job.curve()) + 2
    job.succeed(f"--exit-interval {last}")
    assert sorted(job.curve()) == list(range(1, last + 1))
    assert job.curve() == uninterrupted(f"{FLAGS} {flags}", last, ranks)
    job.verify(last)
