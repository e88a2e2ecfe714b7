"""Tests that benchmarks/layouts.py runs. The measured numbers do not matter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks/layouts.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_quick_prints_every_table():
    printed = run("--quick")
    assert re.findall(r"^SKIPPED: (.*)$", printed, re.MULTILINE) == [
        "compile: --quick leaves it out"
    ]
    for row in ("one process, one thread", "TP 2", "PP 2", "TP 2 x PP 2"):
        assert re.search(
            rf"^\| {row} \| \d x 1 \| \d \| \d+ / \d+ / \d+ \| \d", printed, re.MULTILINE
        ), row
    shares = re.findall(
        r"^\| (?:1F1B|interleaved, v = 2) \| (\d+) \|.*\| (0\.\d+) \|$", printed, re.MULTILINE
    )
    assert shares == [("2", "0.333"), ("4", "0.200"), ("2", "0.200"), ("4", "0.111")]
    for row in ("no recomputation", "all layers", "DP 2, ZeRO 1", "DP 2, ZeRO 3"):
        assert re.search(rf"^\| {row} \| \d+ \| [+-]\d+ \| [+-]\d+ \|$", printed, re.MULTILINE), row
    rows = re.findall(r"^\| (.*) \| (\d+) \| .* \| \d\.\d{4} \|$", printed, re.MULTILINE)
    assert rows == [("one process", "32"), ("one process", "128"), ("TP 2 x PP 2", "32")]


@pytest.mark.full
def test_ranks_on_one_device_train_as_one_process():
    printed = run("--losses")
    difference = r"(?:\d\.\de-\d\d|0\.0e\+00)"
    rows = re.findall(rf"^\| (?:TP|PP|DP|HSDP) .* \| gloo \| {difference} \|$", printed, re.M)
    # Each row is printed when its layout has run, and again in the table.
    assert len(rows) == 2 * 11
