"""The commit that runs, from git's own files; a fixture made by git itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.code_version import _read_commit

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-C"]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        [*GIT, str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_is_gits(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init")
    git(repository, "commit", "--allow-empty", "-m", "first")
    head = git(repository, "rev-parse", "HEAD")
    assert _read_commit(repository / ".git") == head
    git(repository, "pack-refs", "--all")
    assert not (repository / ".git" / "refs" / "heads" / "main").exists()
    assert _read_commit(repository / ".git") == head
    git(repository, "worktree", "add", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "--allow-empty", "-m", "second")
    assert (
        _read_commit(tmp_path / "tree" / ".git")
        == git(tmp_path / "tree", "rev-parse", "HEAD")
        != head
    )
    git(repository, "checkout", "--detach", "HEAD")
    assert _read_commit(repository / ".git") == head


def test_without_a_checkout_there_is_none(tmp_path: Path) -> None:
    assert _read_commit(tmp_path / ".git") is None
