"""Each launcher that a Megatron-DeepSpeed script may use starts the same run.

Launchers append different flags to the command line. tests/slurm covers srun.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from equivalence.corpus import NO_DROPOUT, command, curve
from process_pool import ProcessPool, pretrain, succeed

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "torch.distributed.launch": [
        "-m",
        "torch.distributed.launch",
        "--nproc_per_node",
        "2",
        "--master_port",
        "29741",
    ],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29742"],
}
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_trains_like_the_process_pool(
    launcher: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    if launcher == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    flags = NO_DROPOUT, "--zero-stage 2 --micro-batch-size 2 --deepspeed --exit-interval 2"
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    done = subprocess.run(
        [
            sys.executable,
            *LAUNCHERS[launcher],
            "pretrain_gpt.py",
            *command(tmp_path / "launched", corpus, "gpt2", "ramp", *flags),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    succeed(pool.run(2, pretrain, command(tmp_path / "pool", corpus, "gpt2", "ramp", *flags)))
    assert len(curve(tmp_path / "launched")) == 2
    assert curve(tmp_path / "launched") == curve(tmp_path / "pool")
