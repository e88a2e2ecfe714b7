"""A run that is killed again and again has the goodput that a replay of the kills predicts."""

import random
import time

import numpy as np
import pytest
from faults.launches import NewJob

from megatron.extras.operations.chronicle.goodput import (
    KEPT,
    UNDONE,
    compute_goodput,
    list_launches,
)
from megatron.extras.operations.chronicle.history import RunHistory, read_history
from megatron.extras.planner.cost.goodput import Failure, Policy, replay

STEP_SECONDS = 0.1
INTERVAL = 8
KILLS = 20
MEAN_SECONDS = 8.0


def make_steps_slow(rank: int) -> None:
    """Let a step wait. A step of a few milliseconds would measure how busy the machine is."""
    from megatron.engine.native import NativeEngine

    original = NativeEngine.train_batch

    def train_slowly(*args, **kwargs):
        time.sleep(STEP_SECONDS)
        return original(*args, **kwargs)

    NativeEngine.train_batch = train_slowly  # type: ignore[method-assign]


def measure(history: RunHistory) -> tuple[float, float]:
    """Return the mean seconds from step to step, and how much longer it takes with a save."""
    numbers = history.columns["iteration"]
    spaces = np.diff(history.columns["time"])
    # A launch trains again from a save on, so its numbers go back.
    follows = np.diff(numbers) == 1
    after_save = numbers[:-1] % INTERVAL == 0
    step = float(spaces[follows & ~after_save].mean())
    return step, float(spaces[follows & after_save].mean()) - step


@pytest.mark.full
def test_goodput_of_a_run_with_kills_is_predicted(new_job: NewJob) -> None:
    """Kills come at random times, also during starts and saves."""
    chance = random.Random(KILLS)
    flags = f"--train-iters 100000 --save-interval {INTERVAL} --keep-latest-checkpoints 2"
    job = new_job("killed", flags)
    launch = job.launch(prepare=make_steps_slow)
    launch.wait_for(lambda: job.curve(), "the first step")
    begin = time.time()
    killed = []
    moment = 0.0
    for _ in range(KILLS):
        moment += chance.expovariate(1 / MEAN_SECONDS)
        time.sleep(max(0.0, begin + moment - time.time()))
        killed.append(time.time())
        assert launch.kill() == [0]
        launch = job.launch(prepare=make_steps_slow)
    launch.wait_for(lambda: len(job.curve()) > 2 * INTERVAL, "a save")
    time.sleep(MEAN_SECONDS)
    launch.kill()
    history = read_history(job.folder)
    first, *others = list_launches(history)
    starts = [launch.loop_start for launch in others]
    # A start that was killed has no loop, and belongs to the restart after the kill before it.
    restarts = [
        min(later, default=0.0) - kill
        for kill, following in zip(killed, [*killed[1:], float("inf")], strict=True)
        if (later := [moment for moment in starts if kill < moment < following])
    ]
    step, save = measure(history)
    policy = Policy(
        nodes=1,
        interval=INTERVAL * step,
        save=save,
        detection=0.0,
        restart=sum(restarts) / len(restarts),
    )
    wall = float(history.columns["time"][-1]) - first.loop_start
    failures = [Failure(moment - first.loop_start, 0, 0.0, "kill") for moment in killed]
    predicted = replay(failures, policy, wall).list_shares()
    goodput = compute_goodput(history)
    # The records have the time of a step without what comes between two steps, such as the log.
    recorded = float(np.nanmean(history.columns["seconds"])) / step
    real = goodput.seconds[KEPT] / recorded / wall
    print(f"{KILLS} kills in {wall:.0f} s, goodput {real:.3f}, predicted {predicted}, {policy}")
    assert predicted["useful"] == pytest.approx(real, abs=0.03)
    undone = goodput.seconds[UNDONE] / recorded / wall
    assert predicted["repeated_steps"] == pytest.approx(undone, abs=0.03)
    # Failures and saves cost much more than the bound.
    assert real < 0.9
