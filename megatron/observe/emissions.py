"""Energy and CO2 of a run, by codecarbon, which reckons offline with a country's energy mix.

Invariant: whatever codecarbon does, training goes on; it says one line at most. Its own logger is kept to errors, or it floods
the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codecarbon import OfflineEmissionsTracker


class Emissions:
    """Measures from construction to `stop`, into `emissions.csv` in `directory` (None: off). Use from one rank only."""

    def __init__(self, directory: str | None, country_iso_code: str, *, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._tracker: OfflineEmissionsTracker | None = None
        if directory is not None:
            self._start(directory, country_iso_code)

    @property
    def enabled(self) -> bool:
        return self._tracker is not None

    def flush(self) -> None:
        """Write what was measured so far, so that a killed run loses little; call it with each save."""
        if self._tracker is not None:
            try:
                self._tracker.flush()
            except Exception as error:  # a foreign package must not end the training
                self._give_up(error)

    def stop(self) -> float | None:
        """Write the last row; kg of CO2 equivalent, or None where nothing was measured. Stopping twice is harmless."""
        if self._tracker is None:
            return None
        tracker, self._tracker = self._tracker, None
        try:
            return tracker.stop()
        except Exception as error:  # a foreign package must not end the training
            self._give_up(error)
            return None

    def _start(self, directory: str, country_iso_code: str) -> None:
        try:
            from codecarbon import OfflineEmissionsTracker
        except ImportError:
            self._say(
                "--codecarbon-dir is given, but codecarbon is not installed: emissions are not measured (pip install codecarbon)"
            )
            return
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)  # codecarbon refuses a folder that is not there
            # Before construction too: log_level= takes effect only in the middle of it.
            logging.getLogger("codecarbon").setLevel(logging.ERROR)
            # allow_multiple_runs: a lock file of a killed run must not silence the next one.
            tracker = OfflineEmissionsTracker(
                output_dir=directory, country_iso_code=country_iso_code, log_level="error", allow_multiple_runs=True
            )
            tracker.start()
            self._tracker = tracker
        except Exception as error:  # a foreign package must not end the training
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        self._say(f"codecarbon failed, emissions are not measured: {type(error).__name__}: {error}")
