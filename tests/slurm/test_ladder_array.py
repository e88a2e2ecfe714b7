"""A ladder is trained by a job array of a real Slurm, and continued by another one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from slurm.cluster import Cluster

from megatron.extras.planner.ladder.runs import read_table

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests/fixtures/openwebtext-100"


@pytest.mark.full
def test_an_array_trains_what_is_not_complete(cluster: Cluster, tmp_path: Path) -> None:
    flags = (
        f"--data-path {CORPUS}/meg-gpt2-openwebtext_text_document --data-cache-path {tmp_path} "
        f"--vocab-file {CORPUS}/gpt2-tiny-vocab.json --merge-file {CORPUS}/gpt2-tiny-merges.txt "
        "--seq-length 32 --micro-batch-size 4 --split 90,10,0 --eval-iters 2 --num-layers 1 "
        "--hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo"
    )
    rungs = [
        {"flags": f"--num-attention-heads 1 --hidden-size {width}", "lr": 1e-2, "tokens": 512}
        for width in (16, 24, 32)
    ]
    path = tmp_path / "ladder.yaml"
    path.write_text(
        yaml.safe_dump({"folder": str(tmp_path / "runs"), "flags": flags, "rungs": rungs})
    )
    environment = os.environ | {
        "SLURM_CONF": str(cluster.folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
    }
    command = [sys.executable, "tools/ladder.py", "run", str(path)]
    subprocess.run([*command, "--only", "1"], cwd=ROOT, check=True, capture_output=True)
    table = tmp_path / "runs/results.csv"
    assert len(read_table(str(table))) == 1
    submit = [*command, f"--submit=--time=10 --output={tmp_path}/task-%a.log"]
    done = subprocess.run(submit, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 240
    while len(read_table(str(table))) < 3 and time.monotonic() < deadline:
        time.sleep(1)
    logs = {path.name: path.read_text() for path in tmp_path.glob("task-*.log")}
    assert len(read_table(str(table))) == 3, logs
    # The complete one was left out.
    assert sorted(logs) == ["task-0.log", "task-2.log"]
    assert subprocess.run(submit, cwd=ROOT, env=environment).returncode == 0
