"""Tests that benchmarks/checkpoint.py runs and cleans up. The measured numbers do not matter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"-?\d+\.\d+"
THREE = rf"({NUMBER}) / ({NUMBER}) / ({NUMBER})"
SAVERS = ("raw", "ours", "ours, read back", "torch")
LOADERS = tuple(f"{how}, {who}" for how in ("cold", "warm") for who in ("raw", "ours", "torch"))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/checkpoint.py"),
        "--folder",
        str(folder),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.full
def test_quick_prints_every_table_and_leaves_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "--quick", "--processes", "1", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    # 12 bytes for each parameter of 2 layers of width 128, 5120 ids and 256 positions. The total
    # does not depend on which rank stores which of them.
    h = 128
    gigabytes = 12 * ((5120 + 256) * h + 2 * (12 * h * h + 13 * h) + 2 * h) / 1e9
    sizes = re.findall(
        r"^\d process.* threads: .*; (\d\.\d+) GB in (\d+) tensors$", done.stdout, re.MULTILINE
    )
    assert [size for size, _ in sizes] == [f"{gigabytes:.3f}"] * 2
    assert int(sizes[0][1]) == 3 * 28
    assert int(sizes[1][1]) > 3 * 28  # sharded over two ranks
    for world in ("1 process", "2 processes"):
        for row in (*SAVERS, *LOADERS):
            found = re.search(
                rf"^\| {world}, {row} \| {THREE} \| (\d+\.\d\d) \| (\d+\.\d\d) \|$",
                done.stdout,
                re.MULTILINE,
            )
            assert found is not None, f"{world}, {row}:\n{done.stdout}"
            low, middle, high, seconds, ratio = map(float, found.groups())
            assert 0 < low <= middle <= high
            # Both numbers are rounded.
            assert middle * (seconds - 0.006) <= gigabytes * 1.1 + 0.001 * seconds
            assert ratio > 0
            if row.endswith("raw"):
                assert ratio == 1
        cells = {
            name: float(middle)
            for name, _, middle, _ in re.findall(
                rf"^\| {world}, ([^|]*) \| {THREE} \|$", done.stdout, re.MULTILINE
            )
        }
        parts = [value for name, value in cells.items() if name.startswith("...")]
        assert len(parts) == 3
        assert sum(parts) == pytest.approx(cells["blocked by an async save, s"], abs=0.003)
        assert cells["steps while it is written"] >= 1
    assert list(tmp_path.iterdir()) == []


def test_missing_disk_space_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "--parameters", "1e15")
    assert done.returncode == 2
    assert "36000000.0 GB" in done.stderr
    assert list(tmp_path.iterdir()) == []
