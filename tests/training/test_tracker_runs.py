"""Runs with --tracker: what trackio and wandb have stored after resumes and rollbacks."""

import json
import os
import signal
import sqlite3
import struct
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from process_pool import pretrain, succeed
from tiny_corpus import command
from training.runs import Runner
from training.spiky_corpus import random_stretch, write_corpus
from training.test_spike_guard_runs import ROLLBACK, make_argv

from megatron.extras.operations.commands import rollback

pytestmark = pytest.mark.skipif(
    find_spec("trackio") is None or find_spec("wandb") is None,
    reason="trackio or wandb is not installed",
)

KEY = "0123456789abcdef0123456789abcdef01234567"
ITERATIONS = 9


def pretrain_in_home(argv: list[str], environment: dict[str, str]) -> None:
    """Run the main job with the environment of a user."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        pretrain(argv)
    finally:
        os.environ.clear()
        os.environ.update(before)


class Trackers:
    """The trackers' files of one run."""

    def __init__(self, run: Runner) -> None:
        self.run = run
        self.home = run.folder.parent / "home"
        self.home.mkdir()
        # No setting of the user who runs the tests counts.
        self.environment = {
            "HOME": str(self.home),
            "TRACKIO_DIR": str(self.home / "trackio"),
            "WANDB_API_KEY": KEY,
            "WANDB_MODE": "offline",
        }

    def launch(self, flags: str) -> str:
        names = "--tracker trackio wandb --tracker-project tests"
        argv = self.run.argv(f"{names} {flags}")
        return succeed(self.run.pool.run(1, pretrain_in_home, argv, self.environment))

    def read_state(self, tracker: str) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(
            (self.run.folder / f"tracker-{tracker}.json").read_text()
        )
        return state

    def read_trackio(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return run -> step -> values of what trackio stored."""
        [path] = (self.home / "trackio").glob("*.db")
        with sqlite3.connect(path) as store:
            rows = store.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        assert max(Counter((run, step) for run, step, _ in rows).values()) == 1
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for run, step, values in rows:
            found.setdefault(run, {})[step] = json.loads(values)
        return found

    def read_wandb(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return run -> step -> values of wandb's offline files."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for path in sorted(self.run.folder.glob("wandb/offline-run-*/*.wandb")):
            name = path.stem.removeprefix("run-")
            for record in iterate_wandb(path):
                if record.WhichOneof("record_type") == "history":
                    step = record.history.step.num
                    rows = found.setdefault(name, {})
                    assert step not in rows
                    rows[step] = {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in record.history.item
                    }
        return found

    def check_lineage(self, tracker: str, forks: list[int], last: int = ITERATIONS) -> None:
        """Check that the present lineage has each iteration once, with the loss of the run."""
        runs = self.read_state(tracker)["runs"]
        assert [run["parent_iteration"] for run in runs] == [0, *forks]
        assert [run["parent"] for run in runs] == [None, *(run["id"] for run in runs[:-1])]
        stored = self.read_trackio() if tracker == "trackio" else self.read_wandb()
        lineage: list[int] = []
        losses: dict[int, float] = {}
        end = last
        for run in reversed(runs):
            # A run that was killed at its start may have stored nothing.
            rows = stored.get(run["id"], {})
            own = sorted(step for step in rows if step <= end)
            lineage = own + lineage
            losses |= {step: rows[step]["lm_loss"] for step in own}
            end = min(end, run["parent_iteration"])
        assert lineage == [*range(1, last + 1)]
        assert losses == {
            entry["iteration"]: entry["lm_loss"]
            for entry in self.run.metrics()
            if "lm_loss" in entry
        }


def iterate_wandb(path: Path) -> Iterator[Any]:
    """Yield the records of an offline file, whose framing is that of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    at = 7
    part = b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        # A kill may have cut off the last record.
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):
            return
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        # A complete record, or the last part of one.
        if kind in (1, 4):
            record = messages.Record()
            record.ParseFromString(part)
            yield record
            part = b""


@pytest.fixture
def trackers(run: Runner) -> Trackers:
    return Trackers(run)


def test_resume_and_rollback_give_each_iteration_once(trackers: Trackers) -> None:
    flags = f"--save-interval 2 --train-iters {ITERATIONS} --eval-interval 2 --eval-iters 1"
    output = trackers.launch(f"{flags} --exit-interval 3")
    output += trackers.launch(f"{flags} --exit-interval 6")
    before = {name: trackers.read_state(name)["runs"] for name in ("trackio", "wandb")}
    assert [len(runs) for runs in before.values()] == [1, 1]
    assert rollback.main([str(trackers.run.folder), "--to", "4", "--reason", "test"]) == 0
    output += trackers.launch(flags)
    assert "warning: tracker" not in output
    for name in ("trackio", "wandb"):
        trackers.check_lineage(name, forks=[4])
    first, second = trackers.read_state("trackio")["runs"]
    stored = trackers.read_trackio()
    assert sorted(stored[first["id"]]) == [1, 2, 3, 4, 5, 6]
    assert sorted(stored[second["id"]]) == [5, 6, 7, 8, 9]
    assert stored[second["id"]][6]["validation/validation/lm_loss"] > 0
    # The key is in no file of the run, of the trackers, and in no line of the log.
    assert KEY not in output
    for folder in (trackers.run.folder, trackers.home):
        for path in folder.rglob("*"):
            assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_missing_package_is_refused_before_training(run: Runner) -> None:
    outcome = run.pool.run(1, pretrain_without_wandb, run.argv("--tracker wandb"))[0]
    assert outcome.kind == "ConfigError"
    assert "pip install -e '.[wandb]'" in str(outcome.error)
    assert not run.folder.exists()


def pretrain_without_wandb(argv: list[str]) -> None:
    """Run the main job where the package wandb is not installed."""
    import megatron.extras.watch.trackers.process as module

    original = module.find_spec
    module.find_spec = lambda *name: None
    try:
        pretrain(argv)
    finally:
        module.find_spec = original


@pytest.mark.parametrize("trouble", ["raise SystemExit(3)", "import time; time.sleep(3600)"])
def test_tracker_that_fails_or_hangs_does_not_stop_training(
    run: Runner, tmp_path: Path, trouble: str
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    # The feed finds this module before the real package.
    (modules / "trackio.py").write_text(f"{trouble}\n")
    present = os.environ.get("PYTHONPATH")
    environment = {"PYTHONPATH": os.pathsep.join([str(modules), *([present] if present else [])])}
    argv = run.argv("--tracker trackio --train-iters 3")
    output = succeed(run.pool.run(1, pretrain_quickly, argv, environment))
    assert run.losses_of_training() == [1, 2, 3]
    assert output.count("warning: tracker trackio") == 1
    assert "training is complete" in output


def pretrain_quickly(argv: list[str], environment: dict[str, str]) -> None:
    """Run the main job, and wait for trackers at its end for 2 seconds only."""
    import megatron.extras.watch.trackers.process as module

    original = module._CLOSE_SECONDS
    module._CLOSE_SECONDS = 2.0
    try:
        pretrain_in_home(argv, environment)
    finally:
        module._CLOSE_SECONDS = original


@pytest.mark.full
@pytest.mark.parametrize("whole_job", [True, False])
def test_killed_launch_gives_each_iteration_once(trackers: Trackers, whole_job: bool) -> None:
    names = "--tracker trackio wandb --tracker-project tests --save-interval 4"
    argv = trackers.run.argv(f"{names} --train-iters 100000")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in trackers.environment.items():
            patch.setenv(name, value)
        killed = command("pretrain_gpt.py", *argv)
    states = [trackers.run.folder / f"tracker-{name}.json" for name in ("trackio", "wandb")]
    try:
        # What was sent counts as delivered at the next look at the file, 5 s later.
        until = time.monotonic() + 240
        while not all(
            path.exists() and json.loads(path.read_text())["delivered"] for path in states
        ):
            assert time.monotonic() < until, "nothing was sent"
            time.sleep(0.05)
        feeds = list_children(killed.pid)
        assert len(feeds) >= 2
        for pid in feeds:
            assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        killed.kill()
    for pid in feeds if whole_job else []:
        os.kill(pid, signal.SIGKILL)
    killed.communicate()
    newest = int((trackers.run.folder / "latest_checkpointed_iteration.txt").read_text())
    trackers.launch(f"{names} --train-iters {newest + 5}")
    for name in ("trackio", "wandb"):
        runs = trackers.read_state(name)["runs"]
        assert len(runs) <= 2
        forks = [run["parent_iteration"] for run in runs[1:]]
        assert all(fork <= newest for fork in forks)
        trackers.check_lineage(name, forks, last=newest + 5)


def list_children(pid: int) -> list[int]:
    """Return the feeds that a training process has started, and what they have started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in children for each in (int(child), *list_children(int(child)))]


@pytest.mark.full
def test_rollback_of_the_guard_gives_each_iteration_once(trackers: Trackers) -> None:
    folder = trackers.run.folder
    corpus = write_corpus(folder.parent / "text" / "text", 60, random_stretch(31, 40))
    flags = f"{ROLLBACK} --spike-guard-skip-after 14 --tracker trackio wandb"
    argv = make_argv(folder, corpus, 60, f"{flags} --tracker-project tests")
    succeed(trackers.run.pool.run(1, pretrain_in_home, argv, trackers.environment))
    for name in ("trackio", "wandb"):
        first, second = trackers.read_state(name)["runs"]
        assert (second["parent"], second["parent_iteration"]) == (first["id"], 20)
        stored = trackers.read_trackio() if name == "trackio" else trackers.read_wandb()
        lineage = [*range(1, 21), *sorted(stored[second["id"]])]
        assert set(range(1, 21)) <= set(stored[first["id"]])
        assert lineage == [entry["iteration"] for entry in trackers.run.metrics()]
