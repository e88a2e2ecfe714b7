"""Emissions with codecarbon switched off, switched on, not installed and failing."""

import csv
import logging
import subprocess
import sys
from pathlib import Path

import codecarbon
import pytest

from megatron.extras.watch.trackers.emissions import Emissions

ROOT = Path(__file__).resolve().parents[2]


def test_no_folder_means_no_measurement() -> None:
    emissions = Emissions(None, "FRA")
    assert not emissions.enabled
    emissions.flush()
    assert emissions.stop() is None


def test_csv_is_written_and_nothing_is_logged(tmp_path: Path) -> None:
    """A measurement writes its CSV file and prints nothing.

    It runs in its own process, because codecarbon's threads and logger are global in a process.
    """
    code = (
        "import sys\n"
        "from megatron.extras.watch.trackers.emissions import Emissions\n"
        "emissions = Emissions(sys.argv[1], 'FRA')\n"
        "emissions.flush()\n"
        "kg = emissions.stop()\n"
        "assert kg is not None and kg >= 0, kg\n"
        "assert emissions.stop() is None\n"
        "print('done')"
    )
    folder = tmp_path / "new" / "folder"
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["done"]
    assert "codecarbon" not in result.stderr
    rows = list(csv.DictReader((folder / "emissions.csv").open()))
    assert rows[-1]["country_iso_code"] == "FRA"


def test_missing_package_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    messages: list[str] = []
    emissions = Emissions(str(tmp_path), "FRA", log=messages.append)
    assert not emissions.enabled
    assert len(messages) == 1
    assert "codecarbon is not installed" in messages[0]


@pytest.mark.parametrize("broken", ["__init__", "start", "flush", "stop"])
def test_failure_of_codecarbon_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    class Tracker:
        def __init__(self, **options: object) -> None:
            self.call("__init__")

        def call(self, name: str) -> float:
            if name == broken:
                raise RuntimeError("no sensor")
            return 0.5

        def start(self) -> None:
            self.call("start")

        def flush(self) -> float:
            return self.call("flush")

        def stop(self) -> float:
            return self.call("stop")

    monkeypatch.setattr(codecarbon, "OfflineEmissionsTracker", Tracker)
    messages: list[str] = []
    emissions = Emissions(str(tmp_path), "FRA", log=messages.append)
    emissions.flush()
    assert emissions.stop() is None
    assert len(messages) == 1
    assert "emissions are not measured" in messages[0]
    assert "RuntimeError: no sensor" in messages[0]
    assert not emissions.enabled


def test_level_of_the_root_logger_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = logging.getLogger().level
    emissions = Emissions(str(tmp_path / "a" / "b"), "FRA")
    emissions.stop()
    assert logging.getLogger().level == level


def test_full_disk_is_reported_once_and_tried_again(tmp_path: Path) -> None:
    """A full disk is reported once and tried again, and no row is torn.

    This uses the real codecarbon, whose calls hide the error of the disk.
    """
    code = (
        "import os, resource, signal, sys\n"
        "from megatron.extras.watch.trackers.emissions import Emissions\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "emissions = Emissions(sys.argv[1], 'FRA'); emissions.flush()\n"
        "size = os.stat(sys.argv[1] + '/emissions.csv').st_size\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))\n"
        "emissions.flush(); emissions.flush()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)); emissions.flush()\n"
        "assert emissions.enabled; assert emissions.stop() is not None"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert "cannot write emissions" in first
    assert "again; 2 rows were lost" in second
    rows = list(csv.DictReader((tmp_path / "emissions.csv").open()))
    assert [row["country_iso_code"] == "FRA" for row in rows] == [True, False, True, True]
