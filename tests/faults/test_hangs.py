"""With --hang-timeout, the rank that the others wait for is named within the limit and 5 s."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.launches import BOUND_SECONDS, Job, Launch, NewJob
from faults.test_silent_ranks import children

from megatron.base.error_report import FOLDER_VARIABLE
from megatron.data import position_source
from megatron.extras.operations.slurm.start import read_reports
from megatron.run import evaluate, loop
from megatron.run.exits import StopReason

FULL = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 4.0
CRASH_SECONDS = 5.0
"""Time in which the others end after a rank was killed. They wait for its answer for 3 s."""
LONG_FACTOR = 2.5
GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2"
FLAGS = f"{GRID} --hang-timeout {HANG_SECONDS:g} --train-iters 1000000"
COORDINATES = [
    f"pipeline {pipeline}, data 0, tensor {tensor}" for pipeline in (0, 1) for tensor in (0, 1)
]
LOST = 1
VICTIM = "TEST_VICTIM"
STARTED = "the fault begins"
# After a skipped collective, another one may fail before the limit.
VERDICT = (
    r"(?:the run hangs: .*|(?:the run has lost ranks: )?a collective of .* failed:"
    r"|the ranks cannot continue together:)\n  (.*)"
)
CONSTANTS = {"megatron.parallel.rank_progress.LONG_FACTOR": LONG_FACTOR}
_ORIGINALS: dict[str, Callable[..., Any]] = {
    "count_step": loop.count_step,
    "decide": loop.decide,
    "sum": evaluate._sum_over_ranks,
    "validation": evaluate.evaluate_validation,
    "read": position_source.compute_sample_positions,
}
_calls: list[str] = []


def _is_third_call_of_victim() -> bool:
    _calls.append("")
    if len(_calls) != 3 or os.environ["RANK"] != os.environ[VICTIM]:
        return False
    print(STARTED)
    return True


def sleep_in_count_step(*arguments: Any) -> None:
    if _is_third_call_of_victim():
        time.sleep(1000)
    _ORIGINALS["count_step"](*arguments)


def sleep_in_sum(*arguments: Any) -> Any:
    if _is_third_call_of_victim():
        time.sleep(1000)
    return _ORIGINALS["sum"](*arguments)


def skip_decide(*arguments: Any) -> Any:
    """Skip the collective in which the ranks agree on the next step."""
    if _is_third_call_of_victim():
        return StopReason.NONE
    return _ORIGINALS["decide"](*arguments)


def skip_validation(*arguments: Any) -> None:
    """Skip all collectives of an evaluation."""
    if not _is_third_call_of_victim():
        _ORIGINALS["validation"](*arguments)


def hang_in_train_read(consumed: int, *arguments: Any) -> Any:
    """Hang as a file system does, when training data are read."""
    if _is_third_call_of_victim():
        time.sleep(1000)
    return _ORIGINALS["read"](consumed, *arguments)


def hang_in_evaluation_read(consumed: int, *arguments: Any) -> Any:
    """Hang when validation data are read. The first read at 0 is that of the training data."""
    if consumed == 0:
        _calls.append("")
        if len(_calls) == 1:
            # The next call at 0 is then the third one.
            _calls.append("")
            return _ORIGINALS["read"](consumed, *arguments)
        _calls.pop()
        if _is_third_call_of_victim():
            time.sleep(1000)
    return _ORIGINALS["read"](consumed, *arguments)


def wait_for_verdict(launch: Launch, victim: int, limit: float, start: float) -> str:
    """Wait until the living ranks have ended, and return the output of all.

    The verdict must be there within the limit and 5 s, and the exit codes must be those of a hang.
    """
    launch.wait_for(lambda: re.search(VERDICT, launch.all_output()), "the verdict")
    seconds = time.monotonic() - start
    assert seconds <= limit + 5, f"{seconds:.1f} s\n{launch.all_output()}"
    living = [rank for rank in range(len(launch.pids)) if rank != victim]
    launch.wait_for(lambda: not set(launch.running()) & set(living), "the end of the living ranks")
    codes = [launch.processes[rank].exitcode for rank in living]
    assert codes == [LOST] * len(living), launch.all_output()
    return launch.all_output()


def find_line(output: str, victim: int, coordinates: list[str] = COORDINATES) -> str:
    """Return the line of the verdict about the victim, which must be the first one."""
    found = re.search(VERDICT, output)
    assert found is not None, output
    name = f"rank {victim} on {os.uname().nodename} ({coordinates[victim]})"
    assert found[1].startswith(name), output
    return found[1]


def check_files(job: Job, ranks: set[int]) -> None:
    """Check that these ranks have written their stacks and collectives."""
    (folder,) = (job.folder / "hangs").iterdir()
    for rank in ranks:
        assert "File" in (folder / f"rank_{rank:06d}_stacks.txt").read_text()
        assert "collective_seq_id" in (folder / f"rank_{rank:06d}_collectives.json").read_text()
    assert re.search(VERDICT, (folder / "verdict.txt").read_text())


def test_killed_rank_is_no_hang(new_job: NewJob, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    job = new_job("killed", f"{GRID} --hang-timeout 40 --train-iters 1000000", 4)
    # Rank 2 is in no collective. It learns only through the store that a rank has ended.
    launch = job.launch(
        constants={"megatron.run.loop.count_step": sleep_in_count_step},
        environment={FOLDER_VARIABLE: str(reports), VICTIM: "2"},
    )
    launch.wait_for(lambda: STARTED in launch.output(2), "a long step of rank 2")
    launch.kill([1])
    start = time.monotonic()
    launch.wait_for(lambda: not launch.running(), "the end")
    seconds = time.monotonic() - start
    output = launch.all_output()
    assert seconds < CRASH_SECONDS, f"{seconds:.1f} s\n{output}"
    found = re.search(VERDICT, output)
    assert found is not None
    assert found[1].startswith("rank 1 on ")
    assert "the run hangs:" not in output
    assert "the limit is" not in output
    # A report would count as a hang of a host.
    assert read_reports(reports) == ([], [])
    # A save and the first step may take longer, which the start says.
    assert re.search(r"hang limit +\| 40.0 s for a step +\| 6 min 40 s for a save", output)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=FULL), pytest.param(1, marks=FULL), 3])
def test_stopped_rank_is_named_with_its_last_line(victim: int, new_job: NewJob) -> None:
    job = new_job("job", FLAGS, 4)
    launch = job.launch(constants=CONSTANTS)
    launch.wait_for_line("iteration        3/")
    # Each rank publishes its state once a second.
    time.sleep(2.0)
    start = time.monotonic()
    os.kill(launch.pids[victim], signal.SIGSTOP)
    output = wait_for_verdict(launch, victim, HANG_SECONDS, start)
    assert re.search(
        r"does not answer.*it was at \S+\.py:\d+ \S+ in training iteration \d+",
        find_line(output, victim),
    )
    if victim != 0:
        check_files(job, set(range(4)) - {victim})


@pytest.mark.parametrize(
    ("what", "victim", "fault", "line"),
    [
        pytest.param("train", 0, sleep_in_count_step, "run/loop.py", marks=FULL),
        pytest.param("train", 2, sleep_in_count_step, "run/loop.py", marks=FULL),
        pytest.param("train", 0, skip_decide, "", marks=FULL),
        ("train", 2, skip_decide, ""),
        pytest.param("evaluate", 0, sleep_in_sum, "run/evaluate.py", marks=FULL),
        pytest.param("evaluate", 3, sleep_in_sum, "run/evaluate.py", marks=FULL),
        pytest.param("evaluate", 0, skip_validation, "", marks=FULL),
        pytest.param("evaluate", 3, skip_validation, "", marks=FULL),
        pytest.param("first step", 0, hang_in_train_read, "data/", marks=FULL),
        pytest.param("first step", 3, hang_in_train_read, "data/", marks=FULL),
        pytest.param("first evaluation", 0, hang_in_evaluation_read, "data/", marks=FULL),
        pytest.param("first evaluation", 3, hang_in_evaluation_read, "data/", marks=FULL),
    ],
)
def test_rank_that_sleeps_or_skips_a_collective_is_named(
    what: str,
    victim: int,
    fault: Callable[..., Any],
    line: str,
    new_job: NewJob,
    tmp_path: Path,
) -> None:
    """All ranks answer. The one that the others wait for is named with its line.

    The array task reads the verdict from every rank's file.
    """
    names = {
        "count_step": "megatron.run.loop.count_step",
        "decide": "megatron.run.loop.decide",
        "sum": "megatron.run.evaluate._sum_over_ranks",
        "validation": "megatron.run.loop.evaluate_validation",
        "read": "megatron.data.position_source.compute_sample_positions",
    }
    replaced = next(name for key, name in names.items() if fault.__name__.endswith(key))
    reports = tmp_path / "reports"
    reports.mkdir()
    job = new_job("job", f"{FLAGS} --eval-interval 1 --eval-iters 1 --split 9,1,0", 4)
    launch = job.launch(
        constants={**CONSTANTS, replaced: fault},
        environment={VICTIM: str(victim), FOLDER_VARIABLE: str(reports)},
    )
    launch.wait_for(lambda: STARTED in launch.output(victim), "the fault")
    limit = HANG_SECONDS
    if what.startswith("first"):
        limit *= LONG_FACTOR
    output = wait_for_verdict(launch, -1, limit, time.monotonic())
    assert f"is at {line}" in find_line(output, victim)
    check_files(job, set(range(4)))
    found, _ = read_reports(reports)
    assert [report.rank for report in found] == [0, 1, 2, 3]
    assert all(f"rank {victim} on" in report.message for report in found)
    # The array task counts the hosts. The rank that compared the states names them.
    assert {report.hung_hosts for report in found} == {(), (os.uname().nodename,)}


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("phase", "function", "line"),
    [
        ("save", "megatron.checkpoint.shard_file.write_tensors", "checkpoint/"),
        ("load", "os.preadv", "checkpoint/"),
    ],
)
def test_rank_whose_files_hang_is_named(
    phase: str, function: str, line: str, victim: int, new_job: NewJob
) -> None:
    """A thread that works on files hangs. Its line is named, not that of the main thread."""
    job = new_job("job", f"{FLAGS} --save-interval 2", 4)
    if phase == "load":
        job.succeed("--train-iters 2")
    launch = job.launch(constants=CONSTANTS, delays={victim: {function: 1000.0}})
    launch.wait_for(lambda: f"{function} takes" in launch.output(victim), "the fault")
    output = wait_for_verdict(launch, -1, LONG_FACTOR * HANG_SECONDS, time.monotonic())
    found = find_line(output, victim)
    assert f"is at {line}" in found
    assert {"save": "saving", "load": "loading"}[phase] in found


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        pytest.param("--zero-stage 1", 2, marks=FULL),
        pytest.param("--zero-stage 3", 1, marks=FULL),
        ("--tensor-model-parallel-size 2 --zero-stage 3", 2),
    ],
)
def test_sleeping_rank_is_named_if_data_parallel_ranks_wait_for_shards(
    layout: str, victim: int, new_job: NewJob
) -> None:
    """On CPUs, ZeRO waits for its shards in a function of this package (engine/sharding.py)."""
    flags = f"{layout} --micro-batch-size 1 --num-layers 2 --train-iters 1000000"
    flags += f" --hang-timeout {HANG_SECONDS:g}"
    tensor = 2 if "tensor" in layout else 1
    coordinates = [
        f"pipeline 0, data {rank // tensor}, tensor {rank % tensor}" for rank in range(4)
    ]
    job = new_job("job", flags, 4)
    launch = job.launch(
        constants={**CONSTANTS, "megatron.run.loop.count_step": sleep_in_count_step},
        environment={VICTIM: str(victim)},
    )
    launch.wait_for(lambda: STARTED in launch.output(victim), "the fault")
    output = wait_for_verdict(launch, -1, HANG_SECONDS, time.monotonic())
    line = find_line(output, victim, coordinates)
    assert "is at run/loop.py" in line
    assert "in no collective, and others wait for it in one" in line or "has started" in line


@pytest.mark.full
def test_hang_of_a_single_process_is_named(new_job: NewJob) -> None:
    """A process without other ranks has no store, and its watchdog still ends it."""
    job = new_job("job", f"--hang-timeout {HANG_SECONDS:g} --train-iters 1000000")
    launch = job.launch(
        constants={**CONSTANTS, "megatron.run.loop.count_step": sleep_in_count_step},
        environment={VICTIM: "0"},
    )
    launch.wait_for(lambda: STARTED in launch.output(), "the fault")
    output = wait_for_verdict(launch, -1, HANG_SECONDS, time.monotonic())
    assert "is at run/loop.py" in find_line(output, 0)
    (folder,) = (job.folder / "hangs").iterdir()
    assert "File" in (folder / "rank_000000_stacks.txt").read_text()


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 3])
def test_stopped_rank_under_torchrun_is_named(victim: int, new_job: NewJob, tmp_path: Path) -> None:
    """torchrun's agent keeps the store, so rank 0 is like the others."""
    log = tmp_path / "log.txt"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*launcher, "4", "pretrain_gpt.py", *new_job("job", FLAGS, 4).argv]
    with (
        open(log, "w") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as process,
    ):
        try:
            end = time.monotonic() + BOUND_SECONDS
            while "iteration        3/" not in log.read_text():
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            time.sleep(2.0)
            start = time.monotonic()
            os.kill(children(process.pid)[victim], signal.SIGSTOP)
            while "the run hangs" not in log.read_text():
                assert time.monotonic() < start + HANG_SECONDS + 5, log.read_text()
                time.sleep(0.05)
            # torchrun waits 30 s before it kills the stopped rank.
            code = process.wait(BOUND_SECONDS)
        finally:
            process.kill()
    assert code != 0
    assert "does not answer" in find_line(log.read_text(), victim)
