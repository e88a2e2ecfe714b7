"""The training process's side of a tracker: it starts the feed, prints its messages and ends it.

Invariant: no call waits for the tracker, except `close`, which waits for a limited time.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron.config.tree import Config
from megatron.extras.watch.trackers.feed import WORKS_AGAIN, FeedRequest
from megatron.observe.report import IterationReport, LaunchStart, ReportEvent, Sink

_CLOSE_SECONDS = 10.0
"""Longest time that the end of a launch waits for a tracker."""
_LOWER_PRIORITY = 5
"""Nice value of the feed. Training goes first, but a feed must not starve on a busy host."""


@dataclass
class TrackerProcess:
    """The feed of one tracker. Use it from one rank only. Nothing is started before `start`."""

    tracker: str
    """Name of the tracker."""
    project: str
    folder: Path
    """The --save folder."""
    metrics: Path
    """The metrics file."""
    log: Callable[[str], None]
    """Prints a line of the log."""
    _process: "subprocess.Popen[str] | None" = None
    _reader: threading.Thread | None = None
    _messages: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)

    def start(self, iteration: int) -> None:
        """Start the feed of a launch that continues after `iteration`.

        Call it before the launch writes into the metrics file.
        """
        command = [sys.executable, "-m", "megatron.extras.watch.trackers.feed"]
        try:
            request = FeedRequest(
                self.tracker,
                self.project,
                str(self.folder.absolute()),
                str(self.metrics.absolute()),
                iteration,
                self.metrics.stat().st_size if self.metrics.exists() else 0,
                os.getpid(),
            )
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(request))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # Ctrl-C is meant for the training process. A group of its own can also be ended
                # with the processes that the tracker starts.
                start_new_session=True,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWER_PRIORITY)
        except OSError as error:
            # A process that has ended already has no priority. `_read` reports that end.
            if self._process is None:
                self._report(f"cannot be started: {error}; training continues without it")
                return
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Collect the messages of the feed until it ends."""
        assert process.stdout is not None, "the feed was started with a pipe"
        reported = False
        for line in process.stdout:
            reported = True
            self._messages.put(line.strip())
        # The feed reports its errors itself, but not that it was killed.
        if process.wait() != 0 and not reported and self._process is process:
            self._messages.put(
                f"its process ended with exit code {process.returncode}; training continues, and "
                "the next launch sends the rest"
            )

    def poll(self) -> None:
        """Print the messages of the feed. It takes less than a microsecond without any."""
        # Printed by the main thread, because two threads would mix their lines.
        while not self._messages.empty():
            self._report(self._messages.get())

    def request_end(self) -> None:
        """Ask the feed to send the rest and to end. The metrics file has its last line."""
        if self._process is not None:
            assert self._process.stdin is not None, "the feed was started with a pipe"
            # A byte, because a process that was forked from this one may keep the pipe open.
            with contextlib.suppress(OSError):
                self._process.stdin.write("end\n")
                self._process.stdin.close()

    def close(self) -> None:
        """Wait for the end of the feed, or end it. Call it after `request_end`."""
        process = self._process
        self._process = None
        if process is None or self._reader is None:
            return
        ends_at = time.monotonic() + _CLOSE_SECONDS
        # A feed that failed before is in its pause, or waits for the network again.
        self._reader.join(_CLOSE_SECONDS)
        # Its processes would go on to use the network and the cores of the next job.
        late = self._reader.is_alive()
        if late:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            self._reader.join(max(1.0, ends_at - time.monotonic()))
        self.poll()
        if late:
            self._report(
                f"did not end within {_CLOSE_SECONDS:g} s and was stopped; the next launch sends "
                "the rest"
            )

    def _report(self, text: str) -> None:
        # A warning becomes an alert of the chronicle, which the end of a problem is not.
        prefix = "" if text == WORKS_AGAIN else "warning: "
        self.log(f"{prefix}tracker {self.tracker}: {text}")


class Trackers(Sink):
    """All trackers of a run. They read the metrics file, so most events do not concern them."""

    def __init__(self, config: Config, metrics: Path, log: Callable[[str], None]) -> None:
        """Store what to do. Nothing is started before the start of the launch.

        Args:
            config: The configuration, with --tracker and --save.
            metrics: The metrics file.
            log: Prints a line of the log.
        """
        logging = config.logging
        folder = Path(str(config.checkpoint.save_folder))
        # A dictionary removes a name that was given twice.
        self._trackers = [
            TrackerProcess(name, logging.tracker_project, folder, metrics, log)
            for name in dict.fromkeys(logging.tracker)
        ]

    def write(self, event: ReportEvent) -> None:
        """Start the trackers with the launch, and print their messages after each iteration."""
        for tracker in self._trackers:
            if isinstance(event, LaunchStart):
                tracker.start(event.iteration)
            elif isinstance(event, IterationReport):
                tracker.poll()

    def close(self) -> None:
        """Wait a limited time until all trackers have sent the rest, at the same time."""
        for tracker in self._trackers:
            tracker.request_end()
        for tracker in self._trackers:
            tracker.close()
