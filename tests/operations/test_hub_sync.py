"""tools/hub_sync.py, with the official client and a local server, sends each content once."""

# ruff: noqa: F811 (fixtures are imported by their names)

import fcntl
import json
import os
import random
import re
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
from operations.hub_server import TOKEN, HubServer, Stored, wait_for

from megatron.checkpoint.digest import digest_of_file
from megatron.checkpoint.manifest import Manifest
from megatron.extras.operations.hub import push as hub_push
from megatron.extras.operations.hub import queue as hub_queue

LOG = "logs/main_log.txt"
EVENTS = "tensorboard/events.out.tfevents.1.n1.0"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit the parts of logs to 1,000 bytes."""
    monkeypatch.setattr(hub_queue, "PART_BYTES", 1000)
    return 1000


def make_old(folder: Path) -> None:
    """Set old modification times, at which a sync trusts the digests of the last one."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 100, time.time() - 100))


# What is sent


def test_only_new_files_and_new_parts_are_sent(
    hub: HubServer, run: Path, sync: Sync, small_parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a log has grown, only its open part and new parts are sent, in one commit."""
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
    unchanged = [path for path, content in before.items() if hub.files(REPO)[path] == content]
    # The emissions, and all parts but the open one.
    assert len(unchanged) == 1 + 4
    out = capsys.readouterr().out
    assert "main_log.txt.000004 logs/main_log.txt.000005 logs/other.txt.000000 tensorboard/" in out
    assert "main_log.txt.000003" not in out
    assert "notes.md" not in hub.files(REPO)


def test_an_unchanged_folder_costs_one_request(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sync without changes only asks for the head of the branch."""
    sync()
    hub.requests.clear()
    capsys.readouterr()
    assert sync() == 0
    assert hub.requests == ["refs"]
    assert "3 files, nothing to send" in capsys.readouterr().out


def test_unchanged_files_are_not_read_again(
    hub: HubServer, run: Path, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync of 2,000 unchanged files reads none of them, and is fast."""
    for number in range(2000):
        log_lines(run / "logs" / f"worker_{number}.log", number, number + 3)
    make_old(run)
    assert sync() == 0
    assert len(hub.files(REPO)) == 2003
    hub.requests.clear()
    read: list[Path] = []
    digest = hub_queue.digest

    def note_and_digest(path: Path, **how: Any) -> hub_queue.LocalFile:
        read.append(path)
        return digest(path, **how)

    monkeypatch.setattr(hub_queue, "digest", note_and_digest)
    started = time.monotonic()
    assert sync() == 0
    # It takes less than 5 s on an idle machine.
    assert time.monotonic() - started < 20
    assert hub.requests == ["refs"]
    assert read == []
    log_lines(run / "logs" / "worker_7.log", 0, 1)
    assert sync() == 0
    assert [path.name for path in read] == ["worker_7.log"]
    assert len(hub.history(REPO)[0].tree) == 2004


@pytest.mark.parametrize("damage", ["lost", "damaged", "of another repository"])
def test_a_lost_state_file_causes_no_second_upload(
    damage: str, hub: HubServer, run: Path, sync: Sync, small_parts: int
) -> None:
    """Without a usable state file the sync lists the repository, and sends nothing again."""
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


def test_files_of_other_people_are_not_deleted(hub: HubServer, run: Path, sync: Sync) -> None:
    """Only files that a sync has sent are deleted on the Hub."""
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
    """A sync of many files makes several commits, none with more files than the limit."""
    monkeypatch.setattr(hub_queue, "COMMIT_BYTES", 6000)
    monkeypatch.setattr(hub_queue, "COMMIT_FILES", 4)
    monkeypatch.setattr(hub_queue, "PART_BYTES", 500)
    for number in range(5):
        log_lines(run / "logs" / f"rank_{number}.txt", 0, 5)
    # Larger contents are copied to temporary files, which must be deleted at the end.
    monkeypatch.setattr(hub_push, "IN_MEMORY_BYTES", 100)
    assert sync() == 0
    assert_in_step(hub, run)
    history = hub.history(REPO)
    assert len(history) > 4
    for commit in history[:-1]:
        assert commit.parent is not None
        earlier = commit.parent.tree
        new = [path for path in commit.tree if commit.tree[path] is not earlier.get(path)]
        assert len(new) <= 4
    assert not list((run / hub_push.OWN_FOLDER).glob("*.copies"))


# Logs that are truncated


def test_a_truncated_log_deletes_its_last_parts(
    hub: HubServer, run: Path, sync: Sync, small_parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a truncation, as by a rollback, the parts beyond the new end are deleted on the Hub."""
    sync()
    os.truncate(run / LOG, 1500)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=2)
    out = capsys.readouterr().out
    assert f"deleted on the Hub: {LOG}.000002" in out
    assert f"deleted on the Hub: {LOG}.000001" not in out


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_log_that_was_truncated_and_has_grown_again(
    state: str, hub: HubServer, run: Path, sync: Sync, small_parts: int
) -> None:
    """The copy equals a log with other lines after a truncation, with or without a state file."""
    sync()
    size = (run / LOG).stat().st_size
    os.truncate(run / LOG, 900)
    log_lines(run / LOG, 50, 200, "after the rollback")
    assert (run / LOG).stat().st_size > size
    if state == "lost":
        hub_push.get_default_state_path(run, REPO).unlink()
        # The Hub has a surplus part that no state file lists.
        os.truncate(run / LOG, size - 1200)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=2)


def test_after_each_commit_the_parts_are_the_beginning_of_the_log(run: Path) -> None:
    """This is true for any earlier content of the Hub and for any size of the commits."""
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
def test_parts_have_all_bytes_of_the_log(text: bytes, tmp_path: Path) -> None:
    """The sizes of the parts add up to that of the log, and none is larger than the limit."""
    path = tmp_path / "log.txt"
    for end in range(len(text) + 1):
        path.write_bytes(text[:end])
        blobs = hub_queue.digest(path, rotated=True, part_bytes=20).blobs
        assert sum(blob.size for blob in blobs) == end
        assert max(blob.size for blob in blobs) <= 20


def test_closed_parts_do_not_change_while_a_log_grows(tmp_path: Path) -> None:
    """Only the last part of a log changes when lines are appended."""
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


# Files that change during a sync


def test_files_that_change_during_a_sync(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was compared is sent. Files that were rewritten or deleted wait for the next sync."""
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
    messages = capsys.readouterr().err
    assert "logs/vanishes.txt vanished before it was sent" in messages
    assert "logs/rewritten.txt cannot be sent (it was rewritten" in messages
    assert sync() == 0
    assert_in_step(hub, run)


def test_a_file_rewritten_under_the_same_time_stamp(hub: HubServer, run: Path, sync: Sync) -> None:
    """A recent file is read again even if its size and time stamp are the same."""
    path = run / "codecarbon" / "emissions.csv"
    sync()
    status = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert sync() == 0
    assert_in_step(hub, run)


def test_only_folders_of_the_patterns_are_listed(run: Path) -> None:
    """Folders that no pattern can match are not listed, and links to folders are followed."""
    (run / "a" / "b" / "c").mkdir(parents=True)
    (run / "a" / "b" / "c" / "x.txt").write_text("x\n")
    (run / "linked").symlink_to(run / "a")
    listed = []
    walk = os.walk

    def record_folders(*args: Any, **how: Any) -> Any:
        for root, *rest in walk(*args, **how):
            listed.append(os.path.relpath(root, run))
            yield root, *rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "walk", record_folders)
        assert hub_queue.look(run, ["a/b/*/x.txt", "logs/*"], {}).present == {
            "a/b/c/x.txt",
            "logs/main_log.txt",
        }
        assert listed == [".", "a", "a/b", "a/b/c", "logs"]
        assert hub_queue.look(run, ["linked/**"], {}).present == {"linked/b/c/x.txt"}


def test_nothing_is_deleted_if_a_folder_cannot_be_listed(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files in a folder that cannot be listed are not taken for deleted ones."""
    (run / "logs" / "deep").mkdir()
    (run / "logs" / "deep" / "b.txt").write_text("x\n")
    sync()
    scandir = os.scandir

    def fail_in_one_folder(path: Any) -> Any:
        if os.fspath(path).endswith("deep"):
            raise OSError(116, "Stale file handle", os.fspath(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail_in_one_folder)
        assert sync() == 1
    assert "deep cannot be listed (Stale file handle)" in capsys.readouterr().err
    assert_in_step(hub, run)


def test_deleted_files_are_deleted_on_the_hub(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that a sync has sent is deleted on the Hub, if a pattern covers it."""
    (run / "logs" / "old.txt").write_text("x\n")
    (run / "logs" / "unreadable.txt").write_text("x\n")
    sync()
    (run / "logs" / "old.txt").unlink()
    (run / "logs" / "unreadable.txt").unlink()
    # An entry with the name exists, but it is a folder.
    (run / "logs" / "unreadable.txt").mkdir()
    # No pattern of the next sync covers this file, so its copy stays.
    (run / EVENTS).unlink()
    capsys.readouterr()
    assert sync(patterns=("logs/**", "codecarbon/*.csv")) == 0
    assert hub.files(REPO).keys() == {
        "logs/main_log.txt.000000",
        "codecarbon/emissions.csv",
        EVENTS,
    }
    assert "deleted on the Hub: logs/old.txt.000000" in capsys.readouterr().out


def test_nothing_is_deleted_if_a_pattern_matches_nothing(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of a pattern that matches nothing are kept, because a disk may not be mounted."""
    sync()
    (run / EVENTS).unlink()
    assert sync() == 1
    assert EVENTS in hub.files(REPO)
    messages = capsys.readouterr().err
    assert "the pattern tensorboard/** matches no file" in messages
    assert f"{EVENTS} does not exist any more" in messages


def test_a_part_replaces_a_file_of_the_same_name(hub: HubServer, run: Path, sync: Sync) -> None:
    """A file that had the name of a part is renamed to the log itself, and the copy is right."""
    (run / "logs" / "a.txt.000000").write_text("a file\n")
    sync()
    (run / "logs" / "a.txt.000000").rename(run / "logs" / "a.txt")
    assert sync() == 0
    assert hub.files(REPO)["logs/a.txt.000000"] == b"a file\n"
    assert_nothing_twice(hub, commits=1)
    log_lines(run / "logs" / "a.txt", 0, 3)
    assert sync() == 0
    assert_in_step(hub, run)


def test_files_that_the_hub_cannot_take_are_left_out(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each such file is reported, and the others are sent."""
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
    messages = capsys.readouterr().err
    assert "main_log.txt.000007 has the name of a part" in messages
    assert "has a name that is not UTF-8" in messages
    assert "logs/pipe is not a regular file" in messages


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
def test_patterns_match_like_those_of_a_shell(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    """`**` also matches folders, and no wildcard matches a leading dot."""
    regex = re.compile(hub_queue.convert_pattern(pattern))
    assert [name for name in [*matching, *others] if regex.fullmatch(name)] == matching


# A Hub that fails


@pytest.mark.parametrize(
    "kind", ["refs", "tree", "preupload", "batch", "upload", "verify", "commit"]
)
@pytest.mark.parametrize("status", [500, 429])
def test_each_request_is_retried_after_a_failure(
    kind: str,
    status: int,
    hub: HubServer,
    run: Path,
    sync: Sync,
    pauses: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sync succeeds although a request fails twice, and waits as long as the Hub asks for."""
    headers = {}
    if status == 429:
        headers["Retry-After"] = "7"
    hub.fail(kind, times=2, status=status, headers=headers)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)
    assert len(pauses) == 2
    if status == 429:
        assert min(pauses) >= 7
    output = capsys.readouterr()
    assert str(status) in output.err
    assert "sEcReTsIgNaTuRe" not in output.err + output.out


def test_a_lasting_failure_ends_the_sync_with_code_3(
    hub: HubServer, run: Path, sync: Sync, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The sync gives up after --patience, and the next one sends everything."""
    hub.fail("upload", times=1000, status=503)
    assert sync("--patience", "0.001") == 3
    assert hub.files(REPO) == {}
    assert "nothing is lost" in capsys.readouterr().err
    hub.faults.clear()
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)


def test_a_commit_whose_answer_is_lost_is_not_repeated(
    hub: HubServer, run: Path, sync: Sync, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The sync finds from a new listing that the commit was made."""
    hub.fail("commit", lose_answer=True)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)
    assert hub.count("commit") == 1
    assert "the answer was lost" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["refs", "tree", "commit"])
def test_a_request_without_an_answer_times_out_and_is_retried(
    kind: str, hub: HubServer, run: Path, sync: Sync, pauses: list[float]
) -> None:
    """A commit that the Hub processes after its time-out is refused, so it is not made twice."""
    silence = threading.Event()
    hub.fail(kind, silence=silence)
    assert sync("--timeout", "0.5") == 0
    assert_in_step(hub, run)
    # The Hub processes the held commit now. Its parent is no longer the head.
    silence.set()
    wait_for(lambda: hub.answered == len(hub.requests))
    assert_nothing_twice(hub, commits=1)


def test_a_commit_of_somebody_else_is_not_overwritten(
    hub: HubServer, run: Path, sync: Sync, pauses: list[float]
) -> None:
    """A refused commit is made again on top of the new head."""
    hub.fail("commit", status=412)
    assert sync() == 0
    assert_in_step(hub, run)
    assert_nothing_twice(hub, commits=1)


def test_an_unreachable_hub_ends_the_sync_with_code_3(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message has the address, and the next sync works."""
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert sync("--patience", "0") == 3
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert sync() == 0
    assert_in_step(hub, run)


def test_offline_mode_ends_the_sync_without_a_retry(
    hub: HubServer,
    sync: Sync,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """HF_HUB_OFFLINE is reported with exit code 3, because waiting would not help."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sync() == 3
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert pauses == []


def test_an_offline_dry_run_compares_with_the_last_sync(
    hub: HubServer,
    run: Path,
    sync: Sync,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With HF_HUB_OFFLINE a dry run needs no network and no token."""
    root = run / "checkpoints"
    save_checkpoint(root, 10)
    assert sync("--checkpoints", str(root)) == 0
    save_checkpoint(root, 20)
    (run / "logs" / "new.txt").write_text("x\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_TOKEN")
    hub.requests.clear()
    capsys.readouterr()
    assert sync("--checkpoints", str(root), "--dry-run") == 0
    output = capsys.readouterr()
    sent = [line.split()[2] for line in output.out.splitlines()]
    assert sent == ["logs/new.txt.000000", "global_step20"]
    assert "compared with the state of the last sync" in output.err
    assert hub.requests == []
    assert pauses == []


def test_the_tiny_run_has_no_default_repository(tmp_path: Path) -> None:
    """A default would be a name that belongs to somebody else. The main log has an ALERT."""
    script = Path("train", "tiny", "tiny-hub-sync-logs.slurm")
    logs = tmp_path / "tiny-logs" / "logs"
    logs.mkdir(parents=True)
    environment = {**os.environ, "MEGATRON": str(ROOT), "TINY": str(tmp_path)}
    environment.pop("HUB_REPO", None)
    for _ in range(2):
        done = subprocess.run(
            ["bash", str(ROOT / script)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "--repo is empty; give ORGANISATION/NAME" in done.stderr
    lines = (logs / "main_log.txt").read_text().splitlines()
    assert len(lines) == 2
    assert all("] ALERT: hub sync of " in line and "export HUB_REPO=" in line for line in lines)


def test_a_failed_sync_is_an_alert_until_one_succeeds(
    hub: HubServer, run: Path, sync: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "main_log.txt"
    monkeypatch.delenv("HF_TOKEN")
    assert sync("--main-log", str(log)) == 2
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert sync("--main-log", str(log)) == 0
    assert sync("--main-log", str(log)) == 0
    first, second = log.read_text().splitlines()
    assert f"] ALERT: hub sync of {run} fails: " in first
    assert f"] RECOVERED: no longer true: hub sync of {run}" in second


@pytest.mark.parametrize("reason", ["unreachable", "no token"])
def test_a_dry_run_needs_no_hub(
    hub: HubServer,
    run: Path,
    sync: Sync,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: str,
) -> None:
    """It compares with the last sync, whether the Hub is silent or wants a token."""
    root = run / "checkpoints"
    save_checkpoint(root, 10)
    assert sync("--checkpoints", str(root)) == 0
    save_checkpoint(root, 20)
    (run / "logs" / "new.txt").write_text("x\n")
    monkeypatch.delenv("HF_TOKEN")
    if reason == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.fail("refs", status=401, times=2)
    capsys.readouterr()
    assert sync("--checkpoints", str(root), "--dry-run") == 0
    output = capsys.readouterr()
    sent = [line.split()[2] for line in output.out.splitlines()]
    if reason == "no token":
        assert sent == ["logs/new.txt.000000", "global_step20"]
        assert "can be read without a token" in output.err
    # The state belongs to the other Hub, so nothing is known to be on this one.
    else:
        assert "global_step10" in sent
        assert "127.0.0.1:9 does not answer" in output.err
    assert output.err.count("compared with the state of the last sync") == 2
    assert pauses == []
    # Without --dry-run the token is needed.
    assert sync() == 2
    assert "there is no token for the Hub" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["preupload", "upload", "commit"])
def test_a_killed_sync_is_continued_by_the_next_one(
    kind: str, hub: HubServer, run: Path, sync: Sync, tmp_path: Path
) -> None:
    """The Hub completes the request after the kill, and the next sync does not repeat it."""
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


def test_an_expired_token_ends_the_sync_with_code_2(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The token is in no message, and a new one completes the sync."""
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


def test_a_missing_token_ends_the_sync_without_a_request(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message has the variable to set."""
    monkeypatch.delenv("HF_TOKEN")
    assert sync() == 2
    assert "set HF_TOKEN" in capsys.readouterr().err
    assert hub.requests == []


def test_a_missing_client_is_reported_with_the_command_to_install_it(
    sync: Sync, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tool ends with exit code 2 if huggingface_hub is not installed."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert sync() == 2
    assert "pip install -e '.[hub]'" in capsys.readouterr().err


def test_a_token_without_write_access_is_reported(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sync ends with exit code 2, and the message has the answer of the Hub."""
    hub.readonly = True
    assert sync() == 2
    error = capsys.readouterr().err
    assert "the token has no permission" in error
    assert "403: you need write access" in error


@pytest.mark.parametrize("private", [True, False])
def test_create_makes_a_missing_repository(
    private: bool, hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only --create makes the repository, and a dry run does not."""
    del hub.repositories[REPO]
    assert sync() == 2
    error = capsys.readouterr().err
    assert f"there is no repository {REPO}" in error
    assert "--create" in error
    assert sync("--create", "--dry-run") == 0
    assert f"would create the repository {REPO}, private" in capsys.readouterr().out
    assert REPO not in hub.repositories
    options = ["--create"]
    if not private:
        options.append("--no-private")
    assert sync(*options) == 0
    assert hub.repositories[REPO].private == private
    assert_in_step(hub, run)
    assert sync("--create") == 0


@pytest.mark.parametrize("patterns", [(), PATTERNS], ids=["checkpoints only", "with patterns"])
def test_create_makes_the_repository_of_checkpoints(
    patterns: tuple[str, ...],
    hub: HubServer,
    run: Path,
    sync: Sync,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--create with --checkpoints makes the repository, also without --patterns."""
    del hub.repositories[REPO]
    root = run / "checkpoints"
    save_checkpoint(root, 10)
    options = ("--checkpoints", str(root))
    assert sync(*options, patterns=patterns) == 2
    assert "--create" in capsys.readouterr().err
    assert sync(*options, "--create", "--dry-run", patterns=patterns) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"would create the repository {REPO}, private") == 1
    assert "would send global_step10 (" in printed
    assert REPO not in hub.repositories
    assert sync(*options, "--create", patterns=patterns) == 0
    assert hub.repositories[REPO].private
    assert hub.files(REPO, "global_step10") == contents(root / "global_step10")


def test_patterns_that_match_nothing_are_reported(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no pattern matches, the sync is refused. If one matches nothing, the others are synced."""
    sync()
    assert sync(patterns=("logz/**", "*.csv")) == 2
    assert "--patterns logz/** *.csv match no file" in capsys.readouterr().err
    assert sync(patterns=("logz/**", *PATTERNS)) == 1
    assert "the pattern logz/** matches no file" in capsys.readouterr().err
    assert_in_step(hub, run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--repo", "a b"), "'a b' is not a repository name"),
        (("--folder", "/nowhere"), "--folder /nowhere is not a folder"),
        (("--every", "0"), "--every 0 must be 1 or more"),
        (("--timeout", "0"), "--timeout and --watch must be more than 0"),
        (("--checkpoints", "/nowhere"), "--checkpoints /nowhere is not a folder"),
        (("--state", "/proc/none/state.json"), "give --state a file"),
    ],
)
def test_wrong_options_end_the_tool_with_code_2(
    options: tuple[str, ...],
    message: str,
    hub: HubServer,
    sync: Sync,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message has the option, its value and the rule."""
    assert sync(*options) == 2
    assert message in capsys.readouterr().err


def test_a_sync_of_nothing_is_refused(
    hub: HubServer, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --patterns and --checkpoints the tool ends with exit code 2."""
    assert sync(patterns=()) == 2
    assert "give --patterns, --checkpoints, or both" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["localhost:80", "http://user:hf_password@127.0.0.1:9"])
def test_an_invalid_endpoint_is_refused(
    endpoint: str,
    hub: HubServer,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A password in HF_ENDPOINT is in no message."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert sync() == 2
    messages = capsys.readouterr().err
    assert "HF_ENDPOINT" in messages
    assert "hf_password" not in messages


def test_files_that_the_gitignore_excludes_are_left_out(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sync reports the file, sends the others, and makes no commit in the next sync."""
    hub.history(REPO)[0].tree[".gitignore"] = Stored(f"{EVENTS}\n".encode(), lfs=False)
    assert sync() == 1
    assert EVENTS not in hub.files(REPO)
    assert f"{EVENTS} is excluded by the .gitignore" in capsys.readouterr().err
    assert sync() == 1
    assert_nothing_twice(hub, commits=1)


def test_a_log_with_an_excluded_part_is_left_out_completely(
    hub: HubServer, run: Path, sync: Sync, small_parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the .gitignore excludes one part of a log, no part is sent, so the copy has no gap."""
    hub.history(REPO)[0].tree[".gitignore"] = Stored(f"{LOG}.000001\n".encode(), lfs=False)
    assert sync() == 1
    assert [path for path in hub.files(REPO) if path.startswith(LOG)] == []
    assert EVENTS in hub.files(REPO)
    assert f"{LOG} is excluded by the .gitignore" in capsys.readouterr().err
    assert sync() == 1
    assert_nothing_twice(hub, commits=1)


def test_an_excluded_part_does_not_delete_the_others(
    hub: HubServer, run: Path, sync: Sync, small_parts: int
) -> None:
    """A log that shrank keeps its copy completely, if the .gitignore excludes its changed part."""
    assert sync() == 0
    before = hub.files(REPO)
    hub.history(REPO)[0].tree[".gitignore"] = Stored(f"{LOG}.000001\n".encode(), lfs=False)
    os.truncate(run / LOG, 1500)
    assert sync() == 1
    after = hub.files(REPO)
    assert {path: after[path] for path in before} == before
    assert_nothing_twice(hub, commits=1)


# Concurrent, repeated and dry runs


def test_a_second_sync_of_the_same_folder_exits(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the state is locked, another sync sends no request and ends with exit code 0."""
    lock = hub_push.get_default_state_path(run, REPO).with_name("org--tiny-logs.json.lock")
    lock.parent.mkdir()
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sync() == 0
    assert "another sync of this folder is running" in capsys.readouterr().err
    assert hub.requests == []
    assert sync() == 0
    assert_in_step(hub, run)


def test_watch_continues_after_an_error(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An expired token does not end --watch, and a new token is used in the next round."""
    rounds = []

    def act_between_syncs(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 1:
            log_lines(run / LOG, 100, 110)
            hub.token = "hf_aNewOne"
        elif len(rounds) == 2:
            monkeypatch.setenv("HF_TOKEN", "hf_aNewOne")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", act_between_syncs)
    with pytest.raises(KeyboardInterrupt):
        sync("--watch", "3600")
    assert rounds == [3600.0] * 3
    assert_in_step(hub, run)
    assert "refuses the token" in capsys.readouterr().err


def test_watch_ends_if_the_first_sync_fails(hub: HubServer, sync: Sync) -> None:
    """An error in the first sync ends --watch with exit code 2."""
    assert sync("--watch", "3600", patterns=("logz/**",)) == 2


def test_a_dry_run_prints_and_changes_nothing(
    hub: HubServer, run: Path, sync: Sync, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run lists what would be sent and deleted, and leaves the state and the Hub alone."""
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
    """Write a small finished checkpoint, and return its folder."""
    folder = root / f"global_step{iteration}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content * iteration)
    (folder / "config.yaml").write_text("num_layers: 2\n")
    for name in others:
        (folder / name).write_bytes(content)
    names = ("model.safetensors", "config.yaml", *others)
    files = {name: describe_file(folder / name) for name in names}
    manifest = Manifest(iteration, "test", "one process", {}, None, files, course=[], keep=False)
    (folder / "manifest.json").write_text(manifest.dump_json())
    return folder


def describe_file(path: Path) -> dict[str, Any]:
    """Return the entry of a file in a manifest."""
    found = digest_of_file(path)
    return {"bytes": found.bytes, "xxh128": found.xxh128}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, name -> content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_finished_checkpoint_is_pushed_to_its_own_branch(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unfinished, damaged and not requested checkpoints are left out, and none is sent twice."""
    root = run / "checkpoints"
    for iteration in (10, 15, 20):
        save_checkpoint(root, iteration)
    (save_checkpoint(root, 30) / "manifest.json").unlink()
    os.truncate(save_checkpoint(root, 40) / "model.safetensors", 5)
    monkeypatch.setattr("megatron.extras.operations.hub.checkpoints.IN_MEMORY_BYTES", 100)
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


def test_a_checkpoint_saved_again_replaces_its_branch(
    hub: HubServer, run: Path, sync: Sync
) -> None:
    """After a rollback the branch gets the new checkpoint, without the old one's other files."""
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
def test_a_checkpoint_is_pushed_despite_failures(
    kind: str, hub: HubServer, run: Path, sync: Sync, pauses: list[float]
) -> None:
    """Failed requests and a lost answer lead to one commit and one upload."""
    root = run / "checkpoints"
    folder = save_checkpoint(root, 10)
    hub.fail(kind, times=2, status=502)
    hub.fail("commit", lose_answer=True)
    assert sync("--checkpoints", str(root), patterns=()) == 0
    assert hub.files(REPO, "global_step10") == contents(folder)
    assert len(hub.history(REPO, "global_step10")) == 2
    assert len(hub.uploaded) == 1


def test_a_checkpoint_that_is_deleted_during_its_push_is_left_out(
    hub: HubServer,
    run: Path,
    sync: Sync,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its branch gets no files, and the next checkpoint is pushed."""
    root = run / "checkpoints"
    folder = save_checkpoint(root, 10)
    save_checkpoint(root, 20)
    monkeypatch.setattr("megatron.extras.operations.hub.checkpoints.IN_MEMORY_BYTES", 10)
    create_branch = hub_push.Hub.create_branch

    def create_then_delete(self: hub_push.Hub, branch: str) -> None:
        create_branch(self, branch)
        (folder / "model.safetensors").unlink(missing_ok=True)

    monkeypatch.setattr(hub_push.Hub, "create_branch", create_then_delete)
    assert sync("--checkpoints", str(root), patterns=()) == 1
    assert "global_step10 is left out" in capsys.readouterr().err
    assert hub.files(REPO, "global_step10") == {}
    assert hub.files(REPO, "global_step20") == contents(root / "global_step20")
