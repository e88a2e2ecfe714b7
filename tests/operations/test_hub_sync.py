"""tools/hub_sync.py, by the official client, with a Hub on this machine: it ends up with what the folder has, nothing twice."""

# ruff: noqa: F811 (fixtures are imported by their names)

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from operations.hub_fixtures import (  # noqa: F401
    PATTERNS,
    REPO,
    ROOT,
    Sync,
    assert_in_step,
    assert_nothing_twice,
    constants,
    environment,
    hub,
    local_files,
    log_lines,
    pauses,
    remote_files,
    run,
    sync,
)
from operations.hub_server import TOKEN, HubServer, wait_for

from megatron.checkpoint.digest import digest_of_file
from megatron.checkpoint.manifest import Manifest
from megatron.operations import hub_push, hub_queue

LOG = "logs/main_log.txt"
EVENTS = "tensorboard/events.out.tfevents.1.n1.0"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts of at most 1,000 bytes."""
    monkeypatch.setattr(hub_queue.digest, "__kwdefaults__", {"part_bytes": 1000})
    return 1000


def make_old(folder: Path) -> None:
    """Time stamps at which the digests of the last sync are trusted."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 100, time.time() - 100))


# What is sent


def test_new_and_grown_files(
    hub: HubServer, run: Path, sync: Sync, small_parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sync() == 0
    assert_in_step(hub, run)
    before = hub.files(REPO)
    assert len(before) == 2 + 5
    assert all(
        len(content) <= small_parts and content.endswith(b"\n")
        for path, content in before.items()
        if LOG in path
    )
    log_lines(run / LOG, 100, 130)
    (run / "logs" / "other.txt").write_text("new\n")
    with open(run / EVENTS, "ab") as events:
        events.write(b"more")
    hub.requests.clear()
    capsys.readouterr()
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=2)
    closed = [path for path, content in before.items() if hub.files(REPO)[path] == content]
    assert len(closed) == 1 + 4  # the emissions, all parts but the open one
    out = capsys.readouterr().out
    assert "main_log.txt.000004 logs/main_log.txt.000005 logs/other.txt.000000 tensorboard/" in out
    assert "main_log.txt.000003" not in out
    assert "notes.md" not in hub.files(REPO)


def test_nothing_changed(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    sync()
    hub.requests.clear()
    capsys.readouterr()
    assert sync() == 0
    assert hub.requests == ["refs"]
    assert "3 files, all there" in capsys.readouterr().out


def test_two_thousand_files_unchanged(
    hub: HubServer, run: Path, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2000):
        log_lines(run / "logs" / f"worker_{number}.log", number, number + 3)
    make_old(run)
    assert sync() == 0
    assert len(hub.files(REPO)) == 2003
    hub.requests.clear()
    read: list[Path] = []
    digest = hub_queue.digest
    monkeypatch.setattr(
        hub_queue, "digest", lambda path, **how: read.append(path) or digest(path, **how)
    )
    began = time.monotonic()
    assert sync() == 0
    assert time.monotonic() - began < 20  # under 5 s on a machine with nothing else to do
    assert hub.requests == ["refs"]
    assert read == []
    log_lines(run / "logs" / "worker_7.log", 0, 1)
    assert sync() == 0
    assert [path.name for path in read] == ["worker_7.log"]
    assert len(hub.history(REPO)[0].tree) == 2004


@pytest.mark.parametrize("damage", ["lost", "damaged", "of another repository"])
def test_lost_state_sends_nothing_again(
    damage: str, hub: HubServer, run: Path, sync: Sync, small_parts: int
) -> None:
    hub.page = 3
    sync()
    state = hub_push.get_default_state_path(run, REPO)
    if damage == "lost":
        state.unlink()
    elif damage == "damaged":
        state.write_text(state.read_text()[:100])
    else:
        state.write_text(
            json.dumps(json.loads(state.read_text()) | {"repository": "elsewhere/org/x"})
        )
    hub.requests.clear()
    assert sync() == 0
    assert_nothing_twice(hub, commits=1)
    assert "preupload" not in hub.requests
    hub.requests.clear()
    assert sync() == 0
    assert hub.requests == ["refs"]


def test_the_hubs_other_files_stay(hub: HubServer, run: Path, sync: Sync) -> None:
    head = hub.history(REPO)[0]
    head.tree["README.md"] = head.tree["logs/by_hand.txt.000000"] = head.tree[".gitattributes"]
    sync()
    (run / "logs" / "extra.txt").write_text("x\n")
    sync()
    (run / "logs" / "extra.txt").unlink()
    assert sync() == 0
    assert {"README.md", "logs/by_hand.txt.000000"} < hub.files(REPO).keys()
    assert "logs/extra.txt.000000" not in hub.files(REPO)


def test_commits_are_bounded(
    hub: HubServer, run: Path, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hub_queue.plan_commit, "__kwdefaults__", {"commit_bytes": 6000, "commit_files": 4}
    )
    monkeypatch.setattr(hub_queue.digest, "__kwdefaults__", {"part_bytes": 500})
    for number in range(5):
        log_lines(run / "logs" / f"rank_{number}.txt", 0, 5)
    monkeypatch.setattr(hub_push, "IN_MEMORY_BYTES", 100)  # and contents are copied aside
    assert sync() == 0
    assert_in_step(hub, run)
    history = hub.history(REPO)
    assert len(history) > 4
    for commit in history[:-1]:
        new = [
            path
            for path in commit.tree
            if commit.tree[path] is not (commit.parent.tree.get(path) if commit.parent else None)
        ]
        assert len(new) <= 4
    assert not list((run / hub_push.OWN_FOLDER).glob("*.copies"))


# Logs that are cut


def test_a_log_cut_by_a_rollback(
    hub: HubServer, run: Path, sync: Sync, small_parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sync()
    os.truncate(run / LOG, 1500)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=2)
    out = capsys.readouterr().out
    assert f"deleted on the Hub: {LOG}.000002" in out
    assert f"deleted on the Hub: {LOG}.000001" not in out


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_log_cut_and_grown_again(
    state: str, hub: HubServer, run: Path, sync: Sync, small_parts: int
) -> None:
    sync()
    size = (run / LOG).stat().st_size
    os.truncate(run / LOG, 900)
    log_lines(run / LOG, 50, 200, "after the rollback")
    assert (run / LOG).stat().st_size > size
    if state == "lost":
        hub_push.get_default_state_path(run, REPO).unlink()
        os.truncate(run / LOG, size - 1200)  # and there is a surplus that no state knows
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=2)


def test_at_each_commit_the_parts_are_the_beginning_of_the_log(run: Path) -> None:
    """Whatever the Hub held before, commit by commit, and however small the commits are."""
    random.seed(5)
    path = run / LOG
    for _ in range(60):
        state = hub_queue.SyncState()
        held: dict[str, bytes] = {}
        for kept in (0, random.randrange(3000), random.randrange(3000)):
            os.truncate(path, min(kept, path.stat().st_size))
            log_lines(path, 0, random.randrange(60), word=random.choice(["abc", "a word"]))
            local = path.read_bytes()
            wanted, _ = hub_queue.plan_remote_files(
                {LOG: hub_queue.digest(path, rotated=True, part_bytes=300)}
            )
            for _ in range(100):
                groups = hub_queue.plan_commit(
                    wanted, state, commit_bytes=random.choice([200, 700, 2000])
                )
                if not groups:
                    break
                for piece in groups[0].adds:
                    held[piece.remote] = local[piece.offset : piece.offset + piece.blob.size]
                    state.sent[piece.remote] = hub_queue.SentFile(f"git:{piece.blob.git}", LOG)
                for remote in groups[0].deletes:
                    del held[remote], state.sent[remote]
                assert local.startswith(b"".join(held[name] for name in sorted(held)))
            assert b"".join(held[name] for name in sorted(held)) == local


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"a\n" * 50, b"a long line " * 9 + b"\nshort\n" * 4, b"no end", b"x" * 80 + b"\n"],
)
def test_parts_join(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for end in range(len(text) + 1):
        path.write_bytes(text[:end])
        blobs = hub_queue.digest(path, rotated=True, part_bytes=20).blobs
        assert sum(blob.size for blob in blobs) == end
        assert max(blob.size for blob in blobs) <= 20


def test_closed_parts_stay_while_a_log_grows(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    closed: list[hub_queue.Blob] = []
    for step in range(200):
        with open(path, "ab") as log:
            log.write(
                random.Random(step).choice(
                    [b"line\n", b"half a ", b"a line of more than twenty bytes\n", b"\n"]
                )
            )
        blobs = list(hub_queue.digest(path, rotated=True, part_bytes=20).blobs)
        assert blobs[: len(closed)] == closed
        closed = blobs[:-1]
    assert len(closed) > 50


# Files that change under our hands


def test_files_that_change_while_they_are_read(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("vanishes.txt", "rewritten.txt"):
        log_lines(run / "logs" / name, 0, 10)
    compared = local_files(run)
    look = hub_push.look

    def look_then_change(*args: Any) -> hub_queue.FolderScan:
        found = look(*args)
        log_lines(run / LOG, 100, 101)
        with open(run / EVENTS, "ab") as events:
            events.write(b"half a record")
        (run / "logs" / "vanishes.txt").unlink()
        (run / "logs" / "rewritten.txt").write_text("all new\n")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(hub_push, "look", look_then_change)
        assert sync() == 1
    remote = remote_files(hub)
    assert remote == {name: compared[name] for name in (LOG, EVENTS, "codecarbon/emissions.csv")}
    told = capsys.readouterr().err
    assert "logs/vanishes.txt vanished before it was sent" in told
    assert "logs/rewritten.txt cannot be sent (it was rewritten meanwhile)" in told
    assert sync() == 0
    assert_in_step(hub, run)


def test_a_file_rewritten_under_the_same_time_stamp(hub: HubServer, run: Path, sync: Sync) -> None:
    path = run / "codecarbon" / "emissions.csv"
    sync()
    status = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sync() == 0
    assert_in_step(hub, run)


def test_only_the_patterns_folders_are_looked_into(run: Path) -> None:
    (run / "a" / "b" / "c").mkdir(parents=True)
    (run / "a" / "b" / "c" / "x.txt").write_text("x\n")
    (run / "linked").symlink_to(run / "a")
    listed = []
    walk = os.walk

    def watched(*args: Any, **how: Any) -> Any:
        for root, *rest in walk(*args, **how):
            listed.append(os.path.relpath(root, run))
            yield root, *rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "walk", watched)
        assert hub_queue.look(run, ["a/b/*/x.txt", "logs/*"], {}).present == {
            "a/b/c/x.txt",
            "logs/main_log.txt",
        }
        assert listed == [".", "a", "a/b", "a/b/c", "logs"]
        assert hub_queue.look(run, ["linked/**"], {}).present == {"linked/b/c/x.txt"}


def test_a_folder_that_cannot_be_listed_deletes_nothing(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (run / "logs" / "deep").mkdir()
    (run / "logs" / "deep" / "b.txt").write_text("x\n")
    sync()
    scandir = os.scandir

    def stale(path: Any) -> Any:
        if os.fspath(path).endswith("deep"):
            raise OSError(116, "Stale file handle", os.fspath(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", stale)
        assert sync() == 1
    assert "deep cannot be listed (Stale file handle)" in capsys.readouterr().err
    assert_in_step(hub, run)


def test_deleted_files(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "logs" / "old.txt").write_text("x\n")
    (run / "logs" / "unreadable.txt").write_text("x\n")
    sync()
    (run / "logs" / "old.txt").unlink()
    (run / "logs" / "unreadable.txt").unlink()
    (run / "logs" / "unreadable.txt").mkdir()  # present, though nothing that could be read
    (run / EVENTS).unlink()
    capsys.readouterr()
    assert (
        sync(patterns=("logs/**", "codecarbon/*.csv")) == 0
    )  # what the patterns do not cover stays
    assert hub.files(REPO).keys() == {
        "logs/main_log.txt.000000",
        "codecarbon/emissions.csv",
        EVENTS,
    }
    assert "deleted on the Hub: logs/old.txt.000000" in capsys.readouterr().out


def test_nothing_is_deleted_where_a_pattern_finds_nothing(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    sync()
    (run / EVENTS).unlink()  # as of a disk that is not mounted
    assert sync() == 1
    assert EVENTS in hub.files(REPO)
    told = capsys.readouterr().err
    assert "the pattern tensorboard/** matches no file" in told
    assert f"{EVENTS} is gone here" in told


def test_a_file_makes_way_for_a_part_of_its_name(hub: HubServer, run: Path, sync: Sync) -> None:
    (run / "logs" / "a.txt.000000").write_text("a file\n")
    sync()
    (run / "logs" / "a.txt.000000").rename(run / "logs" / "a.txt")
    assert sync() == 0
    assert hub.files(REPO)["logs/a.txt.000000"] == b"a file\n"
    assert_nothing_twice(hub, commits=1)
    log_lines(run / "logs" / "a.txt", 0, 3)
    assert sync() == 0
    assert_in_step(hub, run)


def test_names_that_cannot_be_copied(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "logs" / "main_log.txt.000007").write_text("the name of a part\n")
    Path(os.fsdecode(os.fsencode(run / "logs") + b"/\xff.txt")).write_text("no UTF-8\n")
    os.mkfifo(run / "logs" / "pipe")
    (run / "logs" / ".hidden").write_text("x\n")
    (run / "logs" / "loop").symlink_to(run / "logs")
    assert sync() == 1
    assert hub.files(REPO).keys() == {
        "logs/main_log.txt.000000",
        "codecarbon/emissions.csv",
        EVENTS,
    }
    told = capsys.readouterr().err
    assert "main_log.txt.000007 has the name of a part of logs/main_log.txt" in told
    assert "has a name that is no UTF-8" in told
    assert "logs/pipe is no regular file" in told


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("logs/**", ["logs/a", "logs/b/c.txt"], ["logs", "logs/.a", "logs/.b/c", "a/logs/b"]),
        ("**", ["a", "b/c"], [".a", "b/.c"]),
        ("**/*.csv", ["a.csv", "b/c/d.csv"], ["a.csv.old", ".b/a.csv", "b/.a.csv"]),
        ("a/*.csv", ["a/b.csv"], ["a/b/c.csv", "a/.csv"]),
        ("a?[0-9].txt", ["ab1.txt"], ["ab.txt", "abc.txt", "a/1.txt"]),
        ("a[!0-9]", ["ab"], ["a1", "a/"]),
        ("a.(b)+", ["a.(b)+"], ["axb", "a.b"]),
        (".hidden/*", [".hidden/a"], ["hidden/a"]),
    ],
)
def test_patterns_are_the_shells(pattern: str, matching: list[str], others: list[str]) -> None:
    regex = hub_queue.re.compile(hub_queue.convert_pattern(pattern))
    assert [name for name in [*matching, *others] if regex.fullmatch(name)] == matching


# A Hub that fails


@pytest.mark.parametrize(
    "kind", ["refs", "tree", "preupload", "batch", "upload", "verify", "commit"]
)
@pytest.mark.parametrize("status", [500, 429])
def test_a_failure_of_any_request(
    kind: str,
    status: int,
    hub: HubServer,
    run: Path,
    sync: Sync,
    pauses: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.fail(kind, times=2, status=status, headers={"Retry-After": "7"} if status == 429 else {})
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)
    assert len(pauses) == 2
    if status == 429:
        assert min(pauses) >= 7
    output = capsys.readouterr()
    assert str(status) in output.err
    assert "sEcReTsIgNaTuRe" not in output.err + output.out


def test_a_failure_that_lasts(
    hub: HubServer, run: Path, sync: Sync, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail("upload", times=1000, status=503)
    assert sync("--patience", "0.001") == 3
    assert hub.files(REPO) == {}
    assert "nothing is lost" in capsys.readouterr().err
    hub.faults.clear()
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)


def test_an_answer_that_is_lost(
    hub: HubServer, run: Path, sync: Sync, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail("commit", lose_answer=True)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)
    assert hub.count("commit") == 1
    assert "had landed, its answer was lost" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["refs", "tree", "commit"])
def test_a_silent_hub(
    kind: str, hub: HubServer, run: Path, sync: Sync, pauses: list[float]
) -> None:
    silence = threading.Event()
    hub.fail(kind, silence=silence)
    assert sync("--timeout", "0.5") == 0
    assert_in_step(hub, run)
    silence.set()  # a commit that the Hub takes up only now is upon a head that is no longer one
    wait_for(lambda: hub.answered == len(hub.requests))
    assert_nothing_twice(hub, commits=1)


def test_somebody_commits_meanwhile(
    hub: HubServer, run: Path, sync: Sync, pauses: list[float]
) -> None:
    hub.fail("commit", status=412)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)


def test_offline(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            hub_push.Hub.__init__.__globals__["importlib"]
            .import_module("huggingface_hub")
            .constants,
            "ENDPOINT",
            "http://127.0.0.1:9",
        )
        assert sync("--patience", "0") == 3
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert sync() == 0
    assert_in_step(hub, run)


def test_told_to_be_offline(
    hub: HubServer,
    sync: Sync,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sync() == 3
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert pauses == []


@pytest.mark.parametrize("kind", ["preupload", "upload", "commit"])
def test_killed_in_mid_sync(
    kind: str, hub: HubServer, run: Path, sync: Sync, tmp_path: Path
) -> None:
    """Killed in a request that the Hub completes afterwards: the upload is kept, the commit has landed."""
    silence = hub.fail(kind, silence=threading.Event()).silence
    assert silence is not None
    command = [
        sys.executable,
        "tools/hub_sync.py",
        "--repo",
        REPO,
        "--folder",
        str(run),
        "--patterns",
        *PATTERNS,
    ]
    errors = tmp_path / "stderr"
    with open(errors, "wb") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(hub, tmp_path), stdout=stderr, stderr=stderr
        )
        try:
            wait_for(lambda: hub.reached.is_set() or process.poll() is not None)
            assert process.poll() is None, errors.read_text()
            assert TOKEN.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    silence.set()
    if kind == "upload":
        wait_for(lambda: len(hub.uploaded) == 1)
    if kind == "commit":
        wait_for(lambda: len(hub.history(REPO)) == 2)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)
    hub.requests.clear()
    assert sync() == 0
    assert hub.requests == ["refs"]


# What a person must fix


def test_an_expired_token_in_mid_sync(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.fail(
        "commit",
        status=401,
        headers={"X-Error-Message": "Invalid credentials in Authorization header"},
    )
    assert sync() == 2
    output = capsys.readouterr()
    assert "refuses the token (401: Invalid credentials" in output.err
    assert TOKEN not in output.err + output.out
    hub.token = "hf_aNewOne"
    assert sync() == 2
    monkeypatch.setenv("HF_TOKEN", "hf_aNewOne")
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)
    output = capsys.readouterr()
    assert TOKEN not in output.err + output.out
    assert "hf_aNewOne" not in output.err + output.out


def test_no_token(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert sync() == 2
    assert "set HF_TOKEN" in capsys.readouterr().err
    assert hub.requests == []


def test_no_client(
    sync: Sync, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert sync() == 2
    assert "pip install -e '.[hub]'" in capsys.readouterr().err


def test_no_write_access(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.readonly = True
    assert sync() == 2
    assert (
        f"the token may not do this to {REPO} (403: you need write access)"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("private", [True, False])
def test_an_unknown_repository_and_create(
    private: bool, hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    del hub.repositories[REPO]
    assert sync() == 2
    assert f"there is no repository {REPO} on 127.0.0.1" in capsys.readouterr().err
    assert sync("--create", "--dry-run") == 0
    assert REPO not in hub.repositories
    assert sync("--create", *(() if private else ("--no-private",))) == 0
    assert hub.repositories[REPO].private == private
    assert_in_step(hub, run)
    assert sync("--create") == 0


def test_patterns_that_match_nothing(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    sync()
    assert sync(patterns=("logz/**", "*.csv")) == 2
    assert "--patterns logz/** *.csv match no file in" in capsys.readouterr().err
    assert sync(patterns=("logz/**", *PATTERNS)) == 1
    assert "the pattern logz/** matches no file" in capsys.readouterr().err
    assert_in_step(hub, run)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--repo", "a b"), "'a b' names no repository"),
        (("--folder", "/nowhere"), "--folder /nowhere is no folder"),
        (("--every", "0"), "--every 0 must be 1 or more"),
        (("--timeout", "0"), "--timeout and --watch must be more than 0"),
        (("--checkpoints", "/nowhere"), "--checkpoints /nowhere is no folder"),
        (("--state", "/proc/none/state.json"), "give a --state in a folder that can"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...],
    told: str,
    hub: HubServer,
    sync: Sync,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sync(*options) == 2
    assert told in capsys.readouterr().err


def test_nothing_asked_for(hub: HubServer, sync: Sync, capsys: pytest.CaptureFixture[str]) -> None:
    assert sync(patterns=()) == 2
    assert "give --patterns, --checkpoints, or both" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["localhost:80", "http://user:hf_password@127.0.0.1:9"])
def test_a_wrong_endpoint(
    endpoint: str,
    hub: HubServer,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert sync() == 2
    told = capsys.readouterr().err
    assert "HF_ENDPOINT" in told
    assert "hf_password" not in told


def test_the_repositorys_gitignore(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    head = hub.history(REPO)[0]
    head.tree[".gitignore"] = type(head.tree[".gitattributes"])(f"{EVENTS}\n".encode(), False)
    assert sync() == 1
    assert EVENTS not in hub.files(REPO)
    assert f"{EVENTS} is kept out by the .gitignore" in capsys.readouterr().err
    assert sync() == 1
    assert_nothing_twice(hub, commits=1)


# One at a time, again and again, not at all


def test_two_at_once(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = hub_push.get_default_state_path(run, REPO).with_name("org--tiny-logs.json.lock")
    lock.parent.mkdir()
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sync() == 0
    assert "another sync is at work here" in capsys.readouterr().err
    assert hub.requests == []
    assert sync() == 0
    assert_in_step(hub, run)


def test_watch_goes_on(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = []

    def between(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 1:
            log_lines(run / LOG, 100, 110)
            hub.token = "hf_aNewOne"
        elif len(rounds) == 2:
            monkeypatch.setenv("HF_TOKEN", "hf_aNewOne")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", between)
    with pytest.raises(KeyboardInterrupt):
        sync("--watch", "3600")
    assert rounds == [3600.0] * 3
    assert_in_step(hub, run)
    assert "refuses the token" in capsys.readouterr().err


def test_watch_does_not_begin_with_an_error(hub: HubServer, sync: Sync) -> None:
    assert sync("--watch", "3600", patterns=("logz/**",)) == 2


def test_dry_run(hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]) -> None:
    assert sync("--dry-run") == 0
    assert "would send logs/main_log.txt.000000 (" in capsys.readouterr().out
    sync()
    (run / "logs" / "b.txt").write_text("x\n")
    os.truncate(run / LOG, 0)
    sync()
    (run / "logs" / "b.txt").unlink()
    state = hub_push.get_default_state_path(run, REPO).read_bytes()
    capsys.readouterr()
    assert sync("--dry-run") == 0
    assert capsys.readouterr().out == "would delete on the Hub: logs/b.txt.000000\n"
    assert hub_push.get_default_state_path(run, REPO).read_bytes() == state
    assert "logs/b.txt.000000" in hub.files(REPO)


# Checkpoints


def save_checkpoint(
    root: Path, iteration: int, content: bytes = b"weights", others: tuple[str, ...] = ()
) -> Path:
    """A finished checkpoint, as small as can be."""
    folder = root / f"global_step{iteration}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content * iteration)
    (folder / "config.yaml").write_text("num_layers: 2\n")
    for name in others:
        (folder / name).write_bytes(content)
    names = ("model.safetensors", "config.yaml", *others)
    files = {
        name: {"bytes": (d := digest_of_file(folder / name)).bytes, "xxh128": d.xxh128}
        for name in names
    }
    manifest = Manifest(iteration, "test", "one process", {}, None, files, course=[], keep=False)
    (folder / "manifest.json").write_text(manifest.dump_json())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_checkpoints_go_to_branches_of_their_own(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = run / "checkpoints"
    for iteration in (10, 15, 20):
        save_checkpoint(root, iteration)
    (save_checkpoint(root, 30) / "manifest.json").unlink()
    os.truncate(save_checkpoint(root, 40) / "model.safetensors", 5)
    monkeypatch.setattr("megatron.operations.hub_checkpoints.IN_MEMORY_BYTES", 100)
    options = ("--checkpoints", str(root), "--every", "10")
    assert sync(*options, "--dry-run") == 1
    assert hub.repositories[REPO].branches.keys() == {"main"}
    assert sync(*options) == 1
    assert "global_step40 is left out: model.safetensors has 5 bytes" in capsys.readouterr().err
    assert hub.repositories[REPO].branches.keys() == {"main", "global_step10", "global_step20"}
    assert_in_step(hub, run)
    for iteration in (10, 20):
        assert hub.files(REPO, f"global_step{iteration}") == contents(
            root / f"global_step{iteration}"
        )
    uploads = len(hub.uploaded)
    hub.requests.clear()
    assert sync(*options) == 1
    assert hub.requests == ["refs", "refs"]
    hub_push.get_default_state_path(run, REPO).unlink()
    hub.requests.clear()
    assert sync(*options) == 1
    assert {"preupload", "upload", "commit"}.isdisjoint(hub.requests)
    assert len(hub.uploaded) == uploads


def test_a_checkpoint_saved_again_after_a_rollback(hub: HubServer, run: Path, sync: Sync) -> None:
    root = run / "checkpoints"
    folder = save_checkpoint(root, 10, others=("optimizer-2.safetensors",))
    sync("--checkpoints", str(root), patterns=())
    (folder / "optimizer-2.safetensors").unlink()
    save_checkpoint(root, 10, b"others")
    assert sync("--checkpoints", str(root), patterns=()) == 0
    assert hub.files(REPO, "global_step10") == contents(folder)
    assert len(hub.history(REPO, "global_step10")) == 3
    assert hub.files(REPO) == {}


@pytest.mark.parametrize("kind", ["branch", "commits", "upload", "commit"])
def test_a_checkpoint_through_failures(
    kind: str, hub: HubServer, run: Path, sync: Sync, pauses: list[float]
) -> None:
    root = run / "checkpoints"
    folder = save_checkpoint(root, 10)
    hub.fail(kind, times=2, status=502)
    hub.fail("commit", lose_answer=True)
    assert sync("--checkpoints", str(root), patterns=()) == 0
    assert hub.files(REPO, "global_step10") == contents(folder)
    assert len(hub.history(REPO, "global_step10")) == 2
    assert len(hub.uploaded) == 1


def test_a_checkpoint_deleted_while_it_is_sent(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = run / "checkpoints"
    folder = save_checkpoint(root, 10)
    save_checkpoint(root, 20)
    monkeypatch.setattr("megatron.operations.hub_checkpoints.IN_MEMORY_BYTES", 10)
    create_branch = hub_push.Hub.create_branch

    def then_delete(self: hub_push.Hub, branch: str) -> None:
        create_branch(self, branch)
        (folder / "model.safetensors").unlink(missing_ok=True)

    monkeypatch.setattr(hub_push.Hub, "create_branch", then_delete)
    assert sync("--checkpoints", str(root), patterns=()) == 1
    assert "global_step10 is left out" in capsys.readouterr().err
    assert hub.files(REPO, "global_step10") == {}
    assert hub.files(REPO, "global_step20") == contents(root / "global_step20")
