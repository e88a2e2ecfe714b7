"""codecarbon: off, on and quiet, absent, broken."""

import csv
import logging
import subprocess
import sys
from pathlib import Path

import codecarbon
import pytest

from megatron.observe.emissions import Emissions

ROOT = Path(__file__).resolve().parents[2]


def test_off_without_a_folder() -> None:
    emissions = Emissions(None, "FRA")
    assert not emissions.enabled
    emissions.flush()
    assert emissions.stop() is None


def test_on_it_writes_its_csv_and_is_quiet(tmp_path: Path) -> None:
    """In a process of its own, since codecarbon's threads and logger are the process's."""
    code = (
        "import sys; from megatron.observe.emissions import Emissions\n"
        "emissions = Emissions(sys.argv[1], 'FRA'); emissions.flush(); kg = emissions.stop()\n"
        "assert kg is not None and kg >= 0, kg; assert emissions.stop() is None; print('done')"
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


def test_an_absent_package_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    said: list[str] = []
    emissions = Emissions(str(tmp_path), "FRA", say=said.append)
    assert not emissions.enabled
    assert len(said) == 1
    assert "codecarbon is not installed" in said[0]


@pytest.mark.parametrize("broken", ["__init__", "start", "flush", "stop"])
def test_whatever_breaks_training_goes_on(
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
    said: list[str] = []
    emissions = Emissions(str(tmp_path), "FRA", say=said.append)
    emissions.flush()
    assert emissions.stop() is None
    assert said == ["codecarbon failed, emissions are not measured: RuntimeError: no sensor"]
    assert not emissions.enabled


def test_our_own_logging_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = logging.getLogger().level
    emissions = Emissions(str(tmp_path / "a" / "b"), "FRA")
    emissions.stop()
    assert logging.getLogger().level == level


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """The real codecarbon, whose calls swallow the error of the disk: reported once, tried again, and no row is torn."""
    code = (
        "import os, resource, signal, sys\n"
        "from megatron.observe.emissions import Emissions\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "emissions = Emissions(sys.argv[1], 'FRA'); emissions.flush()\n"
        "size = os.stat(sys.argv[1] + '/emissions.csv').st_size\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard)); emissions.flush(); emissions.flush()\n"
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
