"""tools/follow_log.py prints a log that tools/hub_sync.py keeps on a Hub, with few requests."""

# ruff: noqa: F811 (fixtures are imported by their names)

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from operations.hub_fixtures import (  # noqa: F401
    REPO,
    ROOT,
    Sync,
    environment,
    hub,
    log_lines,
    pauses,
    run,
    sync,
)
from operations.hub_server import HubServer, wait_for

from megatron.extras.operations.commands import follow_log
from megatron.extras.operations.commands.follow_log import Follower
from megatron.extras.operations.hub import queue as hub_queue
from megatron.extras.operations.hub.client import Hub

LOG = "logs/main_log.txt"


@pytest.fixture
def log(run: Path, sync: Sync, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Path:
    """Sync the run's log of 100 lines to the Hub, in parts of at most 1,000 bytes."""
    monkeypatch.setattr(hub_queue, "PART_BYTES", 1000)
    sync()
    return run / LOG


@pytest.fixture
def follower(hub: HubServer, log: Path) -> Callable[[int], Follower]:
    """Return a function that makes a reader of the log, which starts with so many last lines."""
    return lambda lines: Follower(Hub(REPO, timeout_seconds=5.0, log=print), path=LOG, lines=lines)


def test_follow_prints_the_last_lines_and_then_the_new_ones(
    hub: HubServer, log: Path, sync: Sync, follower: Callable[[int], Follower]
) -> None:
    """A follower returns the last lines first, then each new byte once, with few downloads."""
    lines = log.read_bytes().splitlines(keepends=True)
    followers = {number: follower(number) for number in (0, 3, 60, 1000)}
    for number, one in followers.items():
        expected = lines[len(lines) - min(number, len(lines)) :]
        assert one.look().data == b"".join(expected)
    hub.requests.clear()
    assert followers[3].look().data == b""
    assert hub.requests == ["refs"]
    for begin, end in ((100, 101), (101, 103), (103, 300), (300, 301)):
        before = log.stat().st_size
        log_lines(log, begin, end)
        with open(log, "ab") as file:
            file.write(b"half a line ")
        sync()
        for one in followers.values():
            hub.requests.clear()
            news = one.look()
            assert news.data == log.read_bytes()[before:]
            assert news.cut is None
        assert hub.count("resolve") <= 1 + (end - begin) // 15


def test_commits_of_other_files_cause_no_download(
    hub: HubServer, run: Path, log: Path, sync: Sync, follower: Callable[[int], Follower]
) -> None:
    """A commit that does not change the log costs two small requests."""
    one = follower(5)
    one.look()
    log_lines(run / "logs" / "other.txt", 0, 5)
    sync()
    hub.requests.clear()
    assert one.look().data == b""
    assert hub.requests == ["refs", "paths"]


@pytest.mark.parametrize("grown", [0, 1, 90])
@pytest.mark.parametrize("back", [300, 2500])
def test_follow_continues_after_a_truncation(
    grown: int, back: int, log: Path, sync: Sync, follower: Callable[[int], Follower]
) -> None:
    """A truncated log is reported, and reading continues where it differs from what was read."""
    one = follower(1000)
    printed = one.look().data
    cut = log.read_bytes()[:-back].rfind(b"\n") + 1
    os.truncate(log, cut)
    log_lines(log, 50, 50 + grown, "after the rollback")
    sync()
    news = one.look()
    assert news.cut is not None
    assert "was truncated" in news.cut
    new = log.read_bytes()[cut:]
    assert news.data.endswith(new)
    assert printed[:cut].endswith(news.data[: len(news.data) - len(new)])
    # The truncation is within the open part, whose content is known. So only new lines are printed.
    if back == 300:
        assert news.data == new
    before = log.stat().st_size
    log_lines(log, 200, 220, "after the rollback")
    sync()
    assert one.look().data == log.read_bytes()[before:]


def test_a_missing_log_is_an_error_that_lists_the_others(
    hub: HubServer, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing log, folder or repository and a wrong option end the tool with exit code 2."""
    assert follow_log.main([REPO, "logs/nothing.txt"]) == 2
    error = capsys.readouterr().err
    assert "has no log logs/nothing.txt" in error
    assert f"the logs there are: {LOG}" in error
    assert follow_log.main([REPO, "elsewhere/nothing.txt"]) == 2
    assert follow_log.main(["org/nothing"]) == 2
    assert "there is no repository org/nothing" in capsys.readouterr().err
    assert follow_log.main([REPO, "--every", "0"]) == 2


def test_follow_retries_when_the_hub_fails(
    hub: HubServer,
    log: Path,
    sync: Sync,
    follower: Callable[[int], Follower],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Failed requests are repeated, reported once, and no line is lost or printed twice."""
    out = io.BytesIO()
    rounds = []

    def act_between_looks(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 1:
            log_lines(log, 100, 105)
            sync()
            capsys.readouterr()
            hub.fail("refs", status=500)
            hub.fail("paths", status=503)
            hub.fail("resolve", lose_answer=True)
        if len(rounds) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow_log.follow(follower(2), 60.0, out, act_between_looks)
    assert out.getvalue() == b"".join(log.read_bytes().splitlines(keepends=True)[98:])
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 2
    assert "answers 500" in messages[0]
    assert "asking again every 60 s" in messages[0]
    assert "the Hub answers again" in messages[1]


def test_the_tool_prints_new_lines_immediately(
    hub: HubServer, log: Path, sync: Sync, tmp_path: Path
) -> None:
    """The tool in another process prints new lines to standard output without a delay."""
    command = [sys.executable, "tools/follow_log.py", REPO, "--lines", "2", "--every", "0.05"]
    printed = tmp_path / "stdout"
    errors = tmp_path / "stderr"
    with open(printed, "wb") as stdout, open(errors, "wb") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(hub, tmp_path), stdout=stdout, stderr=stderr
        )
        try:
            wait_for(lambda: printed.read_bytes().count(b"\n") == 2 or process.poll() is not None)
            log_lines(log, 100, 150)
            sync()
            wait_for(lambda: printed.read_bytes().count(b"\n") == 52 or process.poll() is not None)
        finally:
            process.terminate()
            process.wait()
    assert errors.read_text() == ""
    assert printed.read_bytes() == b"".join(log.read_bytes().splitlines(keepends=True)[98:])


def test_the_tool_ends_when_standard_output_is_closed(
    hub: HubServer, log: Path, sync: Sync, tmp_path: Path
) -> None:
    """The tool ends with exit code 0 and without an error when nobody reads its output."""
    command = [sys.executable, "tools/follow_log.py", REPO, "--lines", "1", "--every", "0.05"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(hub, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline() == log.read_bytes().splitlines(keepends=True)[-1]
        process.stdout.close()
        log_lines(log, 100, 101)
        sync()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""
