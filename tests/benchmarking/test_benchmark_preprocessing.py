"""Tests that benchmarks/preprocessing.py runs. The measured numbers do not matter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_quick_prints_phases_and_every_checkout(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    pytest.importorskip("orjson")
    (tmp_path / "other").symlink_to(ROOT)
    command = [sys.executable, str(ROOT / "benchmarks/preprocessing.py"), "--quick"]
    checkouts = ["--checkouts", str(ROOT), str(tmp_path / "other")]
    done = subprocess.run(
        [*command, *checkouts], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for phase in ("reading", "JSON", "library", "writing"):
        assert re.search(rf"^\| {phase} \| \d+ \| \d+ \|$", done.stdout, re.MULTILINE), phase
    for checkout in checkouts[1:]:
        row = rf"^\| {checkout} (\| \d+ ){{5}}\|$"
        assert re.search(row, done.stdout, re.MULTILINE), done.stdout
