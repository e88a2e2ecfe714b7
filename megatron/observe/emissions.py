"""Energy and CO2 of a run, by codecarbon, which reckons offline with a country's energy mix.

Invariant: whatever codecarbon does, training goes on. A disk that cannot be written is reported once and tried again with each
flush; any other failure ends the measurement. Its own logger is kept to errors, or it floods the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codecarbon import OfflineEmissionsTracker


class Emissions:
    """Measures from construction to `stop`, into `emissions.csv` in `directory` (None: off). Use from one rank only."""

    def __init__(
        self, directory: str | None, country_iso_code: str, *, say: Callable[[str], None] = print
    ) -> None:
        self._say = say
        self._tracker: OfflineEmissionsTracker | None = None
        self._path = Path(directory or "") / "emissions.csv"
        self._lost_rows = 0
        if directory is not None:
            self._start(directory, country_iso_code)

    @property
    def enabled(self) -> bool:
        return self._tracker is not None

    def flush(self) -> None:
        """Write what was measured so far, so that a killed run loses little; call it with each save."""
        if self._tracker is None:
            return
        try:
            self._end_torn_row()
            _refuse_none(self._tracker.flush())
        except OSError as error:
            self._lost_rows += 1
            if self._lost_rows == 1:
                self._say(
                    f"cannot write emissions to {self._path}: {error}; training goes on, each save attempts it again"
                )
        except Exception as error:  # a foreign package must not end the training
            self._give_up(error)
        else:
            self._say_if_it_works_again()

    def stop(self) -> float | None:
        """Write the last row; kg of CO2 equivalent, or None where nothing was measured. Stopping twice is harmless."""
        if self._tracker is None:
            return None
        tracker, self._tracker = self._tracker, None
        try:
            self._end_torn_row()
            kilograms = _refuse_none(tracker.stop())
        except OSError as error:
            self._say(f"cannot write emissions to {self._path}: {error}; its last row is lost")
            return None
        except Exception as error:  # a foreign package must not end the training
            self._give_up(error)
            return None
        self._say_if_it_works_again()
        return kilograms

    def _end_torn_row(self) -> None:
        """End a row that a full disk cut off, so that it does not swallow the next one. Raises OSError."""
        if self._lost_rows and self._path.is_file():
            with open(self._path, "rb+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                if end and file.read(1) != b"\n":
                    file.write(b"\n")

    def _say_if_it_works_again(self) -> None:
        """Rows hold totals, so a lost one costs a point of the curve and no energy."""
        if self._lost_rows:
            self._say(
                f"emissions are written to {self._path} again; {self._lost_rows} rows were lost"
            )
            self._lost_rows = 0

    def _start(self, directory: str, country_iso_code: str) -> None:
        try:
            from codecarbon import OfflineEmissionsTracker
        except ImportError:
            self._say(
                "--codecarbon-dir is given, but codecarbon is not installed: emissions are not measured (pip install codecarbon)"
            )
            return
        try:
            Path(directory).mkdir(
                parents=True, exist_ok=True
            )  # codecarbon refuses a folder that is not there
            # Before construction too: log_level= takes effect only in the middle of it.
            logging.getLogger("codecarbon").setLevel(logging.ERROR)
            # allow_multiple_runs: a lock file of a killed run must not silence the next one.
            tracker = OfflineEmissionsTracker(
                output_dir=directory,
                country_iso_code=country_iso_code,
                log_level="error",
                allow_multiple_runs=True,
            )
            tracker.start()
            self._tracker = tracker
        except Exception as error:  # a foreign package must not end the training
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        self._say(f"codecarbon failed, emissions are not measured: {type(error).__name__}: {error}")


def _refuse_none(kilograms: float | None) -> float:
    """codecarbon swallows the exceptions of these calls, and returns None.

    Raises:
        OSError: it did so.
    """
    if kilograms is None:
        raise OSError("codecarbon gives no reason; is there room on the disk?")
    return kilograms
