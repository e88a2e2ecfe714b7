"""The lease of a checkpoint folder: files that name no writer, and file systems without links."""

import contextlib
import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.base.errors import CheckpointError
from megatron.checkpoint import lease
from megatron.checkpoint.lease import FILE, RESTART_VARIABLE, Lease, is_alive, read_holder


@pytest.fixture
def _no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


def ignore(message: str) -> None:
    """Drop a message."""


@pytest.mark.usefixtures("_no_hard_links")
def test_lease_without_hard_links(tmp_path: Path) -> None:
    first = Lease.acquire(tmp_path, ignore)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    with pytest.raises(CheckpointError, match="two runs in one folder"):
        Lease.acquire(tmp_path, ignore)
    first.release()
    assert list(tmp_path.iterdir()) == []


def test_only_the_holder_of_a_lease_may_confirm_it(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path, ignore)
    lease.confirm()
    record = json.loads((tmp_path / FILE).read_text())
    # An operator may remove the file.
    (tmp_path / FILE).unlink()
    lease.confirm()
    assert json.loads((tmp_path / FILE).read_text()) == record
    (tmp_path / FILE).write_text(json.dumps(record | {"token": "another"}))
    with pytest.raises(CheckpointError, match="was taken over by"):
        lease.confirm()
    lease.release()
    assert (tmp_path / FILE).exists()


@pytest.mark.usefixtures("_no_hard_links")
def test_lease_of_a_faster_run_is_put_back_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes over a damaged lease, which another run has replaced in the meantime."""
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "run"
    elsewhere.mkdir()
    folder.mkdir()
    faster = Lease.acquire(elsewhere, ignore)
    valid = (elsewhere / FILE).read_text()
    monkeypatch.setattr("megatron.checkpoint.lease.STALE_SECONDS", 0.3)
    (folder / FILE).write_text("damaged")
    rename = os.rename

    def rename_after_the_faster_run(source: Path, target: Path) -> None:
        (folder / FILE).write_text(valid)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_after_the_faster_run)
    with pytest.raises(CheckpointError, match="two runs in one folder"):
        Lease.acquire(folder, ignore)
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert (folder / FILE).read_text() == valid
    faster.release()


@contextlib.contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Renew a lease file, as its writer on another host does."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.checkpoint.lease.STALE_SECONDS", 0.5)


def test_lease_of_a_later_version_is_respected(tmp_path: Path) -> None:
    """A later version may write a field that this one does not know."""
    first = Lease.acquire(tmp_path, ignore)
    record = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**record, "purpose": "training"}))
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        Lease.acquire(tmp_path, ignore)
    first.release()
    assert list(tmp_path.iterdir()) == []


DAMAGED = ["", "{", "[]", '{"host": "x"}', "[" * 100_000]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:12] or "empty")
def test_damaged_lease_with_a_heartbeat_is_respected(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with (
        heartbeat(tmp_path / FILE),
        pytest.raises(CheckpointError, match="written to by an unknown process"),
    ):
        Lease.acquire(tmp_path, ignore)
    assert (tmp_path / FILE).read_text() == text


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:12] or "empty")
def test_damaged_lease_without_a_heartbeat_is_taken_over_with_a_message(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text(text)
    lines: list[str] = []
    lease = Lease.acquire(tmp_path, lines.append)
    assert "waiting up to 0.5 s for its heartbeat" in lines[0]
    assert "takes the folder over" in lines[1]
    lease.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_impatient")
def test_lease_that_is_being_written_is_named_when_it_is_complete(tmp_path: Path) -> None:
    """Without hard links the file is written in place, so it is empty for a moment."""
    other = tmp_path / "other"
    other.mkdir()
    owner = Lease.acquire(other, ignore)
    (tmp_path / FILE).touch()
    text = (other / FILE).read_text()
    writer = threading.Timer(0.1, lambda: (tmp_path / FILE).write_text(text))
    writer.start()
    with pytest.raises(CheckpointError, match=f"written to by process {os.getpid()} on"):
        Lease.acquire(tmp_path, ignore)
    writer.join()
    owner.release()


@pytest.mark.usefixtures("_impatient")
def test_process_that_cannot_be_looked_at_is_not_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc is mounted with `hidepid`, and the process belongs to another user."""
    first = Lease.acquire(tmp_path, ignore)
    read_text = Path.read_text
    hidden = Path(f"/proc/{os.getpid()}/stat")

    def refuse(path: Path, *arguments: object, **keywords: object) -> str:
        if path == hidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_text(path, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", refuse)
    lines: list[str] = []
    with (
        heartbeat(tmp_path / FILE),
        pytest.raises(CheckpointError, match="two runs in one folder"),
    ):
        Lease.acquire(tmp_path, lines.append)
    assert "waiting up to" in lines[0]
    first.release()


@pytest.mark.usefixtures("_impatient")
def test_temporary_files_of_killed_runs_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    Lease.acquire(tmp_path, ignore).release()
    first = Lease.acquire(tmp_path, ignore)
    alive = json.loads((tmp_path / FILE).read_text())
    first.release()

    def leave(token: str, text: str) -> str:
        name = f"{FILE}.{token * 32}"
        (tmp_path / name).write_text(text)
        return name

    (tmp_path / f"{FILE}.backup").write_text("of a person")
    leave("a", "")
    time.sleep(0.6)
    leave("b", json.dumps({**alive, "pid": process.pid}))
    kept = {leave("c", ""), leave("d", json.dumps(alive)), f"{FILE}.backup"}
    Lease.acquire(tmp_path, ignore).release()
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize(("earlier", "waits"), [(0, False), (1, True), (None, False)])
def test_restart_in_a_job_takes_over_its_lease_immediately(
    earlier: int | None, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array task has ended the earlier step, whose rank 0 was on another host.

    The step with the same number may be alive. A file without the number is from an older version.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    monkeypatch.setattr("megatron.checkpoint.lease.STALE_SECONDS", 0.3)
    lease = Lease.acquire(tmp_path, ignore)
    record = json.loads((tmp_path / FILE).read_text())
    lease.release()
    record |= {"host": "n9", "boot": "another", "step": earlier}
    if earlier is None:
        del record["step"]
    (tmp_path / FILE).write_text(json.dumps(record))
    said: list[str] = []
    Lease.acquire(tmp_path, said.append).release()
    assert any("waiting up to" in line for line in said) == waits
    assert "takes the folder over" in said[-1]


def test_an_array_task_is_named_by_its_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job number of the last task is that of the array, so scancel would end all tasks."""
    for name, value in (("JOB_ID", "7"), ("ARRAY_JOB_ID", "7"), ("ARRAY_TASK_ID", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    lease = Lease.acquire(tmp_path, ignore)
    holder = read_holder(tmp_path)
    lease.release()
    assert holder is not None
    assert holder.describe().endswith(", job 7_2")


def test_liveness_of_a_process_that_cannot_be_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only proof counts. Without it the heartbeat decides, which is None here."""
    held = Lease.acquire(tmp_path, ignore)
    holder = read_holder(tmp_path)
    assert holder is not None
    assert is_alive(holder) is True
    # Another process has the number now.
    assert is_alive(replace(holder, started="1")) is False
    # The writer could not read its own start time.
    assert is_alive(replace(holder, started="")) is None
    # No process can have this number.
    assert is_alive(replace(holder, pid=1 << 80)) is False

    def raises(error: OSError) -> Callable[..., None]:
        def fail(*arguments: object) -> None:
            raise error

        return fail

    # The process belongs to another user, and /proc shows it nevertheless.
    monkeypatch.setattr(os, "kill", raises(PermissionError()))
    assert is_alive(holder) is True
    # It ends between the two questions.
    monkeypatch.setattr(lease, "_read_start_time", raises(ProcessLookupError()))
    assert is_alive(holder) is False
    # /proc hides the processes of other users.
    monkeypatch.setattr(lease, "_read_start_time", raises(FileNotFoundError()))
    assert is_alive(holder) is None
    monkeypatch.setattr(lease, "_read_start_time", lambda pid: None)
    assert is_alive(holder) is False
    monkeypatch.undo()
    held.release()
