"""A run that srun starts, with one task for each device, on a real Slurm."""

import sys
from pathlib import Path

import pytest
from equivalence.corpus import NO_DROPOUT, command, curve
from process_pool import ProcessPool, pretrain, succeed
from slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --exit-interval 4"


@pytest.mark.full
@pytest.mark.parametrize("engine", ["", "--deepspeed"])
def test_srun_starts_the_ranks(
    engine: str, cluster: Cluster, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """Two nodes of two tasks give the curve of four processes without Slurm."""
    flags = (NO_DROPOUT, LAYOUT, engine)
    script = tmp_path / "job.sh"
    log = tmp_path / "log.txt"
    arguments = " ".join(command(tmp_path / "slurm", corpus, "gpt2", "ramp", *flags))
    lines = ("#!/bin/bash", f"cd {ROOT}", f"srun {sys.executable} pretrain_gpt.py {arguments}")
    script.write_text("\n".join(lines) + "\n")
    cluster.run(
        "sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", f"--output={log}", str(script)
    )
    assert "4 x " in log.read_text()
    succeed(pool.run(4, pretrain, command(tmp_path / "pool", corpus, "gpt2", "ramp", *flags)))
    assert len(curve(tmp_path / "slurm")) == 4
    assert curve(tmp_path / "slurm") == curve(tmp_path / "pool")


def test_batch_script_without_srun_is_one_process(
    cluster: Cluster, corpus: str, tmp_path: Path
) -> None:
    """A process that srun did not start does not wait for other ranks.

    The job has four tasks, and the environment of its script has Slurm's rank 0.
    """
    script = tmp_path / "job.sh"
    log = tmp_path / "log.txt"
    flags = (NO_DROPOUT, "--micro-batch-size 4 --exit-interval 1")
    arguments = " ".join(command(tmp_path / "run", corpus, "gpt2", "ramp", *flags))
    script.write_text(
        f"#!/bin/bash\ncd {ROOT}\nexec {sys.executable} pretrain_gpt.py {arguments}\n"
    )
    cluster.run("sbatch", "--wait", "--ntasks=4", f"--output={log}", str(script))
    assert "1 x " in log.read_text()
    assert len(curve(tmp_path / "run")) == 1
