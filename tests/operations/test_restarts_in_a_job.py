"""Restarts within a job, with scripts in place of srun and scontrol.

tests/slurm/test_restarts.py has the tests with a real Slurm.
"""

# ruff: noqa: F811 (fixtures are imported by their names)

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from operations.test_requeue import _signal_handlers, make_task, slurm  # noqa: F401

from megatron.extras.operations.chronicle.records import Event, read_events
from megatron.extras.operations.commands import slurm_array_task
from megatron.extras.operations.slurm import fewer_nodes, start
from megatron.extras.operations.slurm.array_task import run_array_task
from megatron.extras.operations.slurm.attempts import FILE, Attempt
from megatron.extras.operations.slurm.exclusion import HostExclusion
from megatron.extras.operations.slurm.fewer_nodes import NodeLayout, ReturnWatch
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


def test_failed_step_of_the_spares_is_not_taken_for_the_crash(slurm: Path) -> None:
    job = FakeJob(slurm, [f"sleep 0.5; {CRASH}", COMPLETE])
    failure = "echo 'srun: error: n4: task 0: Exited with exit code 1' >&2; exit 1"
    (slurm / "srun").write_text((slurm / "srun").read_text().replace("exit ;;", f"{failure} ;;"))
    assert job.run(train_nodes=3) == TaskOutcome.COMPLETE
    (event,) = job.events("restart")
    assert "n2: task 3: Killed" in event.details["reason"]


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


@pytest.mark.parametrize(
    ("limits", "needed"),
    [
        ({"train_nodes": 5}, "--train-nodes 5"),
        ({"train_nodes": 6, "fewer_nodes": 5}, "--fewer-nodes 5"),
        ({"fewer_nodes": 5}, "--fewer-nodes 5"),
    ],
)
def test_job_with_too_few_nodes_needs_a_person(
    limits: dict[str, Any], needed: str, slurm: Path
) -> None:
    job = FakeJob(slurm, [COMPLETE])
    assert job.run(**limits) == TaskOutcome.NEEDS_PEOPLE
    assert f"{needed} must be at most the number of nodes of the job, which is 4" in job.alerts[0]


TRAIN = shlex.split(
    "pretrain_gpt.py --num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--vocab-size 512 --micro-batch-size 2 --global-batch-size 24 --train-iters 100 --lr 1e-3 "
    "--data-path none --pipeline-model-parallel-size 4 --distributed-backend gloo"
)
"""A training on 4 ranks. Its layout is not possible on 3."""
LOSE_N2 = f"echo 'n[1,3-4]' > NODES; {CRASH}"
SINFO = """#!/bin/sh
echo "$@" >> FOLDER/sinfo-calls
printf 'n2 %s\\n' "$(cat FOLDER/n2)"
"""


def make_small_job(folder: Path, steps: Sequence[str], n2: str = "down*") -> FakeJob:
    """Return a job that loses n2 in its first step."""
    job = FakeJob(folder, [step.replace("NODES", str(folder / "nodes")) for step in steps])
    job.task = replace(job.task, command=tuple(TRAIN), fewer_nodes=3)
    scancel = f'#!/bin/sh\necho "$@" >> {folder}/scancel-calls\ntouch {folder}/signalled\n'
    for name, text in (("sinfo", SINFO.replace("FOLDER", str(folder))), ("scancel", scancel)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "n2").write_text(n2)
    return job


def test_training_goes_on_with_fewer_nodes(slurm: Path) -> None:
    """The planner's layout follows the flags of the command, and stays in later restarts."""
    job = make_small_job(slurm, [LOSE_N2, CRASH, COMPLETE])
    assert job.run() == TaskOutcome.COMPLETE
    first, second, third = job.steps()
    assert "--nodelist" not in first
    assert "--nodes=3 --ntasks=3 --nodelist=n1,n3,n4 --overlap" in second
    assert second == third
    flags = second.partition(shlex.join(TRAIN))[2].split()
    assert flags[flags.index("--micro-batch-size") + 1] == "2"
    assert 3 % int(flags[flags.index("--pipeline-model-parallel-size") + 1]) == 0
    (alert,) = job.alerts
    assert "goes on with 3 of 4 nodes, from TP 1 PP 4 DP 1" in alert
    assert alert.count("predicted") == 2
    assert [event.details.get("nodes") for event in job.events("restart")] == [3, None]
    assert "requeue 12" not in job.calls()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fewer_nodes": "never"}, "the training needs 4"),
        ({"fewer_nodes": 4}, "the training needs 4"),
        ({"plan": ("--device-memory-gib", "0.001")}, "no layout is possible on fewer: 3 devices"),
        ({"command": ("pretrain_gpt.py",)}, "the planner has no layout (exit code 1)"),
    ],
)
def test_job_waits_without_a_layout(
    changes: dict[str, Any], reason: str, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "command" in changes:
        monkeypatch.setattr("sys.executable", "/bin/false")
    job = make_small_job(slurm, [LOSE_N2, COMPLETE])
    assert job.run(**changes) == TaskOutcome.CRASHED
    assert len(job.steps()) == 1
    assert "no restart in this job: 3 good nodes are left" in job.log()
    assert reason in job.log()
    assert "requeue 12" in job.calls()


UNTIL_SIGNAL = "for i in $(seq 20); do sleep 0.05; [ -e SIGNALLED ] && exit 0; done; exit 0"


@pytest.mark.parametrize(
    ("n2", "changes", "used", "grows"),
    [("idle", 1, 3, True), ("idle", 4, 3, False), ("idle*", 1, 3, False), ("idle", 1, 2, True)],
)
def test_training_takes_a_lost_node_back(
    n2: str, changes: int, used: int, grows: bool, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the next save, and is requeued, but not again and again.

    A layout may leave a good node idle, which need not come back.
    """
    step = UNTIL_SIGNAL.replace("SIGNALLED", str(slurm / "signalled"))
    job = make_small_job(slurm, [LOSE_N2, step], n2)
    iterations = iter(range(1000))
    monkeypatch.setattr(fewer_nodes, "read_reached_iteration", lambda save: next(iterations))
    monkeypatch.setattr(fewer_nodes, "_LONGEST_POLL", 0.02)
    found = NodeLayout(used, ("--zero-stage", "1"), 1.0, "text")
    monkeypatch.setattr(start, "choose_layout", lambda *arguments: found)
    for _ in range(changes - 1):
        HostExclusion(job.task.save, print).record("restart", {"nodes": 3})
    assert job.run(grow_after=0.001) == TaskOutcome.LEFT
    assert ("requeue 12" in job.calls()) == grows
    assert (slurm / "signalled").exists() == grows
    assert (slurm / "sinfo-calls").read_text().startswith("--noheader --Node --nodes=n2 ")
    if grows:
        assert "n2 can be used again; the next save ends this step" in job.log()
        assert (slurm / "scancel-calls").read_text() == "--signal=USR2 12\n"
        assert job.events("restart")[-1].details["nodes"] == 4


def test_requeued_job_starts_with_fewer_nodes(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm requeues a job whose first node is lost, and `--nodes=3-4` lets it give three."""
    step = UNTIL_SIGNAL.replace("SIGNALLED", str(slurm / "signalled"))
    job = make_small_job(slurm, [step], "idle")
    iterations = iter(range(1000))
    monkeypatch.setattr(fewer_nodes, "read_reached_iteration", lambda save: next(iterations))
    monkeypatch.setattr(fewer_nodes, "_LONGEST_POLL", 0.02)
    job.task.save.mkdir()
    earlier = vars(Attempt("12", "", 0, "n[1-4]", 0, time.time()))
    (job.task.save / FILE).write_text(json.dumps({"began": earlier}) + "\n")
    scontrol = (slurm / "scontrol").read_text()
    scontrol = scontrol.replace("hostnames n[1-4]", "hostnames n[1,3-4],n[1-4]")
    (slurm / "scontrol").write_text(scontrol)
    (slurm / "nodes").write_text("n[1,3-4]")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1,3-4]")
    assert job.run(train_nodes=4, grow_after=0.001) == TaskOutcome.LEFT
    flags = job.steps()[0].partition(shlex.join(TRAIN))[2].split()
    assert 3 % int(flags[flags.index("--pipeline-model-parallel-size") + 1]) == 0
    assert "--overlap" not in job.steps()[0]
    assert "goes on with 3 of 4 nodes, from TP 1 PP 4 DP 1" in job.alerts[0]
    assert [event.details["nodes"] for event in job.events("restart")] == [3, 4]
    assert "n2 can be used again; the next save ends this step" in job.log()
    assert "requeue 12" in job.calls()


def test_lost_host_must_be_healthy_and_the_run_must_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock has 16 s between two queries. The host is away in one of them."""
    clock = SimpleNamespace(seconds=0.0, time=time.time)
    clock.monotonic = lambda: clock.seconds
    ended: list[float] = []

    def wait(poll: float) -> bool:
        clock.seconds += poll
        return clock.seconds > 1000 or bool(ended)

    def list_idle(hosts: list[str]) -> list[str]:
        return [] if clock.seconds == 64 else hosts

    def end_steps(_: str) -> bool:
        ended.append(clock.seconds)
        return True

    monkeypatch.setattr(fewer_nodes, "time", clock)
    monkeypatch.setattr(
        fewer_nodes, "read_reached_iteration", lambda save: 8 if clock.seconds > 300 else 7
    )
    monkeypatch.setattr(fewer_nodes.client, "list_idle_hosts", list_idle)
    monkeypatch.setattr(fewer_nodes.client, "signal_steps", end_steps)
    logged: list[float] = []
    watch = ReturnWatch(["n2"], 1, 1.0, tmp_path, lambda text: logged.append(clock.seconds))
    monkeypatch.setattr(watch._end, "wait", wait)
    watch._watch()
    assert (logged, ended) == ([144.0], [304.0])


def test_only_recent_changes_of_the_nodes_count(tmp_path: Path) -> None:
    chronicle = HostExclusion(tmp_path, print)
    chronicle.record("restart", {"nodes": 3})
    path = tmp_path / CHRONICLE
    event = json.loads(path.read_text())
    path.write_text(json.dumps({**event, "time": "2026-01-31T12:00:00+00:00"}) + "\n")
    chronicle.record("restart", {"reason": "a crash"})
    assert fewer_nodes.count_changes(tmp_path) == 0
    chronicle.record("restart", {"nodes": 4})
    assert fewer_nodes.count_changes(tmp_path) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--plan=--hardware=cpu", "--plan --hardware=cpu needs --fewer-nodes"),
        ("--fewer-nodes 0", "--fewer-nodes 0 must be 1 or more, or never"),
        ("--fewer-nodes 3 --grow-after nan", "--grow-after nan must be 0 or more"),
        ("--fewer-nodes 3 --max-restarts 0", "--fewer-nodes needs --max-restarts above 0"),
        ("--fewer-nodes 3 -- pretrain_gpt.py --deepspeed", "is not possible with --deepspeed"),
        ("--fewer-nodes 3 --train-nodes 3", "--fewer-nodes 3 must be below --train-nodes 3"),
        ("--handover-steps 0", "--handover-steps 0 must be 1 or more"),
        ("--handover-required", "--handover-required needs --handover-steps"),
    ],
)
def test_options_that_are_refused(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, _, command = options.partition(" -- ")
    words = ["--save", str(tmp_path), "--main-log", str(tmp_path / "log"), *own.split()]
    assert slurm_array_task.main([*words, "--", *(command or "pretrain_gpt.py").split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
