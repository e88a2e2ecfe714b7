"""Fixtures of the Hub's tests: a local server, the official client of it, and a run's folder."""

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from operations.hub_server import TOKEN, HubServer

from megatron.extras.operations.commands import hub_sync

ROOT = Path(__file__).resolve().parents[2]
REPO = "org/tiny-logs"
PATTERNS = ("tensorboard/**", "codecarbon/*.csv", "logs/**")
huggingface_hub = pytest.importorskip("huggingface_hub")
constants = importlib.import_module("huggingface_hub.constants")
http = importlib.import_module("huggingface_hub.utils._http")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """Start a Hub with an empty repository REPO, and point the client of this process to it."""
    with HubServer() as server:
        server.create(REPO)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [])
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        huggingface_hub.set_client_factory(http.default_client_factory)


def environment(server: HubServer, home: Path) -> dict[str, str]:
    """Return the environment variables for a tool in another process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return inherited | {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
    }


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Shorten each sleep to 10 ms, and return the durations that were requested."""
    requested: list[float] = []
    sleep = time.sleep

    def sleep_briefly(seconds: float) -> None:
        requested.append(seconds)
        sleep(min(seconds, 0.01))

    monkeypatch.setattr(time, "sleep", sleep_briefly)
    return requested


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run's folder with a log, TensorBoard events and emissions."""
    folder = tmp_path / "run"
    for name in ("tensorboard", "codecarbon", "logs", "checkpoints"):
        (folder / name).mkdir(parents=True)
    log_lines(folder / "logs" / "main_log.txt", 0, 100)
    (folder / "tensorboard" / "events.out.tfevents.1.n1.0").write_bytes(bytes(range(256)) * 20)
    (folder / "codecarbon" / "emissions.csv").write_text("timestamp,emissions\n1,0.5\n")
    (folder / "notes.md").write_text("not for the Hub\n")
    return folder


def log_lines(path: Path, begin: int, end: int, word: str = "iteration") -> None:
    """Append lines to a log."""
    with open(path, "a") as file:
        file.writelines(
            f"{word} {number:8d} | lm loss: {number / 7:.6E} |\n" for number in range(begin, end)
        )


def local_files(run: Path) -> dict[str, bytes]:
    """Return the files that PATTERNS match, name -> content."""
    paths = [
        path
        for name in ("tensorboard", "codecarbon", "logs")
        for path in (run / name).rglob("*")
        if path.is_file()
    ]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in paths}


def remote_files(server: HubServer, repo: str = REPO) -> dict[str, bytes]:
    """Return the files of the Hub, with the parts of a log joined.

    The joining is independent of the code under test.
    """
    joined: dict[str, bytes] = {}
    for path, content in sorted(server.files(repo).items()):
        stem, _, digits = path.rpartition(".")
        if len(digits) == 6 and digits.isdigit():
            joined[stem] = joined.get(stem, b"") + content
        else:
            joined[path] = content
    return joined


def assert_in_step(server: HubServer, run: Path, repo: str = REPO) -> None:
    """Check that the Hub has the files of the folder, and no others."""
    remote = remote_files(server, repo)
    local = local_files(run)
    assert remote.keys() == local.keys()
    assert remote == local


def assert_nothing_twice(server: HubServer, commits: int, repo: str = REPO) -> None:
    """Check the number of commits after the first one, and that nothing was sent twice.

    Every commit changes something, and no large content is uploaded more than once.
    """
    history = server.history(repo)
    assert [commit.title for commit in history[:-1]] == [
        commit.title for commit, parent in pairwise(history) if commit.tree != parent.tree
    ]
    assert len(history) - 1 == commits
    assert len(server.uploaded) == len(set(server.uploaded))


Sync = Callable[..., int]


@pytest.fixture
def sync(hub: HubServer, run: Path) -> Sync:
    """Return a function that runs tools/hub_sync.py in this process and returns its exit code."""

    def run_tool(*options: str, patterns: tuple[str, ...] = PATTERNS) -> int:
        arguments = ["--repo", REPO, "--folder", str(run)]
        if patterns:
            arguments += ["--patterns", *patterns]
        return int(hub_sync.main([*arguments, *options]))

    return run_tool
