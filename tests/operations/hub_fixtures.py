"""A Hub on this machine, the official client turned to it, and a run's folder: for the tests of the sync and of its reader."""

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from operations.hub_server import TOKEN, HubServer

from tools import hub_sync

ROOT = Path(__file__).resolve().parents[2]
REPO = "org/tiny-logs"
PATTERNS = ("tensorboard/**", "codecarbon/*.csv", "logs/**")
huggingface_hub = pytest.importorskip("huggingface_hub")
constants, http = (
    importlib.import_module(f"huggingface_hub.{name}") for name in ("constants", "utils._http")
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """With an empty repository REPO; the client of this process talks to it."""
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
    """For a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return inherited | {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(home),
    }


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the code wanted to sleep; it sleeps an instant."""
    asked: list[float] = []
    sleep = time.sleep

    def doze(seconds: float) -> None:
        asked.append(seconds)
        sleep(min(seconds, 0.01))

    monkeypatch.setattr(time, "sleep", doze)
    return asked


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder: a log, TensorBoard events, emissions."""
    folder = tmp_path / "run"
    for name in ("tensorboard", "codecarbon", "logs", "checkpoints"):
        (folder / name).mkdir(parents=True)
    log_lines(folder / "logs" / "main_log.txt", 0, 100)
    (folder / "tensorboard" / "events.out.tfevents.1.n1.0").write_bytes(bytes(range(256)) * 20)
    (folder / "codecarbon" / "emissions.csv").write_text("timestamp,emissions\n1,0.5\n")
    (folder / "notes.md").write_text("not for the Hub\n")
    return folder


def log_lines(path: Path, begin: int, end: int, word: str = "iteration") -> None:
    """Append lines."""
    with open(path, "a") as file:
        file.writelines(
            f"{word} {number:8d} | lm loss: {number / 7:.6E} |\n" for number in range(begin, end)
        )


def local_files(run: Path) -> dict[str, bytes]:
    """What PATTERNS match."""
    paths = [
        path
        for name in ("tensorboard", "codecarbon", "logs")
        for path in (run / name).rglob("*")
        if path.is_file()
    ]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in paths}


def remote_files(server: HubServer, repo: str = REPO) -> dict[str, bytes]:
    """What the Hub holds, its parts joined; the joining is written out here once more, apart from the code under test."""
    joined: dict[str, bytes] = {}
    for path, content in sorted(server.files(repo).items()):
        stem, _, digits = path.rpartition(".")
        joined[stem if len(digits) == 6 and digits.isdigit() else path] = (
            joined.get(stem, b"") + content
        )
    return joined


def assert_in_step(server: HubServer, run: Path, repo: str = REPO) -> None:
    remote, local = remote_files(server, repo), local_files(run)
    assert remote.keys() == local.keys()
    assert remote == local


def assert_nothing_twice(server: HubServer, commits: int, repo: str = REPO) -> None:
    """So many commits beyond the first, none without a change, and no large content sent more than once."""
    history = server.history(repo)
    assert [commit.title for commit in history[:-1]] == [
        commit.title for commit in history[:-1] if commit.tree != commit.parent.tree
    ]
    assert len(history) - 1 == commits
    assert len(server.uploaded) == len(set(server.uploaded))


Sync = Callable[..., int]


@pytest.fixture
def sync(hub: HubServer, run: Path) -> Sync:
    """tools/hub_sync.py in this process: sync("--option", ...) -> exit code."""

    def go(*options: str, patterns: tuple[str, ...] = PATTERNS) -> int:
        chosen = ("--patterns", *patterns) if patterns else ()
        return int(hub_sync.main(["--repo", REPO, "--folder", str(run), *chosen, *options]))

    return go
