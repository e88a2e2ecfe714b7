"""Goodput while a run trains: that of its files at the start of the launch, plus this launch."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron.base.errors import MegatronError
from megatron.extras.operations.chronicle.goodput import (
    DROPPED,
    EVALUATIONS,
    KEPT,
    SAVES,
    Goodput,
    Totals,
    add_up,
    count_first_start,
    format_goodput,
)
from megatron.extras.operations.chronicle.history import read_history
from megatron.observe.report import LaunchStart, ReportEvent, RunEvent, StepTimes
from megatron.observe.timers import EVALUATE, SAVE
from megatron.run.parts import GoodputReport

_LINE_SECONDS = 600.0
"""Shortest time between two lines of the log. Frequent saves would otherwise fill it."""
_READ_SECONDS = 5.0
"""Longest time that the end of a launch waits for the files of earlier launches."""


class GoodputMeter(GoodputReport):
    """Measures one launch. Use it from one rank only."""

    def __init__(
        self, folder: Path, metrics: Path, log: Callable[[str], None], *, is_first: bool
    ) -> None:
        """Store where the files of the run are. They are read when the launch starts.

        Args:
            folder: The --save folder.
            metrics: The metrics file.
            log: Prints a line of the log.
            is_first: Whether this is the first launch. Its files have only its start, so they are
                not read.
        """
        self._folder = folder
        self._metrics = metrics
        self._log = log
        self._is_first = is_first
        self._totals: Totals | None = None
        """The totals of the files. None until they are read."""
        self._failure: str | None = None
        self._own = dict.fromkeys((KEPT, DROPPED, SAVES, EVALUATIONS), 0.0)
        """Seconds by cause of this launch."""
        self._line_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def write(self, event: ReportEvent) -> None:
        """Count the time of an event, and print the goodput at a save from time to time."""
        match event:
            case RunEvent(kind="start"):
                if self._is_first:
                    self._totals = count_first_start(time.time(), event.details)
            case LaunchStart():
                self._start_reading()
            case StepTimes():
                self._own[KEPT if event.applied else DROPPED] += event.seconds
                self._own[SAVES] += event.phase_seconds.get(SAVE, 0.0)
                self._own[EVALUATIONS] += event.phase_seconds.get(EVALUATE, 0.0)
            case RunEvent(kind="save"):
                if time.monotonic() - self._line_at >= _LINE_SECONDS:
                    self._line_at = time.monotonic()
                    self._report()

    def _start_reading(self) -> None:
        """Start to read the files in a thread. A long run has millions of lines.

        The chronicle and the metrics file have the start of this launch, but no iteration of it.
        """
        if self._is_first:
            return
        size = _find_size(self._metrics)
        self._thread = threading.Thread(
            target=self._read, args=(size,), name="goodput", daemon=True
        )
        self._thread.start()

    def _read(self, metrics_bytes: int) -> None:
        try:
            history = read_history(self._folder, metrics_bytes=metrics_bytes)
            self._totals = add_up(history)
        except (MegatronError, OSError, ValueError) as error:
            self._failure = str(error)

    def compute(self) -> Goodput | None:
        """Return the goodput of the run until now. It is None until the files are read."""
        # Read once, because the thread may set it between two reads.
        totals = self._totals
        if totals is None:
            return None
        seconds = {
            cause: value + self._own.get(cause, 0.0) for cause, value in totals.seconds.items()
        }
        return Totals(totals.begin, totals.end, seconds).compute(time.time())

    def compute_share(self) -> float | None:
        """Return the share of the run's time in kept steps. It is None until the files are read."""
        goodput = self.compute()
        return None if goodput is None else goodput.share

    def close(self) -> None:
        """Print the goodput at the end of a launch."""
        if self._thread is not None:
            self._thread.join(_READ_SECONDS)
        if self._failure is not None:
            self._log(f"warning: the goodput is not known: {self._failure}")
        self._report()

    def _report(self) -> None:
        goodput = self.compute()
        if goodput is not None:
            self._log(format_goodput(goodput))


def _find_size(path: Path) -> int:
    """Return the bytes of a file. A file that does not exist or cannot be read has none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
