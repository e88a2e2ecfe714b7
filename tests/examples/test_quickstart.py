"""Test of examples/quickstart.sh as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_quickstart_trains_resumes_and_beats_the_unigram_entropy(tmp_path: Path) -> None:
    environment = os.environ | {
        "QUICKSTART_DIR": str(tmp_path / "quick start"),
        "VIRTUAL_ENV": sys.prefix,
    }
    command = ["bash", str(ROOT / "examples" / "quickstart.sh")]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "successfully loaded checkpoint from" in result.stdout
    entropy, loss = (
        float(re.findall(rf"{what}: +([0-9.]+) nats", result.stdout)[0])
        for what in ("tokens", "model")
    )
    assert loss < entropy - 1.0
    assert (tmp_path / "quick start" / "loss.png").stat().st_size > 10_000
