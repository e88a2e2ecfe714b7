"""Follow a run's log over a Hugging Face Hub, like `tail -f`.

    python tools/follow_log.py org/tr8-104B-logs        the last 10 lines of logs/main_log.txt
    python tools/follow_log.py org/tr8-104B-logs logs/other.txt --lines 100 --every 300

tools/hub_sync.py stores the log there in parts. The log goes to standard output, and everything
else goes to standard error. If the Hub does not answer, a message is printed and the tool keeps
trying. If a rollback truncated the log, a message is printed and the tool follows it from there. A
public repository needs no token. Others need HF_TOKEN or `hf auth login`.

Exit code 0 means that standard output was closed. Exit code 2 means an error, and 130 means Ctrl-C.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import BinaryIO

import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError, MegatronError, OperationsError
from megatron.console.parse import parse_arguments
from megatron.extras.operations.hub.client import Hub, HubMovedError, HubUnavailableError, warn
from megatron.extras.operations.hub.queue import format_part_name, parse_part_name

_ASKED_AT_ONCE = 500
"""Parts to ask for in one request. The Hub takes at most 1,000 paths."""


@dataclass(frozen=True)
class LogUpdate:
    """Result of one look."""

    data: bytes = b""
    """New bytes of the log."""
    cut: str | None = None
    """Line to print before `data` if the log was truncated. It has the part where it continues."""


@dataclass
class Follower:
    """Reader of one log that a sync keeps on a Hub in parts.

    Each look reads the branch's commit. Parts are downloaded only if the commit has changed, and
    all of them at that commit. So one look reads one state of the log. A look that fails changes
    nothing, and can be repeated.

    Invariant: bytes are returned once and in order. The exception is a log that was truncated, for
    example by a rollback. This is reported, and reading continues where the log differs.
    """

    hub: Hub
    path: str
    """Path of the log in the repository, without the number of a part."""
    lines: int
    """Number of last lines to start with."""
    _commit: str | None = None
    """Commit of the last look, None before the first one."""
    _oids: list[str] = field(default_factory=list)
    """The Hub's ids of all parts, up to the last one, which is open."""
    _open: bytes = b""
    """Content of the last part, as far as it was read."""

    def look(self) -> LogUpdate:
        """Return what is new in the log since the last look.

        Raises:
            OperationsError: The repository has no such log.
            HubUnavailableError: The Hub did not answer.
        """
        commit = self.hub.head()
        if commit == self._commit:
            return LogUpdate()
        # `_commit` is set last. If a download raises, the next look repeats the work.
        read = self._read_new
        if self._commit is None:
            read = self._read_first
        news = read(commit)
        self._commit = commit
        return news

    def _read_first(self, commit: str) -> LogUpdate:
        """Return the last lines of the log."""
        oids = self._list_oids(commit)
        data = b""
        opened = None
        # A log may have hundreds of parts. Read backwards, and stop when there are enough lines.
        for number in range(len(oids) - 1, -1, -1):
            part = self._download(commit, number)
            if opened is None:
                opened = part
            data = part + data
            # The line end of the last line does not count. It starts no further line.
            if data.count(b"\n", 0, -1) >= self.lines:
                break
        self._oids = oids
        self._open = opened or b""
        return LogUpdate(b"".join(deque(data.splitlines(keepends=True), maxlen=self.lines)))

    def _download(self, commit: str, number: int) -> bytes:
        return self.hub.download_file(commit, format_part_name(self.path, number))

    def _list_oids(self, commit: str) -> list[str]:
        """Return the Hub's ids of all parts of the log.

        Raises:
            OperationsError: The repository has no such log. The message lists those that it has.
        """
        folder = self.path.rpartition("/")[0]
        try:
            files = self.hub.list_files(commit, folder or None)
        # The Hub answers 404 for a folder that does not exist. `Hub` raises HubMovedError for it.
        except HubMovedError:
            files = {}
        parts = {format_part_name(self.path, number) for number in range(len(files))}
        oids = [files[name] for name in sorted(parts & files.keys())]
        if not oids:
            logs = sorted(
                {
                    part[0]
                    for name in self.hub.list_files(commit)
                    if (part := parse_part_name(name)) is not None
                }
            )
            raise OperationsError(
                f"{self.hub.repo} has no log {self.path} that tools/hub_sync.py has stored; the "
                f"logs there are: {', '.join(logs) or 'none'}"
            )
        return oids

    def _read_new(self, commit: str) -> LogUpdate:
        """Return what is new in the last known part, and in the parts after it."""
        last = len(self._oids) - 1
        now = self._fetch_oids(commit, last)
        # The last known part does not exist any more.
        if not now:
            return self._resume_after_cut(commit)
        # If the last part is unchanged, only the parts after it are downloaded.
        same = now[0] == self._oids[last]
        fresh = [self._download(commit, last + number) for number in range(same, len(now))]
        data = b"".join(fresh)
        if not same:
            # A log that only grew still begins with what was read.
            if not fresh[0].startswith(self._open):
                return self._resume_after_cut(commit)
            data = data[len(self._open) :]
        self._oids[last:] = now
        if fresh:
            self._open = fresh[-1]
        return LogUpdate(data)

    def _fetch_oids(self, commit: str, first: int) -> list[str]:
        """Return the Hub's ids of part `first` and of those that follow it without a gap."""
        oids: list[str] = []
        # Usually there is at most one new part. So the first request is small.
        asked = 2
        while True:
            names = [
                format_part_name(self.path, first + len(oids) + number) for number in range(asked)
            ]
            found = self.hub.fetch_oids(commit, names)
            more = [found[name] for name in takewhile(found.__contains__, names)]
            oids += more
            if len(more) < asked:
                return oids
            asked = _ASKED_AT_ONCE

    def _resume_after_cut(self, commit: str) -> LogUpdate:
        """Continue where the log differs from what was read.

        Within the last known part, reading continues at the first line that differs. An earlier
        part is returned completely, because only its id was kept and not its content.
        """
        oids = self._list_oids(commit)
        same = 0
        while same < min(len(oids), len(self._oids)) and oids[same] == self._oids[same]:
            same += 1
        fresh = [self._download(commit, number) for number in range(same, len(oids))]
        data = b"".join(fresh)
        if same == len(self._oids) - 1:
            data = data[_count_common_bytes(data, self._open) :]
        where = f"part {same}"
        if not fresh:
            where = f"the end of part {same - 1}"
            fresh = [self._download(commit, len(oids) - 1)]
        self._oids = oids
        self._open = fresh[-1]
        return LogUpdate(data, f"{self.path} was truncated (a rollback?); it continues in {where}")


def _count_common_bytes(one: bytes, other: bytes) -> int:
    """Return the number of bytes in the lines that both texts begin with."""
    same = 0
    for mine, yours in zip(one.split(b"\n"), other.split(b"\n"), strict=False):
        if mine != yours:
            break
        same += len(mine) + 1
    # The last line may have no line end, which was counted above.
    return min(same, len(one))


@dataclass(frozen=True)
class FollowLog:
    """The command line."""

    repo: tyro.conf.Positional[str]
    """ORGANISATION/NAME of the repository."""
    path: tyro.conf.Positional[str] = "logs/main_log.txt"
    """The log, by its name in the folder that is synced."""
    lines: int = 10
    """How many of its last lines to print first."""
    every: float = 60.0
    """Seconds between two requests."""
    timeout: float = 60.0
    """Seconds without an answer after which one request fails."""


def follow(
    follower: Follower,
    every_seconds: float,
    out: BinaryIO,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print the log until standard output is closed or the Hub refuses.

    Raises:
        OperationsError: The Hub refuses the request.
        BrokenPipeError: Standard output was closed.
    """
    silent = False
    while True:
        try:
            news = follower.look()
        except HubUnavailableError as trouble:
            if not silent:
                warn(f"{trouble}; asking again every {every_seconds:g} s")
            silent = True
        else:
            if silent:
                warn("the Hub answers again")
            silent = False
            if news.cut is not None:
                warn(news.cut)
            out.write(news.data)
            # Without a flush the lines would stay in the buffer until the next ones arrive.
            out.flush()
        sleep(every_seconds)


def main(argv: list[str] | None = None) -> int:
    """Follow the log that `argv` names and return the exit code."""
    given = parse_arguments(FollowLog, args=argv, description=__doc__)
    try:
        if given.lines < 0 or not (0 < given.every < math.inf and 0 < given.timeout < math.inf):
            raise ConfigError(
                f"--lines {given.lines} must be 0 or more, and --every {given.every:g} and "
                f"--timeout {given.timeout:g} more than 0 seconds, and finite"
            )
        hub = Hub(given.repo, timeout_seconds=given.timeout, log=warn, must_write=False)
        follow(Follower(hub, given.path, given.lines), given.every, sys.stdout.buffer)
    except BrokenPipeError:
        # The interpreter flushes standard output when it exits. On the closed pipe that would fail
        # with a second error, so the descriptor is redirected.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MegatronError as error:
        warn(f"error: {error}")
        return exit_codes.USER_ERROR
    return 0


def run_command() -> int:
    """Run the command line and return the exit code. Ctrl-C gives 130."""
    try:
        return main()
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    sys.exit(run_command())
