"""A rank that hangs ends the run within --distributed-timeout-minutes and is named.

A slow file system does not end the run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.launches import BOUND_SECONDS, ERROR, Launch, NewJob, loaded_line, saved_lines

ROOT = Path(__file__).resolve().parents[2]

LIMIT_SECONDS = 15.0
LIMIT = f"--distributed-timeout-minutes {LIMIT_SECONDS / 60}"
GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2"
ENDLESS = "--train-iters 1000000"
LOST = 1
COORDINATES = [
    f"pipeline {pipeline}, data 0, tensor {tensor}" for pipeline in (0, 1) for tensor in (0, 1)
]
FULL = pytest.mark.full


def stop_and_wait(launch: Launch, victim: int) -> float:
    """Stop a rank permanently, and return the seconds until the others have ended.

    Their exit code must be that of a lost rank.
    """
    start = time.monotonic()
    os.kill(launch.pids[victim], signal.SIGSTOP)
    others = [rank for rank in range(len(launch.pids)) if rank != victim]
    launch.wait_for(lambda: launch.running() == [victim], f"the end of all ranks but {victim}")
    seconds = time.monotonic() - start
    assert [launch.processes[rank].exitcode for rank in others] == [LOST] * len(others), (
        launch.all_output()
    )
    return seconds


def check_names(output: str, victim: int) -> None:
    """Check that one rank names the victim, after the watchdog's warnings."""
    output = re.sub(r"warning: .* has taken .*\n(?:  .*\n)*", "", output)
    messages = [line for line in output.splitlines() if "does not answer" in line]
    # Without the store, which is rank 0's, ranks cannot agree on who prints it.
    assert len(messages) == 1 or (victim == 0 and len(messages) > 1), output
    name = f"rank {victim} on {os.uname().nodename} ({COORDINATES[victim]})"
    assert f"{name} does not answer" in messages[0]


@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, marks=FULL), pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3],
)
@pytest.mark.parametrize("engine", ["", pytest.param("--deepspeed", marks=FULL)])
def test_stopped_rank_is_named_within_the_limit(victim: int, engine: str, new_job: NewJob) -> None:
    """A rank that is stopped permanently is named, and all others end within the limit.

    Rank 0 keeps the store through which ranks answer, as under srun.
    """
    launch = new_job("job", f"{GRID} {ENDLESS} {LIMIT} {engine}", 4).launch()
    launch.wait_for_line("iteration        3/")
    seconds = stop_and_wait(launch, victim)
    assert seconds <= LIMIT_SECONDS, f"{seconds:.1f} s\n{launch.all_output()}"
    check_names(launch.all_output(), victim)


def children(pid: int) -> dict[int, int]:
    """Return {rank: process id} of torchrun's ranks."""
    found: dict[int, int] = {}
    for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        variables = Path(f"/proc/{text}/environ").read_bytes().split(b"\0")
        ranks = [int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK=")]
        found |= {rank: int(text) for rank in ranks}
    return found


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 3])
def test_torchrun_ends_within_the_limit_and_30_seconds(
    victim: int, new_job: NewJob, tmp_path: Path
) -> None:
    """Under torchrun, a stopped rank ends the run within the limit and 30 s.

    torchrun's agent keeps the store, so rank 0 is like the others. The agent waits 30 s before it
    kills the stopped rank.
    """
    log = tmp_path / "log.txt"
    argv = new_job("job", f"{GRID} {ENDLESS} {LIMIT}", 4).argv
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "pretrain_gpt.py",
    ]
    with (
        open(log, "w") as file,
        subprocess.Popen([*launcher, *argv], cwd=ROOT, stdout=file, stderr=file) as process,
    ):
        try:
            end = time.monotonic() + BOUND_SECONDS
            while "iteration        3/" not in log.read_text():
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            start = time.monotonic()
            os.kill(children(process.pid)[victim], signal.SIGSTOP)
            code = process.wait(BOUND_SECONDS)
            seconds = time.monotonic() - start
        finally:
            process.kill()  # its ranks end with it
    assert code != 0
    assert seconds <= LIMIT_SECONDS + 30, f"{seconds:.1f} s\n{log.read_text()}"
    check_names(log.read_text(), victim)


DELAY_SECONDS = LIMIT_SECONDS + 1


@pytest.mark.parametrize("mode", ["", pytest.param("--async-save", marks=FULL)])
@pytest.mark.parametrize(
    ("slow", "function"),
    [pytest.param(0, "megatron.checkpoint.shard_file.write_tensors", marks=FULL), (1, "os.fsync")],
)
def test_slow_writer_does_not_end_a_healthy_run(
    slow: int, function: str, mode: str, new_job: NewJob
) -> None:
    """A write that takes longer than a collective may take does not end the run."""
    job = new_job(
        "job", f"--train-iters 4 --save-interval 2 --keep-latest-checkpoints 2 {LIMIT} {mode}", 2
    )
    start = time.monotonic()
    launch = job.launch(delays={slow: {function: DELAY_SECONDS}})
    assert launch.codes() == [0, 0], launch.all_output()
    assert time.monotonic() - start > DELAY_SECONDS
    assert f"{function} takes {DELAY_SECONDS:g} s" in launch.output(slow)
    assert saved_lines(launch.output()) == [2, 4]
    job.check(4, saved=[2, 4])


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "start"),
    [("os.preadv", 2), ("megatron.data.cache._read_header", 0), ("os.statvfs", 0)],
)
def test_slow_reading_does_not_end_a_healthy_run(
    function: str, start: int, new_job: NewJob
) -> None:
    """A slow read of a checkpoint, of a data index or of the free space does not end the run."""
    job = new_job("job", f"--save-interval 2 {LIMIT}", 2)
    if start:
        job.succeed(f"--train-iters {start}")
    slow = 0 if function == "os.statvfs" else 1
    launch = job.launch("--train-iters 4", delays={slow: {function: DELAY_SECONDS}})
    assert launch.codes() == [0, 0], launch.all_output()
    assert f"{function} takes {DELAY_SECONDS:g} s" in launch.output(slow)
    assert loaded_line(launch.output()) == start
    job.check(4)


@pytest.mark.full
def test_waiting_for_a_folder_does_not_end_a_healthy_run(new_job: NewJob) -> None:
    """A wait for another run's lease does not end the run.

    Rank 0 watches the lease for longer than a collective may take.
    """
    job = new_job("job", f"--train-iters 2 {LIMIT}", 2)
    job.folder.mkdir()
    holder = {
        "host": "elsewhere",
        "boot": "",
        "pid": 1,
        "started": "",
        "job": "",
        "restart": 0,
        "token": "x",
    }
    (job.folder / "lease.json").write_text(json.dumps(holder))
    output = job.succeed(constants={"megatron.checkpoint.lease.STALE_SECONDS": DELAY_SECONDS})
    assert f"waiting up to {DELAY_SECONDS:g} s for its heartbeat" in output
    job.check(2)


@pytest.mark.parametrize("mode", ["", pytest.param("--async-save", marks=FULL)])
def test_rank_whose_write_never_ends_is_named(mode: str, new_job: NewJob) -> None:
    """A write that never ends is reported while ranks wait, and ends the run at its own limit."""
    constants = {
        "megatron.parallel.ranks.PATIENCE_SECONDS": 4.0,
        "megatron.parallel.ranks._REPORT_SECONDS": 1.0,
    }
    job = new_job("job", f"--train-iters 2 --save-interval 2 {LIMIT} {mode}", 2)
    launch = job.launch(delays={1: {"os.fsync": 1000.0}}, constants=constants)
    assert launch.codes(by_themselves=True) == [ERROR, ERROR], launch.all_output()
    output = launch.output()
    assert re.search(r"saving iteration 2 has taken \d+ s and is not done on rank 1 on ", output)
    assert re.search(
        r"CheckpointError: saving iteration 2 has taken \d+ s, .* is not done on rank 1 on ", output
    )
    assert "os.fsync takes" in launch.output(1)
