"""Keeps a Hugging Face Hub repository in step with a run's TensorBoard events, emissions and logs; pushes checkpoints.

    python tools/hub_sync.py --repo org/tr8-104B-logs --folder LOGS --patterns 'tensorboard/**' 'codecarbon/*.csv' 'logs/**'
    python tools/hub_sync.py ... --watch 3600                        go on for ever, for a daemon; without it once, for cron
    python tools/hub_sync.py ... --checkpoints RUN --every 1500      also finished checkpoints, each to a branch global_stepN
    python tools/hub_sync.py ... --dry-run                           what would be sent and deleted

Only what differs is sent. Logs that grow (.txt .log .out .err .jsonl) are stored as parts of at most 1 MiB, whose joined contents
are the log; tools/follow_log.py follows them. What was sent from here and deleted here is deleted there, if a pattern covers it.
Links are followed as long as they stay in --folder or --checkpoints, each of which may be a link itself. What leads out of it is
not sent, nor is what is no regular file (a FIFO, a socket, a device).
The token is HF_TOKEN, or that of `hf auth login`; HF_ENDPOINT names another Hub.

Exit code: 0 in step, or another sync of this folder is at work, which does the work; 1 in step but for what was left out (a pattern
that matches nothing, a file that cannot be read or lies elsewhere); 2 an error that a person must fix; 3 the Hub did not answer in
time: nothing is lost, the next sync goes on.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron.errors import ConfigError, MegatronError, OperationsError
from megatron.operations.hub import Hub, HubUnavailable, RetryPolicy
from megatron.operations.hub_checkpoints import push_checkpoints
from megatron.operations.hub_push import (
    FolderSync,
    SyncInProgress,
    SyncRequest,
    SyncResult,
    format_size,
    get_default_state_path,
    hold_sync_lock,
)
from megatron.standard_streams import protect_standard_streams


@dataclass(frozen=True)
class HubSync:
    repo: str
    """ORGANISATION/NAME of the repository."""
    folder: Path
    """The folder whose files are synced, under the same names."""
    patterns: tuple[str, ...] = ()
    """Which files, relative to --folder, as in a shell: ** goes into folders, too; a leading dot must be written. Quote them."""
    checkpoints: Path | None = None
    """A run's --save folder, whose finished checkpoints are pushed, too."""
    every: int = 1
    """Of these only iterations that this number divides."""
    create: bool = False
    """Make the repository if there is none of this name."""
    private: bool = True
    """Whether a repository that --create makes is private."""
    watch: float | None = None
    """Sync again after so many seconds, for ever, whatever the Hub says after the first time."""
    state: Path | None = None
    """File that remembers what was sent. Default: in the folder .hub_sync of --folder."""
    patience: float = 300.0
    """Seconds for which a Hub that does not answer is asked again."""
    timeout: float = 120.0
    """Seconds for which the Hub may be silent within one request."""
    dry_run: bool = False
    """Only list what would be sent and deleted."""


def say(line: str) -> None:
    print(line, flush=True)


def warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def sync(given: HubSync) -> int:
    """Once; returns the exit code."""
    began = time.monotonic()
    state = given.state or get_default_state_path(given.folder, given.repo)
    if not given.folder.is_dir():
        raise OperationsError(
            f"--folder {given.folder} is no folder; give the one that holds the run's logs"
        )
    hub = Hub(given.repo, timeout_seconds=given.timeout, say=warn)
    patience = RetryPolicy(given.patience, warn)
    request = SyncRequest(
        given.folder, given.patterns, state, given.create, given.private, given.dry_run
    )
    with hold_sync_lock(state, warn):
        outcome = (
            FolderSync(request, hub, patience, say=say, warn=warn).run()
            if given.patterns
            else SyncResult()
        )
        if given.checkpoints is not None:
            outcome.left_out += push_checkpoints(
                given.checkpoints,
                given.every,
                state,
                hub,
                patience,
                dry_run=given.dry_run,
                say=say,
                warn=warn,
            )
    if not given.dry_run:
        sent = (
            f"{outcome.added} sent ({format_size(outcome.added_bytes)}), {outcome.deleted} deleted"
            if outcome.commits
            else "all there"
        )
        say(f"{given.repo}: {outcome.files} files, {sent}, {time.monotonic() - began:.1f} s")
    return 1 if outcome.left_out else 0


def try_sync(given: HubSync) -> int:
    """Once, with what goes wrong told; returns the exit code."""
    try:
        return sync(given)
    except SyncInProgress as busy:
        warn(str(busy))
        return 0
    except HubUnavailable as trouble:
        warn(
            f"{trouble}; nothing is lost: what is not on {given.repo} yet is sent by the next sync"
        )
        return 3
    except (MegatronError, OSError) as error:
        warn(f"error: {error}")
        return 2


def check(given: HubSync) -> None:
    if not given.patterns and given.checkpoints is None:
        raise ConfigError("nothing to sync; give --patterns, --checkpoints, or both")
    if given.every < 1:
        raise ConfigError(f"--every {given.every} must be 1 or more")
    if given.timeout <= 0 or given.patience < 0 or (given.watch is not None and given.watch <= 0):
        raise ConfigError("--timeout and --watch must be more than 0 seconds, --patience not less")


def main(argv: list[str] | None = None) -> int:
    given = tyro.cli(HubSync, args=argv, description=__doc__)
    try:
        check(given)
    except ConfigError as error:
        warn(f"error: {error}")
        return 2
    code = try_sync(given)
    while given.watch is not None and code != 2:
        time.sleep(given.watch)
        code = min(try_sync(given), 1)  # a token that expires may be replaced while we watch
    return code


if __name__ == "__main__":
    protect_standard_streams()  # a full disk under the output must not end --watch
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
