"""Tests of the goodput in the log, the metrics and the status, on runs and on written records."""

import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from process_pool import ProcessPool, pretrain, succeed
from training.runs import Runner
from training.spiky_corpus import random_stretch, write_corpus
from training.test_spike_guard_runs import ROLLBACK, make_argv

from megatron.extras.operations.chronicle.goodput import (
    HANGS,
    KEPT,
    OTHER,
    SAVES,
    STARTS,
    UNDONE,
    WAITING,
    Goodput,
    compute_failure_costs,
    compute_goodput,
    format_goodput,
    list_failure_facts,
    list_hosts_that_failed_together,
)
from megatron.extras.operations.chronicle.history import read_history
from megatron.extras.operations.commands import rollback
from megatron.extras.operations.monitor import status
from megatron.extras.operations.monitor.queue import QueuedJob
from megatron.extras.operations.monitor.status import WatchedRun, check_run

LINE = re.compile(r"^goodput: (\d+\.\d)% of ([\d.]+ \w+(?: \d+ \w+)?)", re.MULTILINE)


def check_log(output: str, folder: Path, launches: int) -> Goodput:
    """Check that the last line of the log and the records on the disk give the same goodput."""
    lines = LINE.findall(output)
    assert len(lines) == launches
    goodput = compute_goodput(read_history(folder))
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_seconds)
    assert min(goodput.seconds.values()) >= 0
    assert sum(map(goodput.compute_share, goodput.seconds)) == pytest.approx(1)
    # The log has one decimal, and the launch ended some milliseconds after the line.
    assert float(lines[-1][0]) == pytest.approx(100 * goodput.share, abs=2)
    return goodput


def test_rollback_and_resume_are_in_the_log_and_the_metrics(run: Runner) -> None:
    output = run("--save-interval 2 --train-iters 6")
    assert rollback.main([str(run.folder), "--to", "2", "--reason", "test"]) == 0
    # Python's imports and the queue come between two launches.
    time.sleep(0.5)
    output += run("--train-iters 8")
    goodput = check_log(output, run.folder, launches=2)
    assert goodput.seconds[UNDONE] > 0
    assert goodput.seconds[WAITING] > 0.5
    assert "between launches" in output
    values = [entry["goodput"] for entry in run.metrics() if entry.get("goodput") is not None]
    assert all(0 <= value <= 1 for value in values)
    assert values[-1] == pytest.approx(goodput.share, abs=0.02)


def test_save_heavy_run_loses_time_to_saves(run: Runner) -> None:
    output = run("--save-interval 1 --train-iters 8")
    goodput = check_log(output, run.folder, launches=1)
    assert goodput.seconds[SAVES] > 0.1 * goodput.wall_seconds
    assert " saves " in output[output.index("goodput:") :].replace("(", " ")
    # Frequent saves do not fill the log.
    assert output.count("goodput:") == 1


def test_rollback_of_the_guard_gives_a_line_for_each_pass(
    pool: ProcessPool, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "text" / "text", 60, random_stretch(31, 40))
    folder = tmp_path / "run"
    flags = f"{ROLLBACK} --spike-guard-skip-after 14"
    output = succeed(pool.run(1, pretrain, make_argv(folder, corpus, 60, flags)))
    goodput = check_log(output, folder, launches=2)
    assert goodput.seconds[UNDONE] > 0


def write_launch(folder: Path, at: float, iterations: int, **start: Any) -> None:
    """Write the records of a launch that starts at `at` and trains a second for each iteration."""

    def stamp(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

    with open(folder / "chronicle.jsonl", "a") as file:
        event = {"time": stamp(at), "kind": "start", "iteration": 0, "details": start}
        file.write(json.dumps(event) + "\n")
    with open(folder / "metrics.jsonl", "a") as file:
        records = [{"kind": "start", "iteration": 0, "time": stamp(at)}]
        for number in range(1, iterations + 1):
            moment = stamp(at + number)
            record = {"kind": "train", "iteration": number, "seconds": 1.0, "time": moment}
            records.append(record)
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    """Return a run whose first launch hung for 60 s, and whose second one waited for 100 s."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_launch(folder, 1000.0, 10, seconds=5.0)
    verdict = folder / "hangs" / "0000011-19700101T000000" / "verdict.txt"
    verdict.parent.mkdir(parents=True)
    verdict.write_text("rank 3 hangs\n")
    os.utime(verdict, (1070.0, 1070.0))
    # The job began 20 s before its launch, of which the configuration took 5 s.
    write_launch(folder, 1190.0, 12, seconds=5.0, job_started=1170)
    return folder


def test_hang_queue_and_start_are_told_apart(hung: Path) -> None:
    goodput = compute_goodput(read_history(hung))
    assert goodput.seconds[HANGS] == pytest.approx(60)
    assert goodput.seconds[WAITING] == pytest.approx(100)
    assert goodput.seconds[STARTS] == pytest.approx(5 + 20)
    assert goodput.seconds[UNDONE] == pytest.approx(10)
    assert goodput.seconds[KEPT] == pytest.approx(12)
    assert goodput.seconds[OTHER] == pytest.approx(0)
    assert goodput.wall_seconds == pytest.approx(1202 - 995)
    line = format_goodput(goodput)
    assert line.startswith("goodput: 5.8% of 3 min 27 s (between launches 48.3%, hangs 29.0%")


def test_alert_before_the_start_belongs_to_the_new_launch(hung: Path) -> None:
    """A warning about the configuration comes before the event of the start."""
    before = compute_goodput(read_history(hung))
    event = {"kind": "alert", "iteration": 0, "details": {"message": "5.2 epochs"}}
    moment = datetime.fromtimestamp(1189.9, UTC).isoformat(timespec="milliseconds")
    with open(hung / "chronicle.jsonl", "a") as file:
        file.write(json.dumps({"time": moment, **event}) + "\n")
    assert compute_goodput(read_history(hung)) == before


def test_launch_that_waited_for_the_end_of_the_one_before_counts_nothing_twice(
    tmp_path: Path,
) -> None:
    """A start may take long because another launch still trains, for example in a rendezvous."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_launch(folder, 700.0, 300, seconds=5.0)
    write_launch(folder, 1010.0, 300, seconds=310.0)
    goodput = compute_goodput(read_history(folder))
    # Only the 10 s after the last record of the first launch are those of the second start.
    assert goodput.seconds[STARTS] == pytest.approx(5 + 10)
    assert sum(goodput.seconds.values()) == pytest.approx(1310 - 695)


def test_status_has_the_goodput(
    hung: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "ask_queue", lambda name, user: list[QueuedJob]())
    for folder, expected in ((hung, "; goodput: 5.8% of"), (tmp_path, "")):
        found = check_run(WatchedRun("tr8", tmp_path / "log", run=folder))
        (pulse,) = found.pulses
        assert ("goodput" in pulse) == bool(expected)
        assert expected in pulse
        assert not any("goodput" in trouble for trouble in found.troubles)


def add_event(folder: Path, at: float, kind: str, iteration: int | None, **details: Any) -> None:
    moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    event = {"time": moment, "kind": kind, "iteration": iteration, "details": details}
    with open(folder / "chronicle.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")


def test_time_lost_to_failures_by_cause(hung: Path) -> None:
    # The array task starts the training 30 s after the verdict, on half of the devices.
    add_event(hung, 1100.0, "restart", 0, reason="hang")
    add_event(hung, 1070.0, "hang", 0, hosts=["n3"])
    add_event(hung, 1075.0, "exclusion", 0, host="n4")
    add_event(hung, 1900.0, "exclusion", 0, host="n5")
    add_event(hung, 1199.0, "save", 9)
    text = (hung / "chronicle.jsonl").read_text().splitlines()
    for line, devices in ((0, 8), (1, 4)):
        event = json.loads(text[line])
        event["details"]["devices"] = devices
        text[line] = json.dumps(event)
    (hung / "chronicle.jsonl").write_text("\n".join(text) + "\n")
    history = read_history(hung)
    costs = compute_failure_costs(history)
    assert costs.failures == 1
    assert costs.detection == pytest.approx(60 + 30)
    assert costs.restart == pytest.approx(90)
    assert costs.repeated_steps == pytest.approx(10)
    assert costs.fewer_nodes == pytest.approx(12 / 2)
    assert costs.now == pytest.approx(3 + 90)
    assert list_hosts_that_failed_together(history) == [("n3", "n4")]
    facts = dict(list_failure_facts(history))
    assert facts["a failure now would cost"] == "1 min 33 s"
    assert facts["time lost to failures"].startswith("detection 1 min 30 s, restart 1 min 30 s")


def test_a_failure_after_a_rollback_costs_the_steps_since_the_load(hung: Path) -> None:
    """The checkpoint of a later iteration was left behind by the rollback."""
    add_event(hung, 1009.5, "save", 9)
    text = (hung / "chronicle.jsonl").read_text().splitlines()
    second = json.loads(text[1])
    second["iteration"] = 3
    (hung / "chronicle.jsonl").write_text("\n".join([text[0], text[2], json.dumps(second)]) + "\n")
    # Iterations 4 to 12 are kept and not saved. The only restart took 120 s.
    assert compute_failure_costs(read_history(hung)).now == pytest.approx(9 + 120)


def test_planned_stop_is_no_failure(hung: Path) -> None:
    add_event(hung, 1070.0, "stop", 10, reason="duration")
    assert compute_failure_costs(read_history(hung)).failures == 0
