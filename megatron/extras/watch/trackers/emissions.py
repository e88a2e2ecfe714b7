"""Energy and CO2 of a run, measured by codecarbon. It works offline with a country's energy mix.

Invariant: no failure of codecarbon ends the training. If the disk cannot be written, this is
reported once and tried again at each flush. Any other failure ends the measurement. The logger of
codecarbon is limited to errors, because it would flood the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codecarbon import OfflineEmissionsTracker


from megatron.base.plain_text import print_line
from megatron.observe.report import Flush, ReportEvent, Sink


class Emissions(Sink):
    """Measurement from construction to `stop`, written to `emissions.csv`. Use from one rank only.

    All methods do nothing if the measurement is off or has failed.
    """

    def __init__(
        self,
        directory: str | None,
        country_iso_code: str,
        *,
        log: Callable[[str], None] = print_line,
    ) -> None:
        """Start the measurement.

        Args:
            directory: Folder of `emissions.csv`, or None to measure nothing.
            country_iso_code: Country whose energy mix is assumed, as in "FRA".
            log: Prints a line of the log.
        """
        self._log = log
        self._tracker: OfflineEmissionsTracker | None = None
        self._path = Path(directory or "") / "emissions.csv"
        self._lost_rows = 0
        if directory is not None:
            self._start(directory, country_iso_code)

    @property
    def enabled(self) -> bool:
        """Whether a measurement is running."""
        return self._tracker is not None

    def write(self, event: ReportEvent) -> None:
        """Write the measurement so far at each save."""
        if isinstance(event, Flush):
            self.flush()

    def close(self) -> None:
        """End the measurement."""
        self.stop()

    def flush(self) -> None:
        """Write the measurement so far, so that a killed run loses little. Call it at each save."""
        if self._tracker is None:
            return
        try:
            self._end_torn_row()
            _refuse_none(self._tracker.flush())
        except OSError as error:
            self._lost_rows += 1
            if self._lost_rows == 1:
                self._log(
                    f"cannot write emissions to {self._path}: {error}; training continues, and "
                    "each save tries again"
                )
        except Exception as error:
            # A foreign package must not end the training.
            self._give_up(error)
        else:
            self._say_if_it_works_again()

    def stop(self) -> float | None:
        """Write the last row and end the measurement. A second call does nothing.

        Returns:
            Kilograms of CO2 equivalent, or None if nothing was measured.
        """
        if self._tracker is None:
            return None
        # Cleared first, so that a failure below cannot lead to a second call on the same tracker.
        tracker = self._tracker
        self._tracker = None
        try:
            self._end_torn_row()
            kilograms = _refuse_none(tracker.stop())
        except OSError as error:
            self._log(f"cannot write emissions to {self._path}: {error}; its last row is lost")
            return None
        except Exception as error:
            # A foreign package must not end the training.
            self._give_up(error)
            return None
        self._say_if_it_works_again()
        return kilograms

    def _end_torn_row(self) -> None:
        """End a row that a full disk cut off. The next row would otherwise be appended to it.

        Raises:
            OSError: The file cannot be written.
        """
        if self._lost_rows and self._path.is_file():
            with open(self._path, "rb+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                if end and file.read(1) != b"\n":
                    file.write(b"\n")

    def _say_if_it_works_again(self) -> None:
        """Report that rows are written again.

        Rows hold totals. A lost row costs a point of the curve and no energy.
        """
        if self._lost_rows:
            self._log(
                f"emissions are written to {self._path} again; {self._lost_rows} rows were lost"
            )
            self._lost_rows = 0

    def _start(self, directory: str, country_iso_code: str) -> None:
        """Create the folder and the tracker, and start it. A failure is only reported."""
        try:
            from codecarbon import OfflineEmissionsTracker
        except ImportError:
            self._log(
                "--codecarbon-dir is given, but codecarbon is not installed: emissions are not "
                "measured (pip install codecarbon)"
            )
            return
        try:
            # codecarbon rejects a folder that does not exist.
            Path(directory).mkdir(parents=True, exist_ok=True)
            # The level is set before the construction too, because `log_level` below takes effect
            # only in the middle of it.
            logging.getLogger("codecarbon").setLevel(logging.ERROR)
            # codecarbon takes a lock file. That of a killed run must not disable the next one.
            tracker = OfflineEmissionsTracker(
                output_dir=directory,
                country_iso_code=country_iso_code,
                log_level="error",
                allow_multiple_runs=True,
            )
            tracker.start()
            self._tracker = tracker
        except Exception as error:
            # A foreign package must not end the training.
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        self._log(f"codecarbon failed, emissions are not measured: {type(error).__name__}: {error}")


def _refuse_none(kilograms: float | None) -> float:
    """Return the measured value, or raise an error if codecarbon returned None.

    codecarbon catches the exceptions of its own calls, and returns None.

    Raises:
        OSError: The value is None.
    """
    if kilograms is None:
        raise OSError("codecarbon gave no reason; check whether the disk is full")
    return kilograms
