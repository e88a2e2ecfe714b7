"""The commit of the running code is read from git's files, in a repository made by git."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from megatron.base.code_version import (
    PACKAGE,
    compute_file_digests,
    get_code_version,
    read_commit,
)
from megatron.extras.operations.slurm.client import CHECKOUT
from megatron.extras.planner.dry_run.record import _PACKAGE
from megatron.parallel.messages import _WRAPPERS

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


def test_version_and_digests_cover_the_whole_package() -> None:
    """The package's folder is right wherever the module is that looks for it."""
    root = Path(__file__).resolve().parents[1]
    assert root / "megatron" == PACKAGE
    assert {"model/loss.py", "run/loop.py", "presets/llama2-7b.yaml"} <= set(compute_file_digests())
    packages = {f"megatron.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    # lint-imports checks only these.
    assert packages == set(settings["tool"]["importlinter"]["root_packages"])
    commit = read_commit(root / ".git")
    assert get_code_version().endswith("" if commit is None else f"+g{commit[:10]}")
    assert (CHECKOUT / "pretrain_gpt.py").is_file()


def test_places_in_the_code_are_named_by_files_that_exist() -> None:
    assert all(Path(name).is_file() for name in _WRAPPERS)
    assert f"{PACKAGE}/" == _PACKAGE
