"""The commit of the running code is read from git's files, in a repository made by git."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.base.code_version import read_commit

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-C"]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        [*GIT, str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_equals_the_one_that_git_reports(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init")
    git(repository, "commit", "--allow-empty", "-m", "first")
    head = git(repository, "rev-parse", "HEAD")
    assert read_commit(repository / ".git") == head
    git(repository, "pack-refs", "--all")
    assert not (repository / ".git" / "refs" / "heads" / "main").exists()
    assert read_commit(repository / ".git") == head
    git(repository, "worktree", "add", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "--allow-empty", "-m", "second")
    second = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert second != head
    assert read_commit(tmp_path / "tree" / ".git") == second
    git(repository, "checkout", "--detach", "HEAD")
    assert read_commit(repository / ".git") == head


def test_no_commit_without_a_checkout(tmp_path: Path) -> None:
    assert read_commit(tmp_path / ".git") is None
