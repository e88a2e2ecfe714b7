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
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import tyro

from megatron.base import exit_codes
from megatron.base.errors import ConfigError, MegatronError
from megatron.base.plain_text import make_plain, print_to_stderr
from megatron.console.parse import parse_arguments
from megatron.extras.operations.hub.client import Hub, HubUnavailableError
from megatron.extras.operations.hub.follow import Follower


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


def warn(line: str) -> None:
    """Print a line to standard error."""
    print_to_stderr(make_plain(line))


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
