"""A run goes back: what is left, what is kept, killed at every step, and what a real run makes of it afterwards."""

import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from operations.run_folder import FakeRun, charts, snapshot
from process_pool import ProcessPool
from training.runs import Runner

import megatron.checkpoint.lease as lease_module
import megatron.operations.rollback as rollback_module
import megatron.operations.rollback_plan as plan_module
from megatron.checkpoint.folder import list_saved_iterations, remove_interrupted_leftovers
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.lineage import find_lineage_before
from megatron.checkpoint.start import find_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError, MegatronError, OperationsError
from megatron.observe.log_line import parse_log_line
from megatron.observe.metrics import read_metrics
from megatron.operations.rollback import roll_back
from megatron.operations.rollback_plan import RollbackRequest


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """Killed at 7, resumed from 4, trained to 8; the chronicle is in the run's folder."""
    folder = tmp_path_factory.mktemp("trained")
    run = FakeRun(folder / "run", folder / "aside")
    run.launch(1, 7)
    run.launch(5, 8, scale=2)
    (run.root / "chronicles.md").write_text("# Chronicles\n\nIt began.")
    return run


@pytest.fixture
def run(trained: FakeRun, tmp_path: Path) -> FakeRun:
    return trained.copy(tmp_path)


def request(run: FakeRun, to: int = 4, **asked: Any) -> RollbackRequest:
    return RollbackRequest(to, **{**run.paths(), **asked})


def go(run: FakeRun, to: int = 4, *, dry_run: bool = False, **asked: Any) -> str:
    said: list[str] = []
    roll_back(run.root, request(run, to, **asked), said.append, dry_run=dry_run)
    return "\n".join(said)


def start_of(run: FakeRun) -> int | None:
    """Where a training would start."""
    return find_start(CheckpointConfig(save=str(run.root), load=str(run.root))).iteration


def parts(run: FakeRun) -> Path:
    (folder,) = [
        folder for folder in (run.root / "rolled-back").iterdir() if not folder.name.startswith(".")
    ]
    return folder


def state(run: FakeRun) -> dict[str, bytes]:
    """All files, without what a killed process leaves of its lease."""
    return {
        name: data
        for name, data in snapshot(run.root, run.aside).items()
        if "lease.json" not in name
    }


# What is left


def test_everything_goes_back_together(run: FakeRun) -> None:
    before = snapshot(run.root)
    before_log, events = run.log.read_text(), charts(run.tensorboard)
    said = go(run, reason="loss spike", skip=("5-6",))
    aside = parts(run)
    assert start_of(run) == 4
    assert (run.root / "latest").read_text() == "global_step4"
    assert (run.root / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert json.loads((run.root / "course.json").read_text())["iteration"] == 4
    assert list_saved_iterations(run.root) == [4]
    assert list_saved_iterations(aside) == [8]
    moved = snapshot(aside / "global_step8")
    assert moved == {
        name: data
        for name, data in ((n.removeprefix("run/"), d) for n, d in before.items())
        if name in moved
    }
    assert [entry["iteration"] for entry in read_metrics(run.metrics)] == [1, 2, 3, 4]
    assert [entry["iteration"] for entry in read_metrics(aside / "metrics.jsonl")] == [5, 6, 7, 8]
    assert run.log.read_text() + (aside / "main_log.txt").read_text() == before_log
    assert "launch 2" not in run.log.read_text()
    assert (run.codecarbon / "emissions.csv").read_text().count("\n") == 2
    assert (aside / "emissions.csv").read_text().count("\n") == 2
    for tag, points in charts(run.tensorboard).items():
        assert len(points) == (1 if "validation" in tag else 4), tag
        assert Counter(points) + Counter(charts(aside / "tensorboard")[tag]) == Counter(
            events[tag]
        ), tag
    # launch 2 had later iterations only, so its file went whole
    assert sorted(path.name for path in (aside / "tensorboard").iterdir()) == [
        "events.out.tfevents.1769860001.host.launch1",
        "events.out.tfevents.1769860002.host.launch2",
    ]
    assert [path.name for path in run.tensorboard.iterdir()] == [
        "events.out.tfevents.1769860001.host.launch1"
    ]
    assert "--skip-train-iteration-range 5-6" in said
    assert not (run.root / "lease.json").exists()


def test_it_is_noted(run: FakeRun) -> None:
    go(run, reason="loss  spike\nat 6", skip=("5-6",), lr=1e-3)
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
    assert run.root / record["parts"] == parts(run)
    assert record["checkpoints"] == ["global_step8"]
    assert {file["kind"] for file in record["files"]} == {
        "tensorboard",
        "metrics",
        "emissions",
        "log",
    }
    for file in record["files"]:
        assert (parts(run) / file["part"]).is_file()
    chronicle = (run.root / "chronicles.md").read_text()
    assert chronicle.startswith("# Chronicles\n\nIt began.\n\n## ")
    assert (
        ": rolled back from iteration 8 to 4\n\n- Reason: loss spike at 6\n- Skipped from there: 5-6\n"
        in chronicle
    )


def test_a_second_one_is_noted_behind_the_first(run: FakeRun, tmp_path: Path) -> None:
    run._lineage = (*(find_lineage_before(run.root, 8) or ()),)
    go(run, chronicles=str(tmp_path / "new.md"))
    run.back_to(4)
    run.launch(5, 8)
    go(run, chronicles=str(tmp_path / "new.md"))
    assert len((run.root / "interventions.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "new.md").read_text().count("\n## ") == 1
    assert (tmp_path / "new.md").read_text().startswith("## ")
    assert (run.root / "chronicles.md").read_text() == "# Chronicles\n\nIt began."
    assert len(list((run.root / "rolled-back").iterdir())) == 2


def test_again_there_is_nothing_to_do(run: FakeRun) -> None:
    go(run, skip=("5-6",))
    after = snapshot(run.root, run.aside)
    said = go(run, skip=("5-6",))
    assert "nothing to do" in said
    assert "--skip-train-iteration-range 5-6" in said
    assert snapshot(run.root, run.aside) == after


def test_to_where_the_run_stands_cuts_what_was_lost(run: FakeRun) -> None:
    """Killed at 11 behind its save at 8: the charts of 9 to 11 are of no checkpoint."""
    run._lineage = ()
    run.launch(9, 11)
    said = go(run, 8)
    assert "from global_step8, trained to 11 back to global_step8" in said
    assert [entry["iteration"] for entry in read_metrics(run.metrics)] == list(range(1, 9))
    assert max(step for step, _ in charts(run.tensorboard)["grad-norm/grad-norm"]) == 8


def test_a_dry_run_tells_the_same_and_changes_nothing(run: FakeRun) -> None:
    before = snapshot(run.root, run.aside)
    said = go(run, dry_run=True, skip=("5-6",)).splitlines()
    assert snapshot(run.root, run.aside) == before
    assert "nothing was changed (--dry-run)" in said
    done = go(run, skip=("5-6",)).splitlines()
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ")
    assert {stamp.sub("", line) for line in said} - {stamp.sub("", line) for line in done} == {
        "nothing was changed (--dry-run)"
    }


def test_leftovers_of_later_saves_move_too(run: FakeRun) -> None:
    for name in (
        "global_step8.replaced",
        "global_step12.unfinished",
        "global_step12.damaged",
        "global_step9.deleting",
    ):
        (run.root / name).mkdir()
    (run.root / "global_step80x").mkdir()  # somebody's own
    (run.root / "global_step3.damaged").mkdir()
    go(run)
    left = {entry.name for entry in run.root.iterdir() if entry.name.startswith("global_step")}
    assert left == {"global_step4", "global_step80x", "global_step3.damaged"}
    assert {
        entry.name for entry in parts(run).iterdir() if entry.name.startswith("global_step")
    } == {
        "global_step8",
        "global_step8.replaced",
        "global_step12.unfinished",
        "global_step12.damaged",
        "global_step9.deleting",
    }


def test_a_checkpoint_that_is_a_relative_link_still_leads_there(run: FakeRun) -> None:
    (run.root / "elsewhere").mkdir()
    (run.root / "global_step8").rename(run.root / "elsewhere" / "eight")
    (run.root / "global_step8").symlink_to("elsewhere/eight")
    go(run)
    assert list_saved_iterations(parts(run)) == [8]
    assert (run.root / "elsewhere" / "eight" / "manifest.json").is_file()


def test_a_damaged_newest_checkpoint_can_be_left(run: FakeRun) -> None:
    (run.root / "global_step8" / "manifest.json").write_text("{")  # course.json tells the way back
    go(run)
    assert start_of(run) == 4


def test_a_copied_checkpoint_has_another_time_than_the_run(run: FakeRun) -> None:
    """Emissions are cut by when the run passed the iteration, not by when somebody restored the checkpoint."""
    os.utime(run.root / "global_step4" / "manifest.json")
    go(run)
    assert (run.codecarbon / "emissions.csv").read_text().count("\n") == 2


def test_without_metrics_the_checkpoints_own_time_tells(run: FakeRun) -> None:
    moment = datetime(2026, 1, 31, 12, 5, tzinfo=UTC).timestamp()
    os.utime(run.root / "global_step4" / "manifest.json", (moment, moment))
    go(run, metrics_file="nowhere")
    assert (run.codecarbon / "emissions.csv").read_text().count("\n") == 2
    assert len(read_metrics(run.metrics)) == 8


# Paths


def test_paths_come_from_the_checkpoint(trained: FakeRun, tmp_path: Path) -> None:
    """Also those that the run changed since."""
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 4)
    own.tensorboard, before = own.aside / "tb2", own.tensorboard
    own.launch(5, 8)
    said: list[str] = []
    roll_back(own.root, RollbackRequest(4), said.append)
    assert {
        file["kind"] for file in json.loads((own.root / "interventions.jsonl").read_text())["files"]
    } == {
        "tensorboard",
        "metrics",
        "emissions",
    }
    assert list(own.tensorboard.iterdir()) == []
    assert len(charts(before)["grad-norm/grad-norm"]) == 4


def test_a_configured_folder_that_is_not_there_is_said(trained: FakeRun, tmp_path: Path) -> None:
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 8)
    shutil.rmtree(own.tensorboard)
    said: list[str] = []
    roll_back(own.root, RollbackRequest(4), said.append)
    assert (
        f"note: --tensorboard-dir {own.tensorboard}, as the checkpoint's configuration has it, is not there"
        in "\n".join(said)
    )


def test_a_relative_path_may_be_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.flags = ["--metrics-file", "logs/m.jsonl"]
    own.launch(1, 8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    shutil.copy(own.metrics, tmp_path / "logs" / "m.jsonl")
    before = snapshot(tmp_path)
    with pytest.raises(
        OperationsError,
        match=r"--metrics-file logs/m.jsonl .* may be another run's: .* or 'nowhere'",
    ):
        roll_back(own.root, RollbackRequest(4), print)
    assert snapshot(tmp_path) == before
    roll_back(own.root, RollbackRequest(4, metrics_file="nowhere"), print)
    assert start_of(own) == 4


def test_all_relative_paths_lead_on_from_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = FakeRun(Path("own"), Path("aside"))
    own.launch(1, 8)
    roll_back(tmp_path / "own", RollbackRequest(4), print)
    assert len(charts(own.tensorboard)["grad-norm/grad-norm"]) == 4
    assert [entry["iteration"] for entry in read_metrics(own.metrics)] == [1, 2, 3, 4]


def test_a_copied_folder_does_not_cut_the_originals_charts(tmp_path: Path) -> None:
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 8)
    shutil.copytree(own.root, tmp_path / "copy")
    before = snapshot(tmp_path)
    with pytest.raises(
        OperationsError,
        match=r"--tensorboard-dir .* may be another run's: the checkpoint was saved to .*/own, this is",
    ):
        roll_back(tmp_path / "copy", RollbackRequest(4), print)
    assert snapshot(tmp_path) == before


# How to go on


def test_ranges_that_the_checkpoint_knows_are_not_lost(tmp_path: Path) -> None:
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 4, skip_ranges=[[2, 3], [10, 12]])
    own.launch(5, 8, skip_ranges=[[10, 12], [15, 16]])
    assert "the checkpoint's --skip-train-iteration-range 10-12 holds on" in go(own, dry_run=True)
    said = go(own, skip=("5-6",))
    assert "\n  --skip-train-iteration-range 5-6 10-12\n" in said
    assert "later launches skipped 15-16, too" in said


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"skip": ("4-6",)}, "begins at 4, but the checkpoint was trained up to 4"),
        ({"skip": ("6-5",)}, "is not FIRST-LAST"),
        ({"skip": ("21-22",)}, "behind the end of the run, which is at --train-iters 20"),
        ({"lr": 0.0}, "--lr 0.0 must be above 0"),
        ({"lr": float("nan")}, "--lr nan must be above 0"),
        (
            {"to": 5},
            "no finished checkpoint of that iteration; there are: global_step4, global_step8",
        ),
        ({"to": 0}, "no finished checkpoint"),
        ({"to": 100}, "no finished checkpoint"),
        ({"main_log": "/nowhere/log"}, "--main-log /nowhere/log is no file"),
        ({"chronicles": "/nowhere/chronicles.md"}, "--chronicles /nowhere/chronicles.md"),
        ({"tensorboard_dir": "/nowhere"}, "--tensorboard-dir /nowhere is no folder"),
        ({"metrics_file": "/nowhere"}, "--metrics-file /nowhere is no file"),
        ({"codecarbon_dir": "/nowhere"}, "--codecarbon-dir /nowhere is no folder"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True], ids=["", "dry"])
def test_bad_input_changes_nothing(
    run: FakeRun, asked: dict[str, Any], message: str, dry_run: bool
) -> None:
    before = snapshot(run.root, run.aside)
    with pytest.raises(MegatronError, match=re.escape(message)):
        go(run, dry_run=dry_run, **asked)
    assert snapshot(run.root, run.aside) == before


def test_remarks_on_the_rate(run: FakeRun) -> None:
    said = go(run, lr=5e-5, skip=("5-20",))
    assert "--skip-train-iteration-range 5-20 --override-lr-scheduler --lr 5e-05" in said
    assert "--min-lr 0.0001 is above --lr 5e-05" in said
    assert "reaches to the end of the run" in said


# Where it may not go


def test_a_damaged_target_is_refused(run: FakeRun) -> None:
    (run.root / "global_step4" / "config.yaml").write_text("model: {}\n")
    before = snapshot(run.root, run.aside)
    with pytest.raises(
        OperationsError, match=r"global_step4 is damaged: config.yaml .*; there are: global_step8"
    ):
        go(run)
    assert snapshot(run.root, run.aside) == before


def test_forward_is_refused(run: FakeRun) -> None:
    run.back_to(4)
    with pytest.raises(
        OperationsError,
        match=r"stands at global_step4, and a rollback does not go forward; .*write global_step8",
    ):
        go(run, 8)


def test_another_lineage_is_refused(tmp_path: Path) -> None:
    own = FakeRun(tmp_path / "own", tmp_path / "aside")
    own.launch(1, 8)
    own.back_to(4)
    own.launch(5, 7, scale=2)
    own.save(12, [])
    with pytest.raises(
        OperationsError, match=r"did not come through this checkpoint.*came through: global_step4; "
    ):
        go(own, 8)
    go(own, 4)
    assert start_of(own) == 4
    assert list_saved_iterations(own.root) == [4]


def test_a_pointer_that_leads_nowhere_is_refused(run: FakeRun) -> None:
    (run.root / "latest").write_text("global_step9")
    with pytest.raises(
        CheckpointError, match="names global_step9, which is not a finished checkpoint"
    ):
        go(run)
    (run.root / "latest").unlink()
    (run.root / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(OperationsError, match="has no pointer latest"):
        go(run)


@pytest.mark.parametrize("path", ["global_step4", "nowhere"])
def test_another_folder_is_refused(run: FakeRun, path: str) -> None:
    with pytest.raises(OperationsError, match=r"is one checkpoint|is not there"):
        roll_back(run.root / path, RollbackRequest(4), print)


def test_checkpoints_are_not_moved_to_another_file_system(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/shm").is_dir() or os.stat("/dev/shm").st_dev == run.root.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    (run.root / "rolled-back").symlink_to("/dev/shm")
    before = snapshot(run.root)
    with pytest.raises(OperationsError, match="different file systems"):
        go(run)
    assert snapshot(run.root) == before


# The lease


def test_a_living_run_is_left_alone(run: FakeRun) -> None:
    lease = Lease.acquire(run.root, print)
    try:
        before = snapshot(run.root, run.aside)
        for dry_run in (False, True):
            with pytest.raises(
                OperationsError,
                match=f"being written to by process {os.getpid()} on .*wait until it has ended",
            ):
                go(run, dry_run=dry_run)
        assert snapshot(run.root, run.aside) == before
    finally:
        lease.release()
    go(run)


def other_host(run: FakeRun) -> Path:
    """The lease of a run on another host."""
    holder = replace(lease_module._make_own_holder(), host="n7", boot="another", job="4711")
    path = run.root / "lease.json"
    path.write_text(json.dumps(vars(holder)))
    return path


def test_what_cannot_be_told_is_watched(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.3)
    path = other_host(run)
    said = go(run, dry_run=True)
    assert "give this command on n7, or see that squeue does not list job 4711" in said
    assert path.exists()
    said = go(run)
    assert "process" in said
    assert start_of(run) == 4


def test_a_heartbeat_on_another_host_is_a_living_run(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 2.0)
    path = other_host(run)
    monkeypatch.setattr(lease_module.time, "sleep", lambda seconds: os.utime(path))
    before = snapshot(run.root, run.aside)
    with pytest.raises(
        OperationsError, match=r"no rollback while a run lives: .*process .* on n7, job 4711"
    ):
        go(run)
    assert snapshot(run.root, run.aside) == before


def test_no_run_starts_meanwhile(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def cut_out(*arguments: Any) -> None:
        with pytest.raises(CheckpointError, match="two runs in one folder"):
            Lease.acquire(run.root, print)
        tried.append(arguments)

    monkeypatch.setattr(rollback_module, "cut_out", cut_out)
    go(run)
    assert tried


def test_who_loses_the_folder_stops(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stood still for longer than the heartbeat allows must not move what another run writes."""
    cut_out = rollback_module.cut_out

    def lose(*arguments: Any) -> None:
        other_host(run)
        cut_out(*arguments)

    monkeypatch.setattr(rollback_module, "cut_out", lose)
    before = run.log.read_text()
    with pytest.raises(CheckpointError, match="was taken over by"):
        go(run)
    assert run.log.read_text() == before
    assert list_saved_iterations(run.root) == [4, 8]


# Cut off


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}


def killed_at(number: int, action: Callable[[], object]) -> bool:
    """Whether `action`, in a process of its own, was killed just before its change of the file system of that number."""
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


class OneMoment(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "OneMoment":  # type: ignore[override]
        return cls(2026, 2, 1, tzinfo=UTC)


def fresh_copy(trained: FakeRun, tmp_path: Path) -> FakeRun:
    """Always at the same place: the notes have the paths in them."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    return trained.copy(tmp_path / "copy")


def start_or_refusal(run: FakeRun) -> int | str | None:
    try:
        return start_of(run)
    except CheckpointError as error:
        return str(error)


def without_plan(files: dict[str, bytes]) -> dict[str, bytes]:
    """And without a pointer that was being written."""
    return {
        name: data
        for name, data in files.items()
        if "/rolled-back/" not in name and not name.endswith(".new")
    }


def test_killed_before_each_change_it_comes_to_the_same_end(
    trained: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "datetime", OneMoment)
    monkeypatch.setattr(
        plan_module, "load_yaml", cache(plan_module.load_yaml)
    )  # most of the time that it takes
    asked = {"reason": "spike", "skip": ("5-6",)}
    run = fresh_copy(trained, tmp_path)
    before = state(run)
    go(run, **asked)
    after = state(run)
    number, refused, run = 0, 0, fresh_copy(trained, tmp_path)
    while killed_at(number, partial(go, run, **asked)):
        start = start_or_refusal(run)
        if isinstance(start, str):
            refused += 1
            assert (
                "rollback 2026-02-01T00-00-00Z to global_step4 is unfinished; give again: python tools/rollback.py"
                in start
            )
        else:  # right as a whole, the old or the new one
            assert start in (4, 8)
            assert without_plan(state(run)) == without_plan(before if start == 8 else after), (
                f"killed at {number}"
            )
        go(run, **asked)
        assert state(run) == after, f"killed at {number}"
        assert not (run.root / "lease.json").exists()
        number, run = number + 1, fresh_copy(trained, tmp_path)
    assert number > 40
    assert refused > 20


def cut_off(run: FakeRun, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> None:
    """In the midst: files are cut, checkpoints not moved."""

    def stop(*arguments: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(rollback_module, "_move_later", stop)
        with pytest.raises(OSError, match="the disk is gone"):
            go(run, **asked)


def test_what_is_not_said_again_is_as_it_was(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(run, monkeypatch, reason="spike", skip=("5-6",))
    said: list[str] = []
    roll_back(run.root, RollbackRequest(4), said.append)
    assert "going on with the rollback of" in said[0]
    assert "--skip-train-iteration-range 5-6" in "\n".join(said)
    assert json.loads((run.root / "interventions.jsonl").read_text())["reason"] == "spike"
    assert start_of(run) == 4


def test_another_one_must_wait_and_is_told_how(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(run, monkeypatch)
    before = snapshot(run.root, run.aside)
    for differing, name in (
        ({"to": 8}, "--to"),
        ({"skip": ("5-5",)}, "--skip"),
        ({"main_log": "/other"}, "--main-log"),
    ):
        with pytest.raises(
            OperationsError,
            match=f"differs in {name}. Give\n  python tools/rollback.py {run.root} --to 4\n",
        ):
            go(run, **differing)
    assert snapshot(run.root, run.aside) == before


def test_a_dry_run_of_what_was_cut_off(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(run, monkeypatch)
    before = snapshot(run.root, run.aside)
    assert "going on with the rollback" in go(run, dry_run=True)
    assert snapshot(run.root, run.aside) == before


def test_a_start_in_between_clears_up_and_is_refused(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run.root / "global_step8", run.root / "global_step8.replaced")
    (run.root / "global_step12.unfinished").mkdir()
    cut_off(run, monkeypatch)
    remove_interrupted_leftovers(run.root)
    with pytest.raises(CheckpointError, match="is unfinished"):
        start_of(run)
    go(run)
    assert list_saved_iterations(run.root) == [4]
    assert list_saved_iterations(parts(run)) == [8]


def test_a_pointer_that_is_written_by_hand_ends_what_was_cut_off(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And training went on from there: the next rollback looks at what there is."""
    cut_off(run, monkeypatch)
    run._lineage = (*(find_lineage_before(run.root, 8) or ()),)
    run.back_to(4)
    run.launch(5, 6, scale=3)
    go(run)
    assert start_of(run) == 4
    assert [entry["iteration"] for entry in read_metrics(run.metrics)] == [1, 2, 3, 4]
    folders = sorted((run.root / "rolled-back").iterdir())
    kept = [
        entry["lm_loss"] for folder in folders for entry in read_metrics(folder / "metrics.jsonl")
    ]
    assert kept == [20 / 5, 20 / 6, 20 / 7, 20 / 8, 30 / 5, 30 / 6]
    assert [list_saved_iterations(folder) for folder in folders] == [[], [8]]


def test_a_plan_that_is_gone_has_a_way_out(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(run, monkeypatch)
    (parts(run) / "plan.json").write_text("{")
    with pytest.raises(
        OperationsError,
        match=r"is damaged: .*write one of .* by hand \(global_step4, global_step8\)",
    ):
        go(run)
    (parts(run) / "plan.json").unlink()
    with pytest.raises(OperationsError, match="is gone; write one of the checkpoints"):
        go(run)
    (run.root / "latest").write_text("global_step4")
    go(run)
    assert list_saved_iterations(run.root) == [4]


# Real runs

FLAGS = "--train-iters 12 --save-interval 4 --eval-interval 4 --eval-iters 1"


class RealRun:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.tensorboard, self.log = (
            runner.folder.with_name("tb"),
            runner.folder.with_name("log.txt"),
        )

    def train(self, flags: str = "", ranks: int = 1) -> None:
        output = self.runner(f"{FLAGS} --tensorboard-dir {self.tensorboard} {flags}", ranks)
        with self.log.open("a") as log:
            log.write(output)

    def roll_back(self, to: int, **asked: Any) -> None:
        roll_back(self.runner.folder, RollbackRequest(to, main_log=str(self.log), **asked), print)

    def curve(self) -> list[dict[str, Any]]:
        """As the file's lines have it, not as the reader repairs it."""
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
        timed = re.compile(r"time")
        return {
            tag: sorted(points)
            for tag, points in charts(self.tensorboard).items()
            if not timed.search(tag)
        }

    def logged(self) -> list[int]:
        steps = map(parse_log_line, self.log.read_text().splitlines())
        return [int(step["iteration"]) for step in steps if step is not None]


@pytest.fixture(scope="module")
def corpus_runs(
    pool: ProcessPool, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], RealRun]:
    return lambda: RealRun(Runner(pool, corpus, tmp_path_factory.mktemp("real") / "run"))


@pytest.mark.parametrize(("to", "ranks"), [(8, 1), (4, 2)])
def test_a_run_that_went_back_equals_one_that_never_left(
    corpus_runs: Callable[[], RealRun], to: int, ranks: int
) -> None:
    straight, returned = corpus_runs(), corpus_runs()
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
        if "gigaflos" not in tag:  # of this tiny model they round to 0 in every step
            assert max(Counter(step for step, _ in found).values()) == 1, tag


def test_a_run_that_went_back_twice_and_skips(corpus_runs: Callable[[], RealRun]) -> None:
    straight, returned = corpus_runs(), corpus_runs()
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
    assert returned.logged() == straight.logged() == [1, 2, 3, 4, *range(7, 13)]


def test_a_run_goes_on_with_another_rate(corpus_runs: Callable[[], RealRun]) -> None:
    run = corpus_runs()
    run.train()
    run.roll_back(8, lr=1e-3)
    flags = json.loads((run.runner.folder / "interventions.jsonl").read_text())["flags"]
    run.train(flags)
    rates = {
        line["iteration"]: line["learning_rate"] for line in run.curve() if line["kind"] == "train"
    }
    assert [rates[i] for i in range(1, 13)] == [2e-3] * 8 + [1e-3] * 4


def test_a_training_that_meets_an_unfinished_rollback_ends(
    corpus_runs: Callable[[], RealRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = corpus_runs()
    run.train()
    with monkeypatch.context() as patch:
        patch.setattr(
            rollback_module,
            "_move_later",
            lambda *arguments: (_ for _ in ()).throw(OSError("gone")),
        )
        with pytest.raises(OSError, match="gone"):
            run.roll_back(8)
    error = run.runner.error(FLAGS)
    assert "is unfinished; give again: python tools/rollback.py" in error
    run.roll_back(8)
    run.train()
    assert run.logged() == list(range(1, 13))
