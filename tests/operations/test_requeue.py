"""The requeue of an array task, with scripts in place of srun and scontrol.

tests/slurm has the tests with a real Slurm.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.extras.operations.slurm import client
from megatron.extras.operations.slurm.array_task import run_array_task
from megatron.extras.operations.slurm.start import ArrayTask, TaskOutcome

SRUN = """#!/bin/sh
echo '{"rank": 2, "host": "n2", "kind": "DataError", "message": "m", "io_error": 5}' \\
    > $MEGATRON_ERROR_FOLDER/rank_000002.json
exit 1
"""
"""A step in which a rank on n2 ended with EIO."""

SCONTROL = """#!/bin/sh
echo "$@" >> FOLDER/calls
case "$*" in
    "show job 12")
        left=$(cat FOLDER/failures)
        if [ "$left" -gt 0 ]; then echo $((left - 1)) > FOLDER/failures; exit 1; fi
        echo "   ReqNodeList=(null) ExcNodeList=n[7-8]" ;;
    "show hostnames n[1-4]") printf 'n1\\nn2\\nn3\\nn4\\n' ;;
    "show hostnames n[7-8]") printf 'n7\\nn8\\n' ;;
esac
"""
"""A controller that already excludes n7 and n8, and fails as often as the file `failures` has."""


@pytest.fixture
def _signal_handlers() -> Iterator[None]:
    """Restore the handlers that the array task replaces."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the scripts, and set the environment of a job on four nodes."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL.replace("FOLDER", str(folder)))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "_TRY_AGAIN_SECONDS", 0.0)
    return folder


def make_task(slurm: Path, alerts: list[str]) -> ArrayTask:
    """Return an array task that adds its alerts to a list."""
    return ArrayTask(
        save=slurm.parent / "checkpoints",
        main_log=slurm.parent / "main_log.txt",
        command=("pretrain_gpt.py",),
        kill_switch=None,
        max_failed_starts=3,
        max_restarts=0,
        restart_hours=6.0,
        train_nodes=None,
        nodes=None,
        srun=(),
        alert=alerts.append,
    )


def run_hanging_step(slurm: Path, *reports: str) -> tuple[TaskOutcome, str, list[str]]:
    """Run an array task whose ranks report these errors. Return outcome, log and alerts."""
    lines = [
        f"echo '{report}' > $MEGATRON_ERROR_FOLDER/rank_{rank}.json"
        for rank, report in enumerate(reports)
    ]
    (slurm / "srun").write_text("\n".join(["#!/bin/sh", *lines, "exit 1", ""]))
    alerts: list[str] = []
    task = make_task(slurm, alerts)
    return run_array_task(task), task.main_log.read_text(), alerts


HANG = '{"rank": 1, "host": "n2", "kind": "HungRanksError", "message": "rank 3 on n4 is at x.py:5"}'
OTHER = '{"rank": 0, "host": "n1", "kind": "DataError", "message": "an id is too large"}'


@pytest.mark.usefixtures("_signal_handlers")
def test_hang_counts_as_a_crash_and_is_in_the_log(slurm: Path) -> None:
    (slurm / "failures").write_text("0")
    outcome, log, _ = run_hanging_step(slurm, HANG, HANG)
    assert outcome == TaskOutcome.CRASHED
    assert "rank 3 on n4 is at x.py:5" in log


@pytest.mark.usefixtures("_signal_handlers")
def test_error_beside_a_hang_still_needs_a_person(slurm: Path) -> None:
    (slurm / "failures").write_text("0")
    outcome, _, alerts = run_hanging_step(slurm, HANG, OTHER)
    assert outcome == TaskOutcome.NEEDS_PEOPLE
    assert "an id is too large" in alerts[0]


def run_with_failures(slurm: Path, failures: int) -> tuple[list[str], list[str]]:
    """Run an array task whose `scontrol show job` fails so often. Return updates and alerts."""
    (slurm / "failures").write_text(str(failures))
    alerts: list[str] = []
    task = make_task(slurm, alerts)
    assert run_array_task(task) == TaskOutcome.BAD_NODES
    calls = (slurm / "calls").read_text().splitlines()
    assert "requeue 12" in calls
    return [call for call in calls if call.startswith("update")], alerts


@pytest.mark.usefixtures("_signal_handlers")
def test_bad_host_is_added_to_the_excluded_ones_after_a_failure_of_scontrol(slurm: Path) -> None:
    updates, alerts = run_with_failures(slurm, failures=1)
    assert updates == ["update jobid=12 ExcNodeList=n2,n7,n8"]
    assert len(alerts) == 1
    assert "node n2 is not used any more" in alerts[0]


@pytest.mark.usefixtures("_signal_handlers")
def test_lost_list_of_excluded_hosts_is_an_alert(slurm: Path) -> None:
    updates, alerts = run_with_failures(slurm, failures=100)
    assert updates == ["update jobid=12 ExcNodeList=n2"]
    assert "already excludes could not be read" in alerts[-1]
