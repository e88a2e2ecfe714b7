"""Tests of the environment that the files `start-*` of `train/` set."""

import os
import re
import subprocess
from pathlib import Path

import pytest

TRAIN = Path(__file__).resolve().parents[1] / "train"
FILES = sorted(TRAIN.glob("*/start-*"))
RUNS = [path for path in FILES if path.parent.name != "tiny"]
"""Those of runs on many nodes."""


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_environment_of_a_large_run(path: Path, tmp_path: Path) -> None:
    command = f"set -eu; ulimit -Sn 256; source {path}; ulimit -Sn; ulimit -Hn; env"
    environment = {**os.environ, "WORK": str(tmp_path), "SCRATCH": str(tmp_path)}
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=True
    )
    soft, hard, *variables = found.stdout.splitlines()
    assert soft == hard != "256"
    values = dict(line.split("=", 1) for line in variables if "=" in line)
    assert values["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    scripts = [file.read_text() for file in path.parent.glob("*.slurm")]
    limits = [re.findall(r"--hang-timeout (\d+)", text) for text in scripts if "--save" in text]
    assert limits
    for limit in limits:
        # The watchdog names the rank that hangs, and NCCL's monitor does not.
        assert int(values["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > int("".join(limit))
    # The records of a time-out need a folder that exists.
    assert Path(values["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]).parent.is_dir()
    assert int(values["TORCH_FR_BUFFER_SIZE"]) > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_setting_has_a_reason(path: Path) -> None:
    lines = path.read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if re.match(r"export |ulimit |# export ", line):
            assert before.startswith(("#", "export TORCH_FR", "mkdir")) or "   # " in line, line
