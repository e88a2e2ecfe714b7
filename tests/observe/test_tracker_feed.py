"""Tests of the feed of trackers, with a tracker in memory that can fail."""

import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron.extras.watch.trackers.feed as feed_module
from megatron.extras.watch.trackers.feed import (
    WORKS_AGAIN,
    Feed,
    FeedRequest,
    FeedState,
    TrackedRun,
    flatten_record,
    hide_secrets,
)
from megatron.extras.watch.trackers.process import TrackerProcess
from megatron.observe.chronicle import append_event


class MemoryTracker:
    """Tracker that keeps its rows. A list of errors makes the next calls fail."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, Mapping[str, float]]] = []
        self.runs: list[TrackedRun] = []
        self.configs: list[Mapping[str, Any]] = []
        self.errors: list[Exception] = []
        self.opened: str | None = None

    def open(
        self, run: TrackedRun, *, project: str, folder: Path, config: Mapping[str, Any]
    ) -> None:
        self.runs.append(run)
        self.configs.append(config)
        self.opened = run.id

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        assert self.opened is not None
        self.rows.append((self.opened, iteration, values))

    def close(self) -> None:
        self.opened = None

    def list_iterations(self, run: str) -> list[int]:
        return [iteration for name, iteration, _ in self.rows if name == run]


class Launches:
    """Launches of a run whose metrics file the test writes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.request = FeedRequest(
            "wandb",
            "project",
            str(folder),
            str(folder / "metrics.jsonl"),
            iteration=0,
            offset=0,
            parent_pid=os.getppid(),
            poll_seconds=0.01,
            retry_seconds=0.01,
        )
        self.tracker = MemoryTracker()
        self.said: list[str] = []

    @property
    def path(self) -> Path:
        return Path(self.request.metrics)

    def write(self, *records: Mapping[str, Any]) -> None:
        with open(self.path, "a") as file:
            for record in records:
                file.write(json.dumps(record) + "\n")

    def launch(self, start: int, last: int, *, feeds: bool = True) -> None:
        """Write a launch that trains the iterations after `start` up to `last`, and feed it."""
        offset = self.path.stat().st_size if self.path.exists() else 0
        self.write({"kind": "start", "iteration": start})
        self.write(*(train(each) for each in range(start + 1, last + 1)))
        if feeds:
            self.feed(start, offset)

    def feed(self, start: int, offset: int) -> None:
        request = replace(self.request, iteration=start, offset=offset)
        stop = threading.Event()
        stop.set()
        Feed(request, self.tracker, self.said.append, stop).run()

    def state(self) -> FeedState:
        return FeedState.read(self.request.state_path)

    def list_lineage(self) -> list[int]:
        """Return the iterations of the present lineage, as a user of the tracker would."""
        runs = self.state().runs
        found = []
        end = math.inf
        for run in reversed(runs):
            own = self.tracker.list_iterations(run.id)
            found.append([iteration for iteration in own if iteration <= end])
            end = min(end, run.parent_iteration)
        return [iteration for part in reversed(found) for iteration in part]


def train(iteration: int) -> dict[str, Any]:
    return {"kind": "train", "iteration": iteration, "lm_loss": 1 / iteration, "time": "now"}


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "run")


def test_plain_resume_continues_the_run(launches: Launches) -> None:
    launches.launch(0, 4)
    launches.launch(4, 7)
    assert len(launches.state().runs) == 1
    assert launches.list_lineage() == [*range(1, 8)]
    assert launches.tracker.configs[-1]["parent_run"] is None


def test_older_start_gets_a_run_with_a_parent(launches: Launches) -> None:
    append_event(launches.path.parent / "chronicle.jsonl", "start", 0, {"layers": 3})
    launches.launch(0, 7)
    launches.launch(5, 8)
    launches.launch(2, 9)
    first, second, third = launches.state().runs
    assert (first.parent, first.root) == (None, first.id)
    assert (second.parent, second.parent_iteration, second.root) == (first.id, 5, first.id)
    assert (third.parent, third.parent_iteration, third.root) == (second.id, 2, first.id)
    config = launches.tracker.configs[1]
    assert config == {"layers": 3, "parent_run": first.id, "parent_iteration": 5}
    assert launches.list_lineage() == [*range(1, 10)]
    assert launches.tracker.list_iterations(second.id) == [6, 7, 8]


def test_killed_feed_repeats_what_may_be_missing_in_a_new_run(launches: Launches) -> None:
    launches.launch(0, 6)
    state = launches.state()
    # A kill between the two: 5 and 6 may or may not have arrived.
    state.delivered = 4
    state.write(launches.request.state_path)
    launches.launch(6, 8)
    _, new = launches.state().runs
    assert new.parent_iteration == 4
    assert launches.tracker.list_iterations(new.id) == [5, 6, 7, 8]
    assert launches.list_lineage() == [*range(1, 9)]


def test_launches_without_a_tracker_are_sent_later_without_undone_iterations(
    launches: Launches,
) -> None:
    launches.launch(0, 6, feeds=False)
    launches.launch(3, 5, feeds=False)
    launches.write({"kind": "train", "iter": 1}, {"kind": "other", "iteration": 3})
    launches.launch(4, 7)
    assert launches.list_lineage() == [*range(1, 8)]


def test_failing_tracker_is_tried_again_and_reported_once(launches: Launches) -> None:
    launches.tracker.errors = [OSError("no network"), OSError("no network")]
    offset = 0
    launches.launch(0, 3, feeds=False)
    request = launches.request
    stop = threading.Event()
    feed = Feed(replace(request, offset=offset), launches.tracker, launches.said.append, stop)
    thread = threading.Thread(target=feed.run)
    thread.start()
    for _ in range(1000):
        if "works again" in launches.said:
            break
        stop.wait(0.01)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
    assert ["OSError: no network" in line for line in launches.said] == [True, False]
    assert launches.list_lineage() == [1, 2, 3]
    assert len(launches.state().runs) == 1


def test_what_a_launch_could_not_send_the_next_one_sends(launches: Launches) -> None:
    launches.tracker.errors = [OSError("no network")] * 1000
    launches.launch(0, 3)
    assert "the next launch sends them" in launches.said[-1]
    launches.tracker.errors = []
    launches.launch(3, 5)
    assert launches.list_lineage() == [1, 2, 3, 4, 5]
    assert len(launches.state().runs) == 1


def test_evaluation_is_in_the_row_of_its_iteration(launches: Launches) -> None:
    launches.write(
        {"kind": "start", "iteration": 0},
        train(1),
        {"kind": "validation", "iteration": 1, "name": "a", "lm_loss": 2.5},
        {"kind": "task", "iteration": 1, "name": "piqa", "scores": {"acc": 0.5}},
        {
            "kind": "ranks",
            "iteration": 1,
            "name": "block forward",
            "times": {"median_seconds": 0.5, "slowest": "rank 3", "slow": {"rank 3": 2.0}},
        },
        train(2),
    )
    launches.feed(0, 0)
    (_, _, first), (_, _, second) = launches.tracker.rows
    assert first == {
        "lm_loss": 1.0,
        "validation/a/lm_loss": 2.5,
        "tasks/piqa/acc": 0.5,
        "ranks/block forward/median_seconds": 0.5,
    }
    assert second == {"lm_loss": 0.5}


def test_numbers_that_json_lacks_and_layers() -> None:
    record = {"kind": "train", "iteration": 1, "grad_norm": "NaN", "a": None, "b": True, "c": "x"}
    record["norm"] = [1.0, "Infinity"]
    values = flatten_record(record)
    assert math.isnan(values.pop("grad_norm"))
    assert values == {"norm/0": 1.0, "norm/1": math.inf}


def test_torn_line_is_read_when_it_is_complete(launches: Launches) -> None:
    stop = threading.Event()
    feed = Feed(launches.request, launches.tracker, launches.said.append, stop)
    thread = threading.Thread(target=feed.run)
    thread.start()
    line = json.dumps(train(1))
    with open(launches.path, "w", buffering=1) as file:
        file.write(line[:20])
        file.flush()
        stop.wait(0.05)
        file.write(line[20:] + "\n")
    stop.set()
    thread.join(20)
    assert launches.list_lineage() == [1]


def test_slow_tracker_is_reported(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_SLOW_SECONDS", 0.2)
    monkeypatch.setattr(launches.tracker, "close", lambda: time.sleep(0.4))
    launches.launch(0, 1)
    assert launches.said == [
        "closing the run takes longer than 0.2 s; training continues",
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"runs": [5], "sending": 1, "delivered": 1}', '{"runs": []}']
)
def test_damaged_state_is_an_error_that_names_the_file(text: str, launches: Launches) -> None:
    path = launches.request.state_path
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged"):
        launches.launch(0, 1)
    assert path.read_text() == text


def test_messages_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SOME_TOKENS", "7")
    assert hide_secrets("bad key\n0123456789abcdef, 7") == "bad key ***, 7"


def test_end_of_a_problem_is_no_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    process = TrackerProcess(
        "wandb", "project", folder=tmp_path, metrics=tmp_path / "metrics.jsonl", log=lines.append
    )
    for text in ("ConnectionError: no route", WORKS_AGAIN):
        process._messages.put(text)
    process.poll()
    assert lines == [
        "warning: tracker wandb: ConnectionError: no route",
        "tracker wandb: works again",
    ]
