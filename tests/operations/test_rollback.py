"""Rollbacks of a run: what stays, what is kept, kills at every step, and real runs afterwards."""

import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from operations.run_folder import FakeRun, charts, snapshot
from process_pool import ProcessPool
from suites import by_suite
from training.runs import Runner

import megatron.checkpoint.lease as lease_module
import megatron.extras.operations.rollback.execution as rollback_module
import megatron.extras.operations.rollback.rollback_plan as plan_module
from megatron.base.errors import CheckpointError, MegatronError, OperationsError
from megatron.checkpoint.folder import list_saved_iterations, remove_interrupted_leftovers
from megatron.checkpoint.lease import Lease, LeaseHolder
from megatron.checkpoint.lineage import find_lineage_before
from megatron.checkpoint.start import find_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.extras.operations.rollback.execution import roll_back
from megatron.extras.operations.rollback.rollback_plan import RollbackPlan, RollbackRequest
from megatron.observe.log_line import parse_log_line
from megatron.observe.metrics import read_metrics

RECORD_KINDS = {"tensorboard", "metrics", "log"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """Make a run that was killed at 7, resumed from 4 and trained to 8, with chronicles."""
    folder = tmp_path_factory.mktemp("trained")
    run = FakeRun(folder / "run", folder / "aside")
    run.launch(1, 7)
    run.launch(5, 8, scale=2)
    (run.root / "chronicles.md").write_text("# Chronicles\n\nIt began.")
    return run


@pytest.fixture
def run(trained: FakeRun, tmp_path: Path) -> FakeRun:
    """Copy the run, so that each test changes its own."""
    return trained.copy(tmp_path)


def roll_run_back(run: FakeRun, to: int = 4, *, dry_run: bool = False, **options: Any) -> str:
    """Roll a run back, and return what was printed. The paths of its records are given."""
    request = RollbackRequest(to, **{**run.paths(), **options})
    lines: list[str] = []
    roll_back(run.root, request, lines.append, dry_run=dry_run)
    return "\n".join(lines)


def find_start_of(run: FakeRun) -> int | None:
    """Return the iteration from which a training would start."""
    return find_start(CheckpointConfig(save=str(run.root), load=str(run.root))).iteration


def find_parts(run: FakeRun) -> Path:
    """Return the folder of the run's only rollback."""
    folders = list((run.root / "rolled-back").iterdir())
    (folder,) = [folder for folder in folders if not folder.name.startswith(".")]
    return folder


def read_all_files(run: FakeRun) -> dict[str, bytes]:
    """Return all files, name -> content, except for the lease, which a killed process leaves."""
    return {
        name: data
        for name, data in snapshot(run.root, run.aside).items()
        if "lease.json" not in name
    }


# What stays


def test_all_records_are_rolled_back_together(run: FakeRun) -> None:
    """Pointers, checkpoints, metrics, log and charts end at the same iteration.

    What was later is in the rollback's folder, and nothing is lost.
    """
    before = snapshot(run.root)
    before_log = run.log.read_text()
    events = charts(run.tensorboard)
    printed = roll_run_back(run, reason="loss spike", skip=("5-6",))
    aside = find_parts(run)
    assert find_start_of(run) == 4
    assert (run.root / "latest").read_text() == "global_step4"
    assert (run.root / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert json.loads((run.root / "course.json").read_text())["iteration"] == 4
    assert list_saved_iterations(run.root) == [4]
    assert list_saved_iterations(aside) == [8]
    moved = snapshot(aside / "global_step8")
    assert moved == {name: before[f"run/{name}"] for name in moved}
    assert [entry["iteration"] for entry in read_metrics(run.metrics)] == [1, 2, 3, 4]
    assert [entry["iteration"] for entry in read_metrics(aside / "metrics.jsonl")] == [5, 6, 7, 8]
    assert run.log.read_text() + (aside / "main_log.txt").read_text() == before_log
    assert "launch 2" not in run.log.read_text()
    # Energy of undone iterations was used too.
    assert (run.codecarbon / "emissions.csv").read_text().count("\n") == 3
    assert not (aside / "emissions.csv").exists()
    removed = charts(aside / "tensorboard")
    for tag, points in charts(run.tensorboard).items():
        expected = 1 if "validation" in tag else 4
        assert len(points) == expected, tag
        assert Counter(points) + Counter(removed[tag]) == Counter(events[tag]), tag
    # Launch 2 had later iterations only, so its complete file was moved.
    assert sorted(path.name for path in (aside / "tensorboard").iterdir()) == [
        "events.out.tfevents.1769860001.host.launch1",
        "events.out.tfevents.1769860002.host.launch2",
    ]
    assert [path.name for path in run.tensorboard.iterdir()] == [
        "events.out.tfevents.1769860001.host.launch1"
    ]
    assert "--skip-train-iteration-range 5-6" in printed
    assert not (run.root / "lease.json").exists()


def test_a_rollback_is_recorded(run: FakeRun) -> None:
    """It is in interventions.jsonl for programs, and in the chronicles for people."""
    roll_run_back(run, reason="loss  spike\nat 6", skip=("5-6",), lr=1e-3)
    (record,) = map(json.loads, (run.root / "interventions.jsonl").read_text().splitlines())
    assert datetime.fromisoformat(record["time"]).tzinfo is not None
    expected = {
        "action": "rollback",
        "from": 8,
        "trained_to": 8,
        "to": 4,
        "reason": "loss  spike\nat 6",
        "skip": ["5-6"],
        "lr": 1e-3,
    }
    assert {name: record[name] for name in expected} == expected
    assert record["flags"] == "--skip-train-iteration-range 5-6 --override-lr-scheduler --lr 0.001"
    assert run.root / record["parts"] == find_parts(run)
    assert record["checkpoints"] == ["global_step8"]
    assert {file["kind"] for file in record["files"]} == RECORD_KINDS
    for file in record["files"]:
        assert (find_parts(run) / file["part"]).is_file()
    chronicles = (run.root / "chronicles.md").read_text()
    assert chronicles.startswith("# Chronicles\n\nIt began.\n\n## ")
    assert ": rolled back from iteration 8 to 4\n" in chronicles
    assert "\n- Reason: loss spike at 6\n- Skipped from there: 5-6\n" in chronicles


def test_a_second_rollback_is_recorded_after_the_first(run: FakeRun, tmp_path: Path) -> None:
    """Both records get a second entry, and --chronicles replaces the run's own chronicles."""
    run.lineage = find_lineage_before(run.root, 8) or ()
    roll_run_back(run, chronicles=str(tmp_path / "new.md"))
    run.back_to(4)
    run.launch(5, 8)
    roll_run_back(run, chronicles=str(tmp_path / "new.md"))
    assert len((run.root / "interventions.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "new.md").read_text().count("\n## ") == 1
    assert (tmp_path / "new.md").read_text().startswith("## ")
    assert (run.root / "chronicles.md").read_text() == "# Chronicles\n\nIt began."
    assert len(list((run.root / "rolled-back").iterdir())) == 2


def test_a_repeated_rollback_has_nothing_to_do(run: FakeRun) -> None:
    """The same command again changes nothing, and prints the same flags."""
    roll_run_back(run, skip=("5-6",))
    after = snapshot(run.root, run.aside)
    printed = roll_run_back(run, skip=("5-6",))
    assert "nothing to do" in printed
    assert "--skip-train-iteration-range 5-6" in printed
    assert snapshot(run.root, run.aside) == after


def test_a_rollback_to_the_present_checkpoint_cuts_later_records(run: FakeRun) -> None:
    """The run was killed at 11 after its save at 8, so no checkpoint has iterations 9 to 11."""
    run.lineage = ()
    run.launch(9, 11)
    printed = roll_run_back(run, 8)
    assert "from global_step8, trained to 11, back to global_step8" in printed
    assert [entry["iteration"] for entry in read_metrics(run.metrics)] == list(range(1, 9))
    assert max(step for step, _ in charts(run.tensorboard)["grad-norm/grad-norm"]) == 8


def test_a_dry_run_prints_the_same_and_changes_nothing(run: FakeRun) -> None:
    """Only the line that reports the dry run is different."""
    before = snapshot(run.root, run.aside)
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ")
    dry = roll_run_back(run, dry_run=True, skip=("5-6",))
    assert snapshot(run.root, run.aside) == before
    done = roll_run_back(run, skip=("5-6",))
    only_dry = set(stamp.sub("", dry).splitlines()) - set(stamp.sub("", done).splitlines())
    assert only_dry == {"nothing was changed (--dry-run)"}


def test_leftovers_of_later_saves_are_moved_too(run: FakeRun) -> None:
    """Folders of unfinished, replaced and damaged checkpoints belong to their iteration."""
    for name in (
        "global_step8.replaced",
        "global_step12.unfinished",
        "global_step12.damaged",
        "global_step9.deleting",
    ):
        (run.root / name).mkdir()
    # A save makes no such name, so this folder is not moved.
    (run.root / "global_step80x").mkdir()
    (run.root / "global_step3.damaged").mkdir()
    roll_run_back(run)
    left = {path.name for path in run.root.glob("global_step*")}
    assert left == {"global_step4", "global_step80x", "global_step3.damaged"}
    assert {path.name for path in find_parts(run).glob("global_step*")} == {
        "global_step8",
        "global_step8.replaced",
        "global_step12.unfinished",
        "global_step12.damaged",
        "global_step9.deleting",
    }


def test_a_moved_relative_link_still_leads_to_its_checkpoint(run: FakeRun) -> None:
    """The link is replaced by an absolute one when it is moved."""
    (run.root / "elsewhere").mkdir()
    (run.root / "global_step8").rename(run.root / "elsewhere" / "eight")
    (run.root / "global_step8").symlink_to("elsewhere/eight")
    roll_run_back(run)
    assert list_saved_iterations(find_parts(run)) == [8]
    assert (run.root / "elsewhere" / "eight" / "manifest.json").is_file()


def test_a_rollback_from_a_damaged_checkpoint_works(run: FakeRun) -> None:
    """The lineage then comes from its copy in course.json."""
    (run.root / "global_step8" / "manifest.json").write_text("{")
    roll_run_back(run)
    assert find_start_of(run) == 4


def test_a_plan_of_an_earlier_version_leaves_the_emissions(run: FakeRun) -> None:
    roll_run_back(run)
    (path,) = (run.root / "rolled-back").glob("*/plan.json")
    record = json.loads(path.read_text())
    kinds = {file["kind"] for file in record["files"]}
    record["files"].append({"kind": "emissions", "path": "a", "part": "b", "said": ""})
    plan = RollbackPlan.parse_json(json.dumps({**record, "moment": record["time"]}))
    assert {file.kind for file in plan.files} == kinds == RECORD_KINDS


# Paths


def test_default_paths_come_from_the_checkpoints(tmp_path: Path) -> None:
    """If the run has changed a path, the records at the old and the new one are cut."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 4)
    before = own.tensorboard
    own.tensorboard = own.aside / "tb2"
    own.launch(5, 8)
    roll_back(own.root, RollbackRequest(4), print)
    record = json.loads((own.root / "interventions.jsonl").read_text())
    assert {file["kind"] for file in record["files"]} == RECORD_KINDS - {"log"}
    assert list(own.tensorboard.iterdir()) == []
    assert len(charts(before)["grad-norm/grad-norm"]) == 4


def test_a_configured_folder_that_does_not_exist_is_noted(tmp_path: Path) -> None:
    """The note has the flag and the path, and the rollback continues."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 8)
    shutil.rmtree(own.tensorboard)
    lines: list[str] = []
    roll_back(own.root, RollbackRequest(4), lines.append)
    (note,) = [line for line in lines if f"--tensorboard-dir {own.tensorboard}" in line]
    assert "does not exist" in note
    assert find_start_of(own) == 4


def test_a_relative_path_of_the_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead to another run's file, because the folder of the launch is not recorded."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.flags = ["--metrics-file", "logs/m.jsonl"]
    own.launch(1, 8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    shutil.copy(own.metrics, tmp_path / "logs" / "m.jsonl")
    before = snapshot(tmp_path)
    with pytest.raises(
        OperationsError,
        match=r"--metrics-file logs/m\.jsonl .*may belong to another run.*'nowhere'",
    ):
        roll_back(own.root, RollbackRequest(4), print)
    assert snapshot(tmp_path) == before
    roll_back(own.root, RollbackRequest(4, metrics_file="nowhere"), print)
    assert find_start_of(own) == 4


def test_relative_paths_are_accepted_in_the_folder_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If --save is relative too and leads to the run's folder, the other paths are right."""
    monkeypatch.chdir(tmp_path)
    own = FakeRun(Path("own"), Path("aside"))
    own.launch(1, 8)
    roll_back(tmp_path / "own", RollbackRequest(4), print)
    assert len(charts(own.tensorboard)["grad-norm/grad-norm"]) == 4
    assert [entry["iteration"] for entry in read_metrics(own.metrics)] == [1, 2, 3, 4]


def test_a_rollback_of_a_copy_does_not_cut_the_originals_charts(tmp_path: Path) -> None:
    """The paths of the configuration are refused, if the checkpoint was saved to another folder."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 8)
    shutil.copytree(own.root, tmp_path / "copy")
    before = snapshot(tmp_path)
    with pytest.raises(
        OperationsError, match=r"--tensorboard-dir .*the checkpoint was saved to .*/own,"
    ):
        roll_back(tmp_path / "copy", RollbackRequest(4), print)
    assert snapshot(tmp_path) == before


# How to continue


def test_the_checkpoints_own_ranges_to_skip_are_repeated(tmp_path: Path) -> None:
    """The new flag replaces those of the checkpoint. Ranges of later launches are only noted."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 4, skip_ranges=[[2, 3], [10, 12]])
    own.launch(5, 8, skip_ranges=[[10, 12], [15, 16]])
    printed = roll_run_back(own, dry_run=True)
    assert "--skip-train-iteration-range 10-12 stays in effect" in printed
    printed = roll_run_back(own, skip=("5-6",))
    assert "\n  --skip-train-iteration-range 5-6 10-12\n" in printed
    assert "later launches also skipped 15-16" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("4-6",)}, "begins at 4, but the checkpoint was trained up to 4"),
        ({"skip": ("6-5",)}, "is not FIRST-LAST"),
        ({"skip": ("21-22",)}, "after the end of the run, which is at --train-iters 20"),
        ({"lr": 0.0}, "--lr 0.0 must be above 0"),
        ({"lr": float("nan")}, "--lr nan must be above 0"),
        ({"to": 5}, "there are: global_step4, global_step8"),
        ({"to": 0}, "no finished checkpoint"),
        ({"to": 100}, "no finished checkpoint"),
        ({"main_log": "/nowhere/log"}, "--main-log /nowhere/log is not a file"),
        ({"chronicles": "/nowhere/chronicles.md"}, "--chronicles /nowhere/chronicles.md"),
        ({"tensorboard_dir": "/nowhere"}, "--tensorboard-dir /nowhere is not a folder"),
        ({"metrics_file": "/nowhere"}, "--metrics-file /nowhere is not a file"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True], ids=["", "dry"])
def test_bad_input_changes_nothing(
    run: FakeRun, options: dict[str, Any], message: str, dry_run: bool
) -> None:
    """Wrong values are refused before anything is written."""
    before = snapshot(run.root, run.aside)
    with pytest.raises(MegatronError, match=re.escape(message)):
        roll_run_back(run, dry_run=dry_run, **options)
    assert snapshot(run.root, run.aside) == before


def test_a_learning_rate_below_the_minimum_is_noted(run: FakeRun) -> None:
    """So is a range to skip that reaches the end of the run."""
    printed = roll_run_back(run, lr=5e-5, skip=("5-20",))
    assert "--skip-train-iteration-range 5-20 --override-lr-scheduler --lr 5e-05" in printed
    assert "--min-lr 0.0001 is above --lr 5e-05" in printed
    assert "reach the end of the run" in printed


def test_a_learning_rate_below_the_start_of_the_warm_up_is_noted(tmp_path: Path) -> None:
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.flags = ["--lr-warmup-init", "3e-4"]
    own.launch(1, 8)
    assert "--lr-warmup-init 0.0003 is above --lr 0.0002" in roll_run_back(own, lr=2e-4)


def test_a_decoupled_rate_that_stays_is_noted(tmp_path: Path) -> None:
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.flags = ["--decoupled-lr", "3e-3"]
    own.launch(1, 8)
    assert "does not change --decoupled-lr 0.003" in roll_run_back(own, lr=2e-4)


def test_load_flags_that_would_load_another_checkpoint_are_noted(tmp_path: Path) -> None:
    """Notes name --load-iteration, and a --load that is not the run's --save."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.flags = ["--load-iteration", "4", "--load", str(tmp_path / "other")]
    own.launch(1, 8)
    printed = roll_run_back(own)
    assert "omit --load-iteration 4" in printed
    assert f"give --load {own.root}" in printed


# Checkpoints that are refused


def test_a_damaged_target_is_refused(run: FakeRun) -> None:
    """The message has the damaged file and the other checkpoints."""
    (run.root / "global_step4" / "config.yaml").write_text("model: {}\n")
    before = snapshot(run.root, run.aside)
    with pytest.raises(
        OperationsError, match=r"global_step4 is damaged: config\.yaml .*there are: global_step8"
    ):
        roll_run_back(run)
    assert snapshot(run.root, run.aside) == before


def test_a_later_checkpoint_is_refused(run: FakeRun) -> None:
    """A rollback does not go forward, and the message has what to write to go there."""
    run.back_to(4)
    with pytest.raises(
        OperationsError, match=r"is at global_step4.* does not go forward.*write global_step8"
    ):
        roll_run_back(run, 8)


def test_a_checkpoint_of_another_lineage_is_refused(tmp_path: Path) -> None:
    """The records are those of the present lineage, so only its checkpoints are possible."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 8)
    own.back_to(4)
    own.launch(5, 7, scale=2)
    own.save(12, [])
    with pytest.raises(
        OperationsError,
        match=r"not in the lineage of global_step12.*the lineage has: global_step4;",
    ):
        roll_run_back(own, 8)
    roll_run_back(own, 4)
    assert find_start_of(own) == 4
    assert list_saved_iterations(own.root) == [4]


def test_a_wrong_or_missing_pointer_is_refused(run: FakeRun) -> None:
    """Without a valid pointer the run's present checkpoint is unknown."""
    (run.root / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="names global_step9"):
        roll_run_back(run)
    (run.root / "latest").unlink()
    (run.root / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(OperationsError, match="has no pointer latest"):
        roll_run_back(run)


@pytest.mark.parametrize(
    ("path", "message"),
    [("global_step4", "is a single checkpoint"), ("nowhere", "does not exist")],
)
def test_a_folder_that_is_not_a_runs_is_refused(run: FakeRun, path: str, message: str) -> None:
    """The folder of a single checkpoint and a missing folder are refused."""
    with pytest.raises(OperationsError, match=message):
        roll_back(run.root / path, RollbackRequest(4), print)


def test_checkpoints_are_not_moved_to_another_file_system(run: FakeRun) -> None:
    """A rename would fail in the middle, so this is refused before anything is changed."""
    if not Path("/dev/shm").is_dir() or os.stat("/dev/shm").st_dev == run.root.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    (run.root / "rolled-back").symlink_to("/dev/shm")
    before = snapshot(run.root)
    with pytest.raises(OperationsError, match="different file systems"):
        roll_run_back(run)
    assert snapshot(run.root) == before


# The lease


def test_a_run_that_is_active_is_not_rolled_back(run: FakeRun) -> None:
    """While another process holds the lease, a rollback and a dry run are refused."""
    lease = Lease.acquire(run.root, print)
    try:
        before = snapshot(run.root, run.aside)
        for dry_run in (False, True):
            with pytest.raises(
                OperationsError, match=f"being written to by process {os.getpid()} on "
            ):
                roll_run_back(run, dry_run=dry_run)
        assert snapshot(run.root, run.aside) == before
    finally:
        lease.release()
    roll_run_back(run)


def write_lease_of_another_host(run: FakeRun) -> Path:
    """Write the lease of job 4711 on host n7, and return its path."""
    holder = LeaseHolder(
        host="n7", boot="another", pid=12345, started="1", job="4711", restart=0, token="other"
    )
    path = run.root / "lease.json"
    path.write_text(json.dumps(asdict(holder)))
    return path


def test_the_heartbeat_of_a_lease_on_another_host_is_watched(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a heartbeat the rollback continues, and a dry run prints how to be sure at once."""
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.3)
    path = write_lease_of_another_host(run)
    printed = roll_run_back(run, dry_run=True)
    assert "give this command on n7" in printed
    assert "squeue does not list job 4711" in printed
    assert path.exists()
    roll_run_back(run)
    assert find_start_of(run) == 4


def test_a_heartbeat_on_another_host_is_an_active_run(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback is refused if the lease file changes while it is watched."""
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 2.0)
    path = write_lease_of_another_host(run)
    monkeypatch.setattr(lease_module.time, "sleep", lambda seconds: os.utime(path))
    before = snapshot(run.root, run.aside)
    with pytest.raises(
        OperationsError, match=r"no rollback while a run is active: .* on n7, job 4711"
    ):
        roll_run_back(run)
    assert snapshot(run.root, run.aside) == before


def test_no_run_starts_during_a_rollback(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback holds the lease while it cuts files."""
    tried = []

    def cut_out(*arguments: Any) -> None:
        with pytest.raises(CheckpointError, match="two runs in one folder"):
            Lease.acquire(run.root, print)
        tried.append(arguments)

    monkeypatch.setattr(rollback_module.cutting, "cut_out", cut_out)
    roll_run_back(run)
    assert tried


def test_a_rollback_that_loses_its_lease_stops(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause longer than the heartbeat allows, the folder may belong to another run."""
    cut_out = rollback_module.cutting.cut_out

    def lose_lease(*arguments: Any) -> None:
        write_lease_of_another_host(run)
        cut_out(*arguments)

    monkeypatch.setattr(rollback_module.cutting, "cut_out", lose_lease)
    before = run.log.read_text()
    with pytest.raises(CheckpointError, match="was taken over by"):
        roll_run_back(run)
    assert run.log.read_text() == before
    assert list_saved_iterations(run.root) == [4, 8]


# Interruptions


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}


def kill_before_change(number: int, action: Callable[[], object]) -> bool:
    """Run `action` in another process, and kill it before its change of that number.

    Only changes of the file system count. Return False if the action ended before.
    """
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), code
        return code != 0
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in CHANGES or (
            event == "open" and arguments[2] & WRITING and str(arguments[0]).startswith("/")
        ):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(hook)
        action()
        code = 0
    finally:
        os._exit(code)


class FixedTime(datetime):
    """A clock that has stopped, so that two rollbacks write the same files."""

    @classmethod
    def now(cls, tz: Any = None) -> "FixedTime":
        return cls(2026, 2, 1, tzinfo=UTC)


def fresh_copy(trained: FakeRun, tmp_path: Path) -> FakeRun:
    """Copy the run to the same path each time, because the notes have paths."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    return trained.copy(tmp_path / "copy")


def find_start_or_refusal(run: FakeRun) -> int | str | None:
    """Return the iteration from which a training would start, or why it is refused."""
    try:
        return find_start_of(run)
    except CheckpointError as error:
        return str(error)


def remove_plan(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files without those of a rollback, and without an incomplete pointer."""
    return {
        name: data
        for name, data in files.items()
        if "/rolled-back/" not in name and not name.endswith(".new")
    }


def test_a_rollback_killed_before_any_change_can_be_continued(
    trained: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command leads to the same files, wherever the first one was killed.

    In between, a run starts from a folder that is completely old or new, or it is refused. The
    short suite kills it before every third change.
    """
    distance = by_suite(3, 1)
    monkeypatch.setattr(plan_module, "datetime", FixedTime)
    # Without the cache most of the test's time would be spent here.
    monkeypatch.setattr(plan_module, "load_yaml", cache(plan_module.load_yaml))
    options: dict[str, Any] = {"reason": "spike", "skip": ("5-6",)}
    run = fresh_copy(trained, tmp_path)
    before = read_all_files(run)
    roll_run_back(run, **options)
    after = read_all_files(run)
    expected_files = {8: remove_plan(before), 4: remove_plan(after)}
    number = 0
    refused = 0
    run = fresh_copy(trained, tmp_path)
    while kill_before_change(number, partial(roll_run_back, run, **options)):
        start = find_start_or_refusal(run)
        if isinstance(start, str):
            refused += 1
            assert "rollback 2026-02-01T00-00-00Z to global_step4 is unfinished" in start
            assert "python tools/rollback.py" in start
        else:
            assert start is not None
            assert remove_plan(read_all_files(run)) == expected_files[start], f"killed at {number}"
        roll_run_back(run, **options)
        assert read_all_files(run) == after, f"killed at {number}"
        assert not (run.root / "lease.json").exists()
        number += distance
        run = fresh_copy(trained, tmp_path)
    assert number > 40
    assert refused * distance > 20


def stop_before_moving(*_: object) -> None:
    """Fail where the later checkpoints are listed to be moved. Files are cut by then."""
    raise OSError("the disk is gone")


def interrupt_rollback(run: FakeRun, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Start a rollback that fails after files were cut, and before checkpoints are moved."""
    with monkeypatch.context() as patch:
        patch.setattr(rollback_module, "list_later_entries", stop_before_moving)
        with pytest.raises(OSError, match="the disk is gone"):
            roll_run_back(run, **options)


def test_values_that_are_not_given_again_stay(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback that is continued without its options uses those of the first command."""
    interrupt_rollback(run, monkeypatch, reason="spike", skip=("5-6",))
    lines: list[str] = []
    roll_back(run.root, RollbackRequest(4), lines.append)
    assert "continuing the rollback of" in lines[0]
    assert "--skip-train-iteration-range 5-6" in "\n".join(lines)
    assert json.loads((run.root / "interventions.jsonl").read_text())["reason"] == "spike"
    assert find_start_of(run) == 4


def test_another_rollback_is_refused_until_the_first_is_finished(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the flag that differs, and the command that finishes the first one."""
    interrupt_rollback(run, monkeypatch)
    before = snapshot(run.root, run.aside)
    for differing, name in (
        ({"to": 8}, "--to"),
        ({"skip": ("5-5",)}, "--skip"),
        ({"main_log": "/other"}, "--main-log"),
    ):
        with pytest.raises(OperationsError, match=f"differs in {name}") as error:
            roll_run_back(run, **differing)
        assert f"\n  python tools/rollback.py {run.root} --to 4\n" in str(error.value)
    assert snapshot(run.root, run.aside) == before


def test_a_dry_run_of_an_interrupted_rollback_changes_nothing(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints that the rollback would be continued."""
    interrupt_rollback(run, monkeypatch)
    before = snapshot(run.root, run.aside)
    assert "continuing the rollback" in roll_run_back(run, dry_run=True)
    assert snapshot(run.root, run.aside) == before


def test_a_start_during_an_unfinished_rollback_is_refused(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start may remove leftovers of saves, and the rollback still completes."""
    shutil.copytree(run.root / "global_step8", run.root / "global_step8.replaced")
    (run.root / "global_step12.unfinished").mkdir()
    interrupt_rollback(run, monkeypatch)
    remove_interrupted_leftovers(run.root)
    with pytest.raises(CheckpointError, match="is unfinished"):
        find_start_of(run)
    roll_run_back(run)
    assert list_saved_iterations(run.root) == [4]
    assert list_saved_iterations(find_parts(run)) == [8]


def test_a_pointer_written_by_hand_ends_an_unfinished_rollback(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If training continues from that pointer, the next rollback makes a new plan."""
    interrupt_rollback(run, monkeypatch)
    run.lineage = find_lineage_before(run.root, 8) or ()
    run.back_to(4)
    run.launch(5, 6, scale=3)
    roll_run_back(run)
    assert find_start_of(run) == 4
    assert [entry["iteration"] for entry in read_metrics(run.metrics)] == [1, 2, 3, 4]
    folders = sorted((run.root / "rolled-back").iterdir())
    kept = [
        entry["lm_loss"] for folder in folders for entry in read_metrics(folder / "metrics.jsonl")
    ]
    assert kept == [20 / 5, 20 / 6, 20 / 7, 20 / 8, 30 / 5, 30 / 6]
    assert [list_saved_iterations(folder) for folder in folders] == [[], [8]]


def test_a_damaged_or_missing_plan_can_be_fixed_by_hand(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has what to write into `latest`, and which checkpoints exist."""
    interrupt_rollback(run, monkeypatch)
    (find_parts(run) / "plan.json").write_text("{")
    with pytest.raises(
        OperationsError, match=r"is damaged.* by hand \(global_step4, global_step8\)"
    ):
        roll_run_back(run)
    (find_parts(run) / "plan.json").unlink()
    with pytest.raises(OperationsError, match="does not exist; write one of the existing"):
        roll_run_back(run)
    (run.root / "latest").write_text("global_step4")
    roll_run_back(run)
    assert list_saved_iterations(run.root) == [4]


# Real runs

FLAGS = "--train-iters 12 --save-interval 4 --eval-interval 4 --eval-iters 1"


class RealRun:
    """A run of the real training in another process, with its records."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.tensorboard = runner.folder.with_name("tb")
        self.log = runner.folder.with_name("log.txt")

    def train(self, flags: str = "", ranks: int = 1) -> None:
        output = self.runner(f"{FLAGS} --tensorboard-dir {self.tensorboard} {flags}", ranks)
        with self.log.open("a") as log:
            log.write(output)

    def roll_back(self, to: int, **options: Any) -> None:
        request = RollbackRequest(to, main_log=str(self.log), **options)
        roll_back(self.runner.folder, request, print)

    def curve(self) -> list[dict[str, Any]]:
        """Return the lines of the metrics file. The reader of metrics would leave some out."""
        lines = map(json.loads, (self.runner.folder / "metrics.jsonl").read_text().splitlines())
        kept = (
            "kind",
            "name",
            "iteration",
            "consumed_samples",
            "consumed_tokens",
            "lm_loss",
            "grad_norm",
            "learning_rate",
        )
        return [
            {name: line[name] for name in kept if name in line}
            for line in lines
            if line["kind"] != "start"
        ]

    def charts(self) -> dict[str, list[tuple[int, float]]]:
        """Return the charts, without those of times, which differ between two runs."""
        found = charts(self.tensorboard)
        return {tag: sorted(points) for tag, points in found.items() if "time" not in tag}

    def logged(self) -> list[int]:
        """Return the iterations of the training lines in the log."""
        steps = map(parse_log_line, self.log.read_text().splitlines())
        return [int(step["iteration"]) for step in steps if step is not None]


@pytest.fixture(scope="module")
def corpus_runs(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], RealRun]:
    return lambda: RealRun(Runner(pool, corpus, tmp_path_factory.mktemp("real") / "run"))


@pytest.mark.parametrize(("to", "ranks"), [(8, 1), (4, 2)])
def test_a_run_after_a_rollback_equals_an_uninterrupted_one(
    corpus_runs: Callable[[], RealRun], to: int, ranks: int
) -> None:
    """Metrics, charts and log are those of a run without a rollback."""
    straight = corpus_runs()
    returned = corpus_runs()
    straight.train(ranks=ranks)
    returned.train(ranks=ranks)
    returned.roll_back(to)
    assert returned.logged() == list(range(1, to + 1))
    returned.train(ranks=ranks)
    assert returned.curve() == straight.curve()
    assert returned.logged() == list(range(1, 13))
    points = returned.charts()
    assert points == straight.charts()
    assert len(points["lm-loss-training/lm loss vs samples"]) == 12
    for tag, found in points.items():
        # The axis of gigaflops is 0 in every step of this tiny model.
        if "gigaflos" not in tag:
            assert max(Counter(step for step, _ in found).values()) == 1, tag


def test_two_rollbacks_and_skipped_iterations(corpus_runs: Callable[[], RealRun]) -> None:
    """The printed flags lead to the run that skips these iterations from the beginning."""
    straight = corpus_runs()
    returned = corpus_runs()
    straight.train("--skip-train-iteration-range 5-6")
    returned.train()
    returned.roll_back(8)
    returned.train("--exit-interval 10")
    returned.roll_back(4, skip=("5-6",))
    record = json.loads(
        (returned.runner.folder / "interventions.jsonl").read_text().splitlines()[-1]
    )
    assert record["flags"] == "--skip-train-iteration-range 5-6"
    returned.train(record["flags"])
    assert returned.curve() == straight.curve()
    assert returned.charts() == straight.charts()
    assert straight.logged() == [1, 2, 3, 4, *range(7, 13)]
    assert returned.logged() == straight.logged()


def test_a_run_continues_with_another_learning_rate(corpus_runs: Callable[[], RealRun]) -> None:
    """The printed flags change the rate after the checkpoint."""
    run = corpus_runs()
    run.train()
    run.roll_back(8, lr=1e-3)
    flags = json.loads((run.runner.folder / "interventions.jsonl").read_text())["flags"]
    run.train(flags)
    rates = {
        line["iteration"]: line["learning_rate"] for line in run.curve() if line["kind"] == "train"
    }
    assert [rates[i] for i in range(1, 13)] == [2e-3] * 8 + [1e-3] * 4


def test_a_training_does_not_start_during_an_unfinished_rollback(
    corpus_runs: Callable[[], RealRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error has the command that finishes the rollback."""
    run = corpus_runs()
    run.train()
    with monkeypatch.context() as patch:
        patch.setattr(rollback_module, "list_later_entries", stop_before_moving)
        with pytest.raises(OSError, match="the disk is gone"):
            run.roll_back(8)
    error = run.runner.error(FLAGS)
    assert "is unfinished" in error
    assert "python tools/rollback.py" in error
    run.roll_back(8)
    run.train()
    assert run.logged() == list(range(1, 13))
