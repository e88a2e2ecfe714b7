"""Goodput while a run trains: that of its files at the start of the launch, plus this launch."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from megatron.observe.timers import EVALUATE, SAVE

_LINE_SECONDS = 600.0
"""Shortest time between two lines of the log. Frequent saves would otherwise fill it."""
_READ_SECONDS = 5.0
"""Longest time that the end of a launch waits for the files of earlier launches."""


class GoodputMeter:
    """Measures one launch. Use it from one rank only."""

    def __init__(
        self, folder: Path, metrics: Path, first_start: Mapping[str, Any] | None = None
    ) -> None:
        """Start to read the files of the run in a thread. A long run has millions of lines.

        Args:
            folder: The --save folder. Its chronicle has the start of this launch.
            metrics: The metrics file, which has that start too, but no iteration of this launch.
            first_start: The details of that start, if this is the first launch of the run. Its
                files have nothing else, so they are not read.
        """
        self._folder = folder
        self._totals: Totals | None = None
        """The totals of the files. None until they are read."""
        self._failure: str | None = None
        self._own = dict.fromkeys((KEPT, DROPPED, SAVES, EVALUATIONS), 0.0)
        """Seconds by cause of this launch."""
        self._line_at = time.monotonic()
        self._thread: threading.Thread | None = None
        if first_start is not None:
            self._totals = count_first_start(time.time(), first_start)
        else:
            size = _find_size(metrics)
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

    def add_step(self, seconds: float, phases: Mapping[str, float], *, applied: bool) -> None:
        """Add an iteration.

        Args:
            seconds: Its wall time.
            phases: Seconds of its phases, in which the last save and evaluation are.
            applied: Whether its update was applied.
        """
        self._own[KEPT if applied else DROPPED] += seconds
        self.add_phases(phases)

    def add_phases(self, phases: Mapping[str, float]) -> None:
        """Add the save and the evaluation among the phases."""
        self._own[SAVES] += phases.get(SAVE, 0.0)
        self._own[EVALUATIONS] += phases.get(EVALUATE, 0.0)

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

    def report_if_due(self, log: Callable[[str], None]) -> None:
        """Print the goodput at a save, if the last line was long enough ago."""
        if time.monotonic() - self._line_at >= _LINE_SECONDS:
            self._line_at = time.monotonic()
            self._report(log)

    def report_end(self, log: Callable[[str], None]) -> None:
        """Print the goodput at the end of a launch."""
        if self._thread is not None:
            self._thread.join(_READ_SECONDS)
        if self._failure is not None:
            log(f"warning: the goodput is not known: {self._failure}")
        self._report(log)

    def _report(self, log: Callable[[str], None]) -> None:
        goodput = self.compute()
        if goodput is not None:
            log(format_goodput(goodput))


def _find_size(path: Path) -> int:
    """Return the bytes of a file. A file that does not exist or cannot be read has none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
