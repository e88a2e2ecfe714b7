r"""Keep a Hugging Face Hub repository in sync with a run's events, emissions, logs and checkpoints.

    python tools/hub_sync.py --repo org/tr8-104B-logs --folder LOGS \
        --patterns 'tensorboard/**' 'codecarbon/*.csv' 'logs/**'
    python tools/hub_sync.py ... --watch 3600      sync every hour, for a daemon; once without it
    python tools/hub_sync.py ... --checkpoints RUN --every 1500
                                                   push checkpoints to branches global_stepN, too
    python tools/hub_sync.py ... --dry-run         print what would be sent and deleted
                                                   (without network or token, the folder is
                                                   compared with the state of the last sync)

Only differences are sent. Logs that grow (.txt .log .out .err .jsonl) are stored as parts of at
most 1 MiB, whose joined contents are the log. tools/follow_log.py follows them. A file that was
sent from here and then deleted here is deleted on the Hub, if a pattern covers it.

Links are followed as long as they stay in --folder or --checkpoints. Each of these may be a link
itself. Links that lead out are not sent. Files that are not regular (a FIFO, a socket, a device)
are not sent either. The token is HF_TOKEN, or that of `hf auth login`. HF_ENDPOINT names another
Hub.

- Exit code 0: in sync. Or another sync of this folder is running and does the work.
- Exit code 1: in sync except for what was left out. A pattern matched nothing, or a file cannot be
  read or is outside of the folder.
- Exit code 2: an error that a person must fix.
- Exit code 3: the Hub did not answer in time. Nothing is lost, and the next sync continues.
"""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.base import exit_codes
from megatron.base.errors import ConfigError, MegatronError, OperationsError
from megatron.base.plain_text import format_bytes, make_plain, print_line
from megatron.console.parse import parse_arguments
from megatron.console.standard_streams import protect_standard_streams
from megatron.extras.operations.hub.checkpoints import push_checkpoints
from megatron.extras.operations.hub.client import Hub, HubUnavailableError, RetryPolicy, warn
from megatron.extras.operations.hub.push import (
    FolderSync,
    SyncInProgressError,
    SyncRequest,
    SyncResult,
    get_default_state_path,
    hold_sync_lock,
)
from megatron.extras.operations.monitor.alerts import Alert, Outlets, deliver
from megatron.plan.rules.finding import Finding, error, refuse_errors


@dataclass(frozen=True)
class HubSync:
    """The command line."""

    repo: str
    """ORGANISATION/NAME of the repository."""
    folder: Path
    """The folder whose files are synced, under the same names."""
    patterns: tuple[str, ...] = ()
    """Files to sync, relative to --folder, as shell patterns. ** also matches folders. A leading
    dot must be written. Quote the patterns."""
    checkpoints: Path | None = None
    """A run's --save folder. Its finished checkpoints are pushed as well."""
    every: int = 1
    """Push only checkpoints whose iteration is a multiple of this number."""
    create: bool = False
    """Create the repository if none has this name."""
    private: bool = True
    """Whether a repository made by --create is private."""
    watch: float | None = None
    """Seconds between syncs. After the first sync the tool continues permanently, whatever the Hub
    answers."""
    state: Path | None = None
    """File that records what was sent. Default: in the folder .hub_sync of --folder."""
    main_log: Path | None = None
    """The run's main log. A sync that fails writes an ALERT there, and RECOVERED follows when a
    later one succeeds. Alerts are also sent as slurm_status.py sends them."""
    patience: float = 300.0
    """Seconds to keep trying if the Hub does not answer."""
    timeout: float = 120.0
    """Seconds without an answer after which one request fails."""
    dry_run: bool = False
    """Only list what would be sent and deleted. This needs neither network nor token. If the Hub
    does not answer, or HF_HUB_OFFLINE is set, the folder is compared with the state of the last
    sync."""


def log(line: str) -> None:
    """Print a line to standard output. It may contain names of files and answers of the Hub."""
    # Cron jobs and pipes buffer their output. Without a flush a long sync would print nothing for
    # hours.
    print_line(make_plain(line))


def sync(given: HubSync) -> int:
    """Sync once and return the exit code."""
    # The wall clock may be adjusted during a long sync.
    began = time.monotonic()
    state = given.state or get_default_state_path(given.folder, given.repo)
    if not given.repo:
        raise OperationsError(
            "--repo is empty; give ORGANISATION/NAME. The scripts in train/ take it from HUB_REPO: "
            "export HUB_REPO=ORGANISATION/NAME"
        )
    if not given.folder.is_dir():
        raise OperationsError(
            f"--folder {given.folder} is not a folder; give the folder of the run's logs"
        )
    # A dry run only reads. A public repository can be read without a token.
    hub = Hub(given.repo, timeout_seconds=given.timeout, log=warn, must_write=not given.dry_run)
    patience = RetryPolicy(given.patience, warn)
    what = given.folder, given.patterns, state, given.create, given.private, given.dry_run
    request = SyncRequest(hub, patience, log, warn, *what)
    # Two syncs of one folder would overwrite each other's state file and send files twice.
    with hold_sync_lock(state, warn):
        outcome = SyncResult()
        if given.patterns:
            outcome = FolderSync(request).run()
        if given.checkpoints is not None:
            # Checkpoints are large, so they come after the logs that people watch.
            outcome.left_out += push_checkpoints(request, given.checkpoints, given.every)
    if not given.dry_run:
        if outcome.commits:
            size = format_bytes(outcome.added_bytes)
            sent = f"{outcome.added} sent ({size}), {outcome.deleted} deleted"
        else:
            sent = "nothing to send"
        log(f"{given.repo}: {outcome.files} files, {sent}, {time.monotonic() - began:.1f} s")
    # Files that were left out are a success for the others, and cron should report them anyway.
    if outcome.left_out:
        return exit_codes.FOUND
    return 0


def try_sync(given: HubSync) -> int:
    """Sync once, report errors, and return the exit code."""
    problem = None
    try:
        code = sync(given)
    except SyncInProgressError as busy:
        # Cron starts a sync every hour, and one sync may take longer. That is no failure.
        warn(str(busy))
        return 0
    except HubUnavailableError as trouble:
        problem = str(trouble)
        warn(f"{trouble}; nothing is lost, because the next sync sends what is not on {given.repo}")
        code = exit_codes.NOT_DONE
    except (MegatronError, OSError) as error:
        problem = str(error)
        warn(f"error: {error}")
        code = exit_codes.USER_ERROR
    # A dry run is started by a person, who sees the error.
    if given.main_log is not None and not given.dry_run:
        _alert(given, given.main_log, problem)
    return code


def _alert(given: HubSync, main_log: Path, problem: str | None) -> None:
    """Write to the main log that the sync fails, or that it succeeds again."""
    kind = f"hub sync of {given.folder}"
    alerts = []
    if problem is not None:
        alerts.append(Alert(kind, make_plain(f"{kind} fails: {problem}")))
    delivery = deliver(alerts, Outlets(main_log), watched=[kind])
    for trouble in delivery.troubles:
        warn(f"error: {trouble}")


def check_arguments(given: HubSync) -> Iterator[Finding]:
    """Check that there is something to sync, and that each value is in its range."""
    if not given.patterns and given.checkpoints is None:
        yield error("nothing to sync; give --patterns, --checkpoints, or both")
    if given.every < 1:
        yield error(f"--every {given.every} must be 1 or more")
    # A comparison with NaN is false, so NaN is refused as well.
    pauses_are_valid = given.watch is None or 0 < given.watch < math.inf
    if not (0 < given.timeout < math.inf and given.patience >= 0 and pauses_are_valid):
        yield error(
            "--timeout and --watch must be more than 0 seconds and finite, and --patience at least "
            f"0 seconds; given are --timeout {given.timeout:g}, --watch {given.watch} and "
            f"--patience {given.patience:g}"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    given = parse_arguments(HubSync, args=argv, description=__doc__)
    try:
        refuse_errors(check_arguments(given))
    except ConfigError as error:
        warn(f"error: {error}")
        return exit_codes.USER_ERROR
    code = try_sync(given)
    while given.watch is not None and code != exit_codes.USER_ERROR:
        time.sleep(given.watch)
        # Only the first sync may end the tool. An error later may pass without a restart, for
        # example when an expired token is replaced.
        code = min(try_sync(given), exit_codes.FOUND)
    return code


def run_command() -> int:
    """Run the command line and return the exit code. Ctrl-C gives 130."""
    # A full disk under the output must not end --watch.
    protect_standard_streams()
    try:
        return main()
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    sys.exit(run_command())
