"""Spare nodes of a job read what a start needs, and their step ends before the next one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.extras.operations.slurm import warm_up
from megatron.extras.operations.slurm.client import Allocation

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("n1", "n2", "n3", "n4")


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> Allocation:
    """Return a job of four nodes, two of which are spares."""
    monkeypatch.setattr("megatron.extras.operations.slurm.client.expand_hosts", lambda _: HOSTS)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "8(x4)")
    allocation = Allocation(2)
    allocation.read()
    return allocation


def write_srun(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "srun").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_step_of_the_spares_ends_with_the_training(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_srun(tmp_path, f'echo "$@" >{tmp_path}/words; echo $$; exec sleep 1000', monkeypatch)
    log = tmp_path / "log.txt"
    with warm_up.warm_spares(allocation, ["--export=ALL"], ["pretrain_gpt.py", "--x", "1"], log):
        end = time.monotonic() + 30
        while not log.exists() or not log.read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
        pid = int(log.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    words = (tmp_path / "words").read_text()
    assert "--nodes=2 --ntasks=2 --nodelist=n3,n4" in words
    assert "--export=ALL" in words
    assert words.endswith(f"{sys.executable} -m {warm_up.__name__} pretrain_gpt.py --x 1\n")


def test_job_without_spares_has_no_such_step(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_srun(tmp_path, f"touch {tmp_path}/called", monkeypatch)
    allocation.bad |= {"n3": "hung", "n4": "hung"}
    with warm_up.warm_spares(allocation, [], ["pretrain_gpt.py"], tmp_path / "log.txt"):
        pass
    assert not (tmp_path / "called").exists()


def test_job_without_srun_is_not_ended_by_it(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the training reports that."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with warm_up.warm_spares(allocation, [], ["pretrain_gpt.py"], tmp_path / "log.txt"):
        pass


def test_files_of_the_index_are_found_in_any_word(tmp_path: Path) -> None:
    prefix, other = tmp_path / "a_text_document", tmp_path / "b_text_document"
    cache = tmp_path / "cache"
    for path in (f"{prefix}.idx", f"{other}.idx", f"{prefix}.index-cache/x.npy", cache / "y.npy"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(b"12345")
    words = [
        "0.3",
        str(prefix),
        "--valid",
        f"valid: 1 0:1 {other}",
        "--data-cache-path",
        str(cache),
    ]
    found = warm_up.list_index_files(words)
    assert {path.name for path in found} == {
        f"{prefix.name}.idx",
        f"{other.name}.idx",
        "x.npy",
        "y.npy",
    }
    assert warm_up.read_files(found, 1e9) == 20
    assert warm_up.read_files(found, 7) == 10


@pytest.mark.full
def test_program_reads_the_environment_and_the_index(corpus: str) -> None:
    line = [sys.executable, "-X", "importtime", "-m", warm_up.__name__, "--data-path", corpus]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "has read the environment and 1 files of the index" in done.stdout
    for module in ("torch._dynamo", "megatron.engine.native", "megatron.engine.pipeline_runner"):
        assert f" {module}\n" in done.stderr
