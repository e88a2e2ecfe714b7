"""The lease of a checkpoint folder on a file system without hard links."""

import errno
import json
import os
from pathlib import Path

import pytest

from megatron.checkpoint.lease import FILE, Lease
from megatron.errors import CheckpointError


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
