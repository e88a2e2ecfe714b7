"""`tail -f` of a run's log over a Hugging Face Hub, where tools/hub_sync.py keeps it in parts.

    python tools/follow_log.py org/tr8-104B-logs                          the last 10 lines of logs/main_log.txt, then what is new
    python tools/follow_log.py org/tr8-104B-logs logs/other.txt --lines 100 --every 300

The log goes to stdout, all else to stderr. A Hub that does not answer is told and asked again, for ever. A log that was cut by a
rollback is told, and followed from there. A public repository needs no token; else HF_TOKEN or `hf auth login`.
Exit code: 0 when stdout is closed; 2 on an error; 130 by Ctrl-C.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import tyro

from megatron.errors import ConfigError, MegatronError
from megatron.operations.follow import Follower
from megatron.operations.hub import Hub, HubUnavailable


@dataclass(frozen=True)
class FollowLog:
    repo: tyro.conf.Positional[str]
    """ORGANISATION/NAME of the repository."""
    path: tyro.conf.Positional[str] = "logs/main_log.txt"
    """The log, as it is named in the folder that is synced."""
    lines: int = 10
    """How many of its last lines to begin with."""
    every: float = 60.0
    """Seconds between two looks."""
    timeout: float = 60.0
    """Seconds for which the Hub may be silent within one request."""


def warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def follow(
    follower: Follower,
    every_seconds: float,
    out: BinaryIO,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until stdout is closed or the Hub refuses. Raises OperationsError."""
    silent = False
    while True:
        try:
            news = follower.look()
        except HubUnavailable as trouble:
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
            out.flush()
        sleep(every_seconds)


def main(argv: list[str] | None = None) -> int:
    given = tyro.cli(FollowLog, args=argv, description=__doc__)
    try:
        if given.lines < 0 or given.every <= 0 or given.timeout <= 0:
            raise ConfigError(
                "--lines must be 0 or more, --every and --timeout more than 0 seconds"
            )
        hub = Hub(given.repo, timeout_seconds=given.timeout, say=warn, must_write=False)
        follow(Follower(hub, given.path, given.lines), given.every, sys.stdout.buffer)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter fails at its last flush
    except MegatronError as error:
        warn(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
