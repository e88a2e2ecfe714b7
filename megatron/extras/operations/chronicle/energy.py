"""Energy and CO2 of a run, read from the table that codecarbon writes.

A row has the totals of one launch so far. The totals of all launches sum to those of the run.
Energy of iterations that were rolled back was used too, so the rows that a rollback removed count.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from megatron.base.outside_file import iterate_lines


@dataclass(frozen=True)
class EnergyUse:
    """Energy and CO2 of a run over time."""

    times: np.ndarray
    """Seconds since the epoch, [n], in order."""
    kilowatt_hours: np.ndarray
    """Energy from the start of the run until then, [n]."""
    kilograms: np.ndarray
    """CO2 equivalent from the start of the run until then, [n]."""


def read_energy(tables: list[Path]) -> EnergyUse | None:
    """Return the energy of a run, or None if no row was found.

    Args:
        tables: Tables of codecarbon. Tables that do not exist are left out.

    Raises:
        OSError: A table cannot be read.
    """
    rows = sorted(row for path in tables for row in _iterate_rows(path))
    if not rows:
        return None
    # Launch -> its totals so far.
    totals: dict[str, tuple[float, float]] = {}
    points = []
    for time, launch, energy, carbon in rows:
        before = totals.get(launch, (0.0, 0.0))
        totals[launch] = (max(energy, before[0]), max(carbon, before[1]))
        sums = np.sum(list(totals.values()), axis=0)
        points.append((time, sums[0], sums[1]))
    columns = np.array(points).T
    return EnergyUse(columns[0], columns[1], columns[2])


def _iterate_rows(path: Path) -> Iterator[tuple[float, str, float, float]]:
    """Yield (time, launch, kWh, kg) of each complete row."""
    if not path.is_file():
        return
    lines = (line.decode("utf-8", "replace") for line in iterate_lines(path))
    for row in csv.DictReader(lines):
        try:
            # codecarbon writes the host's local time without a zone.
            time = datetime.fromisoformat(row["timestamp"]).timestamp()
            energy = float(row["energy_consumed"])
            carbon = float(row["emissions"])
            launch = str(row["run_id"])
        except (KeyError, TypeError, ValueError, csv.Error):
            # A killed launch or a full disk may have torn the row.
            continue
        if np.isfinite(energy) and np.isfinite(carbon):
            yield time, launch, energy, carbon
