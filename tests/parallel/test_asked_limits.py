"""Tests of the limits on which the ranks agree in the first phase of a kind.

The store is in this process, and the tests publish the heartbeats.
"""

import functools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Thread, Timer

import pytest
import torch.distributed as dist

from megatron.checkpoint.lease import Lease
from megatron.extras.watch.watchdog.watchdog import Watchdog
from megatron.parallel.rank_progress import (
    FILE_THREAD,
    FIRST_SECONDS,
    PHASE_SECONDS,
    Phase,
    RankProgress,
    RankState,
    TimeLimit,
)

LOAD = Phase("the load")


class Rank:
    """Rank 0 of two, whose clock and heartbeats a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress = RankProgress()
        self.store = dist.HashStore()
        self.dog = Watchdog(
            self.store,
            0,
            ("rank 0", "rank 1"),
            TimeLimit(10.0),
            progress=self.progress,
            hang_timeout=None,
            folder=None,
            report=lambda error, message: None,
        )
        self.watch = self.dog._stopwatch
        self.beats = 0.0
        self.while_asking: Callable[[], None] = lambda: self.publish(0.0, 0.0)
        monkeypatch.setattr(time, "sleep", lambda seconds: self.while_asking())

    def publish(self, *limits: float) -> None:
        """Publish a new heartbeat of each rank, with its limit."""
        self.beats += 1.0
        for rank, limit in enumerate(limits):
            state = RankState("a.py:1 f", True, "", 0, published=self.beats, limit=limit)
            self.store.set(f"heartbeat/{rank}", json.dumps(asdict(state)))

    def ask(self, due: float, *limits: float) -> float:
        """Let the rank ask when a limit is due, and return its own limit then."""
        self.watch.tick(0.0)
        self.watch.seconds = due
        self.publish(*limits)
        self.while_asking = functools.partial(self.publish, *limits)
        self.dog._ask_others(self.watch.number, due)
        return self.watch.limit

    def read_beat(self, *, idle: bool, monkeypatch: pytest.MonkeyPatch) -> float:
        """Return the limit in this rank's next heartbeat."""
        monkeypatch.setattr(self.watch, "is_idle", lambda threads: idle)
        self.dog._next_beat = 0.0
        self.dog.beat(self.store)
        return float(json.loads(self.store.get("heartbeat/0"))["limit"])


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_rank_that_works_again_gets_its_time_back(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank.read_beat(idle=True, monkeypatch=monkeypatch) == PHASE_SECONDS
    assert rank.ask(300.0, PHASE_SECONDS, PHASE_SECONDS) == PHASE_SECONDS
    found = rank.read_beat(idle=False, monkeypatch=monkeypatch)
    assert found == FIRST_SECONDS
    assert rank.ask(420.0, found, PHASE_SECONDS) == FIRST_SECONDS


def test_threads_that_run_at_intervals_are_no_workers(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lease of the folder is renewed every ten seconds, also if the rank hangs."""
    lease = Lease.acquire(tmp_path, print)
    threads = [lease._thread, rank.dog._watcher, rank.dog._thread, Timer(15.0, print)]
    worker = Thread(name=FILE_THREAD)
    monkeypatch.setattr(threading, "enumerate", lambda: [*threads, worker])
    found = rank.dog._list_workers()
    lease.release()
    assert found == [worker]


def test_warning_holds(rank: Rank) -> None:
    """The run ends at twice the limit of the warning, and not at the next question."""
    assert rank.ask(300.0, FIRST_SECONDS, FIRST_SECONDS) == FIRST_SECONDS
    assert rank.ask(1020.0, PHASE_SECONDS, PHASE_SECONDS) == 1020.0
    assert rank.ask(1140.0, PHASE_SECONDS, PHASE_SECONDS) == 1020.0


def test_phase_that_begins_again_asks_again(rank: Rank) -> None:
    assert rank.ask(300.0, PHASE_SECONDS, PHASE_SECONDS) == PHASE_SECONDS
    with rank.progress.enter(LOAD):
        rank.watch.tick(0.0)
    assert rank.ask(300.0, FIRST_SECONDS, FIRST_SECONDS) == FIRST_SECONDS


def test_answer_is_not_about_the_phase_that_follows(rank: Rank) -> None:
    """This rank begins a repeated step while it asks, and the other one is silent."""
    rank.watch.tick(0.0)
    rank.watch.seconds = 300.0
    number = rank.watch.number
    rank.publish(FIRST_SECONDS, FIRST_SECONDS)

    def go_on() -> None:
        rank.publish(20.0)
        for step in (1, 2):
            rank.progress.begin_step("training iteration", step)
        rank.progress.begin_part("microbatch 1")
        rank.watch.tick(0.0)

    rank.while_asking = go_on
    rank.dog._ask_others(number, 300.0)
    assert rank.watch.limit == 20.0
    key = "asked/0/the start of the run/True/300/limit"
    assert float(rank.store.get(key)) == PHASE_SECONDS
