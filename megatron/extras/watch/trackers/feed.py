"""The process that feeds a tracker from the metrics file. Rank 0 starts one for each tracker.

It reads lines that are on the disk already. So a tracker that is slow, fails or ends cannot delay
training, and after a failure the lines are still there.

Invariant: in the lineage of a run, the tracker has each iteration once. A run that goes back to an
earlier iteration gets a new id with a parent. The same happens if the feed was killed and it is not
known which iterations arrived. The new run then repeats those after the last one that certainly
arrived.

The file with the ids is in the --save folder, so that it moves with the run. This module imports no
torch, because every import takes memory and time of the training host.
"""

import fcntl
import json
import os
import re
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file, without_links
from megatron.base.outside_file import iterate_lines, load_json
from megatron.base.plain_text import make_plain
from megatron.extras.operations.chronicle.records import parse_object, read_events
from megatron.extras.watch.trackers.trackers import TRACKERS, TrackedRun, Tracker
from megatron.observe.chronicle import CHRONICLE

_NESTED = {
    "task": ("tasks", "scores"),
    # The names of the slow ranks are text, which is left out.
    "ranks": ("ranks", "times"),
    "filters": ("filters", "counts"),
}
"""Kind of a record -> the folder of its numbers in a tracker, and the key that has them."""


def flatten_record(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of the metrics file, by the names that the tracker shows."""
    kind = record["kind"]
    if kind == "train":
        prefix = ""
        numbers: Any = {key: record[key] for key in record if key not in ("kind", "iteration")}
    elif kind == "validation":
        prefix = f"validation/{record.get('name')}/"
        measures = ("lm_loss", "accuracy", "bits_per_byte")
        numbers = {key: record[key] for key in measures if key in record}
    else:
        folder, name = _NESTED[kind]
        prefix = f"{folder}/{record.get('name')}/"
        numbers = record.get(name)
    return {f"{prefix}{key}": value for key, value in _iterate_numbers(numbers)}


def _iterate_numbers(values: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a dictionary. A list has one for each layer."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if isinstance(value, list):
            width = len(str(len(value) - 1))
            layers = {f"{key}/{layer:0{width}}": each for layer, each in enumerate(value)}
            yield from _iterate_numbers(layers)
        elif value in ("NaN", "Infinity", "-Infinity"):
            # JSON lacks these numbers.
            yield key, float(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def read_backlog(path: Path, end: int, after: int, until: int) -> list[dict[str, Any]]:
    """Read the records of the run's lineage for iterations in (after, until].

    Args:
        path: The metrics file.
        end: Number of its bytes that are read. The later ones belong to this launch.
        after: The iteration before the first one that is read.
        until: The last iteration that is read.

    Raises:
        OSError: The file cannot be read.
    """
    found: list[dict[str, Any]] = []
    if after >= until or not path.exists():
        return found
    last = 0
    read = 0
    for line in iterate_lines(path):
        read += len(line)
        if read > end:
            break
        record = parse_record(line)
        if record is None:
            continue
        iteration = record["iteration"]
        # A start at an iteration, or an iteration that comes again, undoes all later ones.
        keep = iteration - (record["kind"] == "train")
        if record["kind"] in ("start", "train"):
            if keep < last:
                found = [each for each in found if each["iteration"] <= keep]
            last = iteration
        if record["kind"] != "start" and iteration > after:
            found.append(record)
    return [each for each in found if each["iteration"] <= until]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is torn or of another kind."""
    record = parse_object(line)
    known = ("start", "train", "validation", *_NESTED)
    if record.get("kind") not in known or type(record.get("iteration")) is not int:
        return None
    return record


@dataclass
class FeedState:
    """What the tracker has of a run."""

    runs: list[TrackedRun] = field(default_factory=list)
    """All runs of the tracker, oldest first. The last one is the present one."""
    sending: int = 0
    """No iteration after this one was passed to the tracker."""
    delivered: int = 0
    """All iterations up to this one are stored by the tracker."""

    @classmethod
    def read(cls, path: Path) -> "FeedState":
        """Read the state, which is empty if the file does not exist.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is damaged.
        """
        if not path.exists():
            return cls()
        try:
            record = load_json(path)
            runs = [TrackedRun(**run) for run in record["runs"]]
            return cls(runs, int(record["sending"]), int(record["delivered"]))
        except (ValueError, TypeError, KeyError, OverflowError) as damage:
            # Without the ids, a new run would repeat every iteration. That is the user's choice.
            raise ValueError(
                f"{path} is damaged ({damage}); restore it, or remove it to send all iterations "
                "to a new run"
            ) from damage

    def write(self, path: Path) -> None:
        """Write the state durably.

        Raises:
            OSError: It cannot be written.
        """
        replace_file(path, json.dumps(asdict(self), indent=1) + "\n")

    def continue_after(self, iteration: int, name: str) -> int:
        """Choose the run for a launch that continues after `iteration`.

        Args:
            iteration: The iteration.
            name: Start of the id of a new run.

        Returns:
            The iteration after which iterations are sent.
        """
        after = min(iteration, self.delivered)
        # A kill may have hit the feed between the two, so it is unknown what arrived.
        is_certain = self.sending == self.delivered
        if not self.runs or iteration < self.sending or not is_certain:
            self._add_run(f"{name}-{secrets.token_hex(4)}", after)
        self.sending = after
        self.delivered = after
        return after

    def _add_run(self, new: str, after: int) -> None:
        if not self.runs:
            self.runs.append(TrackedRun(new, root=new, parent=None, parent_iteration=0))
            return
        last = self.runs[-1]
        self.runs.append(TrackedRun(new, last.root, parent=last.id, parent_iteration=after))


WORKS_AGAIN = "works again"
"""The message after a failure has ended. All others report a problem."""
_SLOW_SECONDS = 60.0
"""After this time in one call of a tracker, the log gets a message."""
_LONGEST_RETRY_SECONDS = 300.0
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
"""Matches names of environment variables whose values are secret."""


@dataclass(frozen=True)
class FeedRequest:
    """What the training process asks of the feed."""

    tracker: str
    project: str
    folder: str
    """The --save folder."""
    metrics: str
    """Path of the metrics file."""
    iteration: int
    """Iteration after which the launch continues."""
    offset: int
    """Size of the metrics file in bytes at the start of the launch."""
    parent_pid: int
    """Id of the training process."""
    poll_seconds: float = 5.0
    """Time between two looks at the metrics file."""
    retry_seconds: float = 10.0
    """Time before a failed call is repeated. It doubles after each failure."""

    @property
    def state_path(self) -> Path:
        """The file with the ids and the progress."""
        return Path(self.folder) / f"tracker-{self.tracker}.json"


@dataclass
class _Row:
    """The values of one iteration. A tracker gets them in one call, so that it has one row."""

    iteration: int
    values: dict[str, float]


@dataclass
class Feed:
    """Follows a metrics file, and passes its iterations to a tracker until the launch ends."""

    _request: FeedRequest
    _tracker: Tracker
    _log: Callable[[str], None]
    """Reports a problem, or its end, to the training process."""
    _stop: threading.Event
    """Is set when the training process has closed the metrics file or has ended."""
    _state: FeedState = field(default_factory=FeedState)
    _offset: int = 0
    """Bytes of the metrics file that were read."""
    _pending: _Row | None = None
    """The last iteration that was read. An evaluation of it may follow."""
    _passed: int = 0
    """Last iteration that was passed to the tracker."""
    _is_open: bool = False
    _failures: int = 0

    def run(self) -> None:
        """Feed the tracker until the end of the launch.

        Raises:
            OSError: The --save folder or the metrics file cannot be read or written.
            ValueError: The file with the state is damaged.
        """
        request = self._request
        with self._hold_lock():
            self._state = FeedState.read(request.state_path)
            after = self._state.continue_after(request.iteration, Path(request.folder).name)
            self._passed = after
            self._offset = request.offset
            # The id is on the disk before the tracker knows it.
            self._state.write(request.state_path)
            backlog = read_backlog(Path(request.metrics), request.offset, after, request.iteration)
            rows = self._group(backlog)
            while True:
                # Read before the file, so that nothing of the launch is missed.
                stops = self._stop.is_set() or os.getppid() != request.parent_pid
                rows += self._group(self._read_new())
                if stops and self._pending is not None:
                    rows.append(self._pending)
                rows = self._deliver(rows, stops=stops)
                if stops:
                    break
                self._stop.wait(request.poll_seconds)
            self._finish(rows)

    # -- reading ----------------------------------------------------------------------------------

    def _read_new(self) -> list[dict[str, Any]]:
        """Return the records of the complete lines that were appended."""
        try:
            lines = list(iterate_lines(self._request.metrics, self._offset))
        except FileNotFoundError:
            # The first line was not written yet, for example because the disk is full.
            return []
        # The last line may still be written. It is read as a whole at a later look.
        lines = [line for line in lines if line.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        records = [parse_record(line) for line in lines]
        return [each for each in records if each is not None and each["kind"] != "start"]

    def _group(self, records: list[dict[str, Any]]) -> list[_Row]:
        """Return the iterations that are complete, because a later one has started."""
        rows = []
        for record in records:
            # A tracker drops values of a step that it has seen, so all of one step go together.
            if self._pending is None or self._pending.iteration != record["iteration"]:
                if self._pending is not None:
                    rows.append(self._pending)
                self._pending = _Row(record["iteration"], {})
            self._pending.values.update(flatten_record(record))
        return rows

    # -- sending ----------------------------------------------------------------------------------

    def _deliver(self, rows: list[_Row], *, stops: bool) -> list[_Row]:
        """Pass rows to the tracker, and return those that are left after the end of the launch."""
        delay = self._request.retry_seconds
        # What was passed at the last look has been stored since then.
        self._state.delivered = self._passed
        while rows or not self._is_open:
            try:
                self._open()
                if rows:
                    self._state.sending = max(self._passed, rows[-1].iteration)
                    self._state.write(self._request.state_path)
                with self._report_if_slow("storing values"):
                    while rows:
                        self._tracker.log(rows[0].iteration, rows[0].values)
                        self._passed = max(self._passed, rows.pop(0).iteration)
            # Any failure of a foreign package must leave the data in the file.
            except Exception as error:
                self._report_failure(error)
                self._close_quietly()
                if stops or self._stop.wait(delay):
                    break
                delay = min(2 * delay, _LONGEST_RETRY_SECONDS)
                continue
            self._report_success()
        return rows

    def _open(self) -> None:
        if self._is_open:
            return
        request = self._request
        run = self._state.runs[-1]
        config = {
            **_read_start(Path(request.folder)),
            "parent_run": run.parent,
            "parent_iteration": run.parent_iteration,
        }
        with self._report_if_slow("opening the run"):
            self._tracker.open(
                run, project=request.project, folder=Path(request.folder), config=config
            )
        self._is_open = True

    def _finish(self, rows: list[_Row]) -> None:
        """Close the tracker, and record that everything has arrived."""
        if self._is_open:
            with self._report_if_slow("closing the run"):
                self._tracker.close()
        if rows:
            self._log(
                f"it lacks the iterations from {rows[0].iteration}; the next launch sends them "
                "from the metrics file"
            )
        # Unlike after a kill, it is certain what has arrived, so the next launch needs no new id.
        self._state.sending = self._passed
        self._state.delivered = self._passed
        self._state.write(self._request.state_path)

    def _close_quietly(self) -> None:
        # The failure that led here was reported already.
        with suppress(Exception):
            self._tracker.close()
        self._is_open = False

    # -- messages ---------------------------------------------------------------------------------

    def _report_failure(self, error: Exception) -> None:
        self._failures += 1
        # A message for each attempt would fill the log.
        if self._failures == 1:
            self._log(
                f"{type(error).__name__}: {error}; training continues, and the values are sent "
                "later"
            )

    def _report_success(self) -> None:
        if self._failures:
            self._log(WORKS_AGAIN)
        self._failures = 0

    @contextmanager
    def _report_if_slow(self, what: str) -> Iterator[None]:
        text = f"{what} takes longer than {_SLOW_SECONDS:g} s; training continues"
        timer = threading.Timer(_SLOW_SECONDS, lambda: self._log(text))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Wait for the feed of an earlier launch, which may still be sending."""
        path = self._request.state_path.with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", opener=without_links) as file:
            with self._report_if_slow("waiting for the feed of an earlier launch"):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _read_start(folder: Path) -> dict[str, Any]:
    """Return what the chronicle records about the start of this launch."""
    for event in reversed(read_events(folder / CHRONICLE)):
        if event.kind == "start":
            return dict(event.details)
    return {}


def hide_secrets(text: str) -> str:
    """Return a message on one line, without the values of secret environment variables."""
    for name, value in os.environ.items():
        # A short value, such as a number, may be elsewhere in the text for another reason.
        if _SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return make_plain(" ".join(text.split()))


def main(argument: str) -> int:
    """Run the feed that a training process has started. Return the exit code.

    Messages go to standard output. Standard input gets a byte or ends when the launch ends.

    Args:
        argument: The request as JSON.
    """
    # Slurm and the terminal send these signals to all processes of a job. Training handles them,
    # saves, and then closes this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    request = FeedRequest(**json.loads(argument))
    # Trackers print messages of their own, which do not belong in the log of a run.
    messages = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def log(text: str) -> None:
        print(hide_secrets(text)[:1000], file=messages, flush=True)

    def show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        # Trackio reports values that it could not store as warnings.
        if category is UserWarning:
            log(str(message))

    warnings.showwarning = show_warning
    stop = threading.Event()

    def wait_for_end() -> None:
        os.read(0, 1)
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        Feed(request, TRACKERS[request.tracker](), log, stop).run()
    except BaseException as error:
        log(f"{type(error).__name__}: {error}; training continues without this tracker")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
