"""Restarts within a job, with scripts in place of srun and scontrol.

tests/slurm/test_restarts.py has the tests with a real Slurm.
"""

# ruff: noqa: F811 (fixtures are imported by their names)

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from operations.test_requeue import _signal_handlers, make_task, slurm  # noqa: F401

from megatron.extras.operations.chronicle.records import Event, read_events
from megatron.extras.operations.slurm.array_task import run_array_task
from megatron.extras.operations.slurm.attempts import FILE, Attempt
from megatron.extras.operations.slurm.start import TaskOutcome
from megatron.observe.chronicle import CHRONICLE
from megatron.observe.log_line import format_training_complete_line

pytestmark = pytest.mark.usefixtures("_signal_handlers")

SRUN = """#!/bin/sh
case "$*" in *warm_up*) exit ;; esac
echo "$@" >> FOLDER/steps
exec sh FOLDER/step-$(wc -l < FOLDER/steps)
"""
"""The n-th call runs the script `step-n`. The step of the spare nodes does not count."""
SCONTROL = """#!/bin/sh
echo "$@" >> FOLDER/calls
case "$*" in
    "show job"*) echo "JobState=$(cat FOLDER/state) ExcNodeList=n9"
        echo "   NodeList=$(cat FOLDER/nodes)" ;;
    "show hostnames n[1-4]") printf 'n1\\nn2\\nn3\\nn4\\n' ;;
    "show hostnames n[1,3-4]") printf 'n1\\nn3\\nn4\\n' ;;
    "show hostnames n9") echo n9 ;;
esac
"""
CRASH = "echo 'srun: error: n2: task 3: Killed'; exit 137"
COMPLETE = f"echo '{format_training_complete_line()}'"


def hang(*hosts: str) -> str:
    """Return a step whose ranks report a hang of ranks on these hosts."""
    report = {"rank": 0, "host": "n1", "kind": "HungRanksError", "message": "rank 3 is at x.py:5"}
    follower = json.dumps(report)
    caller = json.dumps({**report, "rank": 1, "hung_hosts": hosts})
    return "\n".join(
        [
            f"echo '{follower}' > $MEGATRON_ERROR_FOLDER/rank_0.json",
            f"echo '{caller}' > $MEGATRON_ERROR_FOLDER/rank_1.json",
            "exit 1",
        ]
    )


class FakeJob:
    """A job on n1 to n4, whose steps are given in their order."""

    def __init__(self, folder: Path, steps: Sequence[str]) -> None:
        self.folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text.replace("FOLDER", str(folder)))
        (folder / "state").write_text("RUNNING")
        (folder / "nodes").write_text("n[1-4]")
        for number, step in enumerate(steps, start=1):
            (folder / f"step-{number}").write_text(step)
        self.alerts: list[str] = []
        self.task = replace(make_task(folder, self.alerts), max_restarts=5)

    def run(self, **limits: Any) -> TaskOutcome:
        self.task = replace(self.task, **limits)
        return run_array_task(self.task)

    def steps(self) -> list[str]:
        return (self.folder / "steps").read_text().splitlines()

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def log(self) -> str:
        return self.task.main_log.read_text()

    def events(self, kind: str) -> list[Event]:
        events = read_events(self.task.save / CHRONICLE)
        return [event for event in events if event.kind == kind]


def test_crash_starts_the_training_again_in_the_same_job(slurm: Path) -> None:
    job = FakeJob(slurm, [CRASH, COMPLETE])
    assert job.run() == TaskOutcome.COMPLETE
    assert len(job.steps()) == 2
    assert "requeue 12" not in job.calls()
    assert job.log().count("array task 12 starts on n[1-4]") == 2
    (event,) = job.events("restart")
    assert "code 137" in event.details["reason"]
    assert "n2: task 3: Killed" in event.details["reason"]
    assert event.details["hosts"] == ["n1", "n2", "n3", "n4"]
    records = [json.loads(line) for line in (job.task.save / FILE).read_text().splitlines()]
    began = [record["began"]["is_restart"] for record in records if "began" in record]
    assert began == [False, True]


def test_used_budget_requeues_and_gives_the_last_reason(slurm: Path) -> None:
    job = FakeJob(slurm, [CRASH] * 3)
    assert job.run(max_restarts=1, max_failed_starts=9) == TaskOutcome.CRASHED
    assert len(job.steps()) == 2
    (alert,) = job.alerts
    assert "has used its 1 restarts within 6 h: the training ended with code 137" in alert
    assert "requeue 12" in job.calls()


@pytest.mark.parametrize(("age_hours", "steps"), [(0.9, 1), (1.1, 2)])
def test_only_restarts_within_the_window_count(age_hours: float, steps: int, slurm: Path) -> None:
    """They count over requeues, because the submission is the same."""
    job = FakeJob(slurm, [CRASH, COMPLETE])
    earlier = Attempt("12", "", 0, "n[1-4]", 5, time.time() - 3600 * age_hours, is_restart=True)
    job.task.save.mkdir()
    (job.task.save / FILE).write_text(json.dumps({"began": vars(earlier)}) + "\n")
    job.run(max_restarts=1, restart_hours=1.0)
    assert len(job.steps()) == steps


def test_restarts_that_train_nothing_are_failed_starts(slurm: Path) -> None:
    job = FakeJob(slurm, [CRASH] * 5)
    assert job.run() == TaskOutcome.CRASH_LOOP
    assert len(job.steps()) == 3
    assert "3 starts in a row saved nothing" in job.alerts[-1]


@pytest.mark.parametrize(
    "kind", ["ConfigError", "CheckpointError", "DataError", "TrainingError", "LayoutError"]
)
def test_error_that_needs_a_person_is_not_repeated(kind: str, slurm: Path) -> None:
    """Examples are a wrong flag, a full disk, a diverged run, and the spike guard's last stop."""
    report = json.dumps({"rank": 0, "host": "n1", "kind": kind, "message": "no room is left"})
    step = f"echo '{report}' > $MEGATRON_ERROR_FOLDER/rank_0.json; exit 2"
    job = FakeJob(slurm, [step, COMPLETE])
    assert job.run() == TaskOutcome.NEEDS_PEOPLE
    assert len(job.steps()) == 1
    assert "no room is left" in job.alerts[0]


def test_exit_code_of_a_mistake_without_a_report_is_not_repeated(slurm: Path) -> None:
    job = FakeJob(slurm, ["exit 2", COMPLETE])
    assert job.run() == TaskOutcome.NEEDS_PEOPLE
    assert len(job.steps()) == 1
    assert "a mistake to fix" in job.alerts[0]


def test_job_that_ends_starts_nothing_again(slurm: Path) -> None:
    job = FakeJob(slurm, [f"echo COMPLETING > {slurm}/state; {CRASH}", COMPLETE])
    assert job.run() == TaskOutcome.ENDED_BY_SLURM
    assert len(job.steps()) == 1


def test_host_is_excluded_after_the_second_hang(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare node replaces it, and the pending tasks of the array exclude it too."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    job = FakeJob(slurm, [hang("n2.site.org"), hang("n2"), COMPLETE])
    assert job.run(train_nodes=3) == TaskOutcome.COMPLETE
    options = [step.partition("--nodelist=")[2].split()[0] for step in job.steps()]
    assert options == ["n1,n2,n3", "n1,n2,n3", "n1,n3,n4"]
    alert = job.alerts[0]
    assert "node n2 is not used any more: 2 hangs" in alert
    (event,) = job.events("exclusion")
    assert event.details["host"] == "n2"
    assert event.details["undo"] in alert
    assert event.details["undo"] == "scontrol update jobid=11 ExcNodeList="
    assert "update jobid=11 ExcNodeList=n2" in job.calls()
    assert len(job.events("hang")) == 2
    assert "array task 11_3 starts on n1,n3,n4" in job.log()


def test_host_that_hung_twice_is_excluded_by_a_requeue_without_spare_nodes(slurm: Path) -> None:
    job = FakeJob(slurm, [hang("n2"), hang("n2")])
    assert job.run() == TaskOutcome.CRASHED
    assert "3 good nodes are left, and the training needs 4" in job.log()
    assert "update jobid=12 ExcNodeList=n2,n9" in job.calls()


def test_hangs_of_most_hosts_exclude_none(slurm: Path) -> None:
    """A file system that does not answer is no fault of a host."""
    job = FakeJob(slurm, [hang("n1", "n2", "n3")] * 2 + [COMPLETE])
    assert job.run() == TaskOutcome.COMPLETE
    assert job.events("exclusion") == []
    assert [event.details["hosts"] for event in job.events("hang")] == [[], []]


def test_hangs_of_earlier_submissions_count(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeJob(slurm, [hang("n2"), COMPLETE]).run(train_nodes=3)
    (slurm / "steps").unlink()
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    job = FakeJob(slurm, [hang("n2"), COMPLETE])
    assert job.run(train_nodes=3) == TaskOutcome.COMPLETE
    assert "--nodelist=n1,n3,n4" in job.steps()[-1]


def test_damaged_records_keep_no_job_from_its_restart(slurm: Path) -> None:
    """A person or another program may have written into both files."""
    job = FakeJob(slurm, [hang("n2"), COMPLETE])
    job.task.save.mkdir()
    moment = "2026-01-01T00:00:00+00:00"
    hangs = [{"time": moment, "kind": "hang", "details": {"hosts": h}} for h in (None, 5, "n2")]
    (job.task.save / CHRONICLE).write_text("".join(json.dumps(hang) + "\n" for hang in hangs))
    attempt = vars(Attempt("12", "", 0, "n[1-4]", 5, 1.0, is_restart=True))
    records = [
        {"began": {**attempt, "began": "yesterday"}},
        {"began": {**attempt, "began": 2.0, "is_restart": None}},
        {"ended": {"began": 2.0, "outcome": [], "iteration": 5, "at": 3.0}},
    ]
    (job.task.save / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert job.run() == TaskOutcome.COMPLETE
    assert len(job.steps()) == 2
    assert job.events("exclusion") == []


def test_spare_node_replaces_a_lost_one(slurm: Path) -> None:
    """With --no-kill, Slurm takes a failed node out of the job and does not end it."""
    lose = f"echo 'n[1,3-4]' > {slurm}/nodes; {CRASH}"
    job = FakeJob(slurm, [lose, COMPLETE])
    assert job.run(train_nodes=3) == TaskOutcome.COMPLETE
    assert "--nodes=3 --ntasks=3 --nodelist=n1,n3,n4" in job.steps()[-1]


def test_job_with_too_few_nodes_needs_a_person(slurm: Path) -> None:
    job = FakeJob(slurm, [COMPLETE])
    assert job.run(train_nodes=5) == TaskOutcome.NEEDS_PEOPLE
    assert "--train-nodes 5" in job.alerts[0]
