"""Tests that the time of an iteration has the work that the host only queued in it."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from process_pool import pretrain, succeed
from training.runs import Runner

from megatron.run.clock import StepClock


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def read(self) -> float:
        return self.now


def test_times_of_iterations_add_up_without_the_pauses() -> None:
    clock = Clock()
    steps = StepClock(torch.device("cpu"), read=clock.read)
    steps.start()
    clock.now += 3
    assert steps.finish_iteration() == 3
    # The rest of the first iteration, a pause, and the second iteration up to the same point.
    clock.now += 1
    with steps.pause():
        clock.now += 50
    clock.now += 0.5
    clock.now += 2
    assert steps.finish_iteration() == 3.5


def test_a_pause_waits_for_the_device_first() -> None:
    """What the device still computes belongs to the iteration."""
    clock = Clock()
    steps = StepClock(torch.device("cuda", 0), read=clock.read)
    steps.start()

    def wait(device: torch.device) -> None:
        clock.now += 4

    with mock.patch.object(torch.cuda, "synchronize", wait), steps.pause():
        clock.now += 50
    assert steps.finish_iteration() == 4


SLEEP = 0.4


def delay(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        time.sleep(SLEEP)
        return function(*arguments)

    return call


def pretrain_slowly(argv: list[str], name: str) -> None:
    """Train with a function of the loop that takes longer."""
    import megatron.run.loop as loop

    with mock.patch.object(loop, name, delay(getattr(loop, name))):
        pretrain(argv)


@pytest.mark.parametrize(("name", "counts"), [("decide", True), ("evaluate_validation", False)])
def test_what_is_between_two_steps_counts_except_evaluations(
    name: str, counts: bool, run: Runner
) -> None:
    flags = "--train-iters 4 --eval-interval 1 --eval-iters 1 --split 8,2,0"
    succeed(run.pool.run(1, pretrain_slowly, run.argv(flags), name))
    entries = [entry for entry in run.metrics() if "lm_loss" in entry]
    seconds = [entry["seconds"] for entry in entries if "seconds" in entry]
    # The first iteration has none before it.
    assert len(seconds) == 4
    assert all((each >= SLEEP) == counts for each in seconds[1:])
