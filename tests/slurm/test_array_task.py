"""A job array on a real Slurm: train/tiny/tiny.slurm is killed, interrupted and requeued.

It runs on 2 nodes x 2 processes, or x 1 in the short suite. Its losses must equal those of an
uninterrupted run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_pool import ProcessPool, pretrain, succeed
from slurm.cluster import Cluster
from slurm.stand_in import StandIn
from suites import is_short

from megatron.extras.interop.translators.launch_script import read_launch_script
from megatron.extras.operations.slurm.attempts import FILE
from megatron.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "train/tiny/tiny.slurm"
BOUND_SECONDS = 240.0
SAVED = "successfully saved checkpoint at iteration"
TWO_RANKS = "--ntasks-per-node=1"
"""Starts half of the script's ranks. The start of a rank takes 4 s of CPU time."""


@dataclass(frozen=True)
class TinyRun:
    cluster: Cluster | StandIn
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def submit(self, *options: str, script: str = SCRIPT, **variables: str) -> str:
        """Submit the script and return the job's number."""
        fixed = (f"--chdir={ROOT}", f"--output={self.folder}/%x-%A.out")
        output = self.cluster.run(
            "sbatch", *fixed, *options, script, TINY=str(self.folder), **variables
        )
        return output.split()[-1]

    def main_log(self) -> str:
        path = self.folder / "tiny-logs" / "logs" / "main_log.txt"
        if path.exists():
            return path.read_text()
        return ""

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + BOUND_SECONDS
        while not condition():
            if time.monotonic() > end:
                queue = self.cluster.run("squeue", "--array", "--states=all")
                log = self.main_log()
                controller = self.cluster.read_controller_log()[-6000:]
                pytest.fail(
                    f"{what} did not happen in {BOUND_SECONDS:g} s\n{queue}\n{controller}\n"
                    f"{log[:3000]}\n[...]\n{log[-3000:]}"
                )
            time.sleep(0.1)

    def wait_for_line(self, text: str, times: int = 1) -> None:
        self.wait_for(lambda: self.main_log().count(text) >= times, f"{text!r} {times} times")

    def wait_for_end(self, job: str) -> None:
        self.wait_for(
            lambda: not self.cluster.run("squeue", "--noheader", "--job", job).strip(),
            f"the end of {job}",
        )

    def curve(self) -> dict[int, tuple[float, float]]:
        """Return loss and gradient norm of each iteration. Repeated ones must be equal."""
        curve: dict[int, tuple[float, float]] = {}
        for entry in read_metrics(self.folder / "tiny-logs" / "logs" / "metrics.jsonl"):
            values = (entry["lm_loss"], entry["grad_norm"])
            assert curve.setdefault(entry["iteration"], values) == values
        return curve

    def attempts(self) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (self.checkpoints / FILE).read_text().splitlines()]
        return [record["began"] for record in records if "began" in record]

    def pids(self, job: str, node: str) -> list[int]:
        """Return the PIDs of the training's ranks on a node."""
        own = {("SLURM_JOB_ID", job), ("SLURMD_NODENAME", node)}
        found = []
        for process in psutil.process_iter(["environ", "cmdline"]):
            words = process.info["cmdline"] or []
            if (
                own <= (process.info["environ"] or {}).items()
                and "pretrain_gpt.py" in words
                and "-u" in words[:2]
                and not words[0].endswith("srun")
            ):
                found.append(process.pid)
        return found


@pytest.fixture
def tiny(cluster: Cluster, tmp_path: Path) -> Iterator[TinyRun]:
    yield TinyRun(cluster, tmp_path)
    cluster.run("scancel", "--name=tiny")
    end = time.monotonic() + 60
    while cluster.run("squeue", "--noheader", "--name=tiny").strip() and time.monotonic() < end:
        time.sleep(0.2)
    for line in cluster.run("sinfo", "--Node", "--noheader", "--format=%N %t").splitlines():
        node, state = line.split()
        if state.startswith(("down", "drain")):
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


@pytest.fixture
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> TinyRun:
    """Return a run on scripts in place of Slurm, or on a real one in the long suite."""
    if not is_short():
        run: TinyRun = request.getfixturevalue("tiny")
        return run
    folder = tmp_path / "slurm"
    folder.mkdir()
    return TinyRun(StandIn(folder), tmp_path)


def plain_arguments(folder: Path, **variables: int) -> list[str]:
    """Return the script's command line for a run in `folder` without Slurm."""
    text = (ROOT / SCRIPT).read_text()
    for name, value in {"TINY": folder, **variables}.items():
        text = re.sub(rf"\$\{{{name}:-[^}}]*\}}", str(value), text)
    folder.mkdir(exist_ok=True)
    script = folder / "tiny.slurm"
    script.write_text(text)
    return [
        str(ROOT / word) if word.startswith("tests/") else word
        for word in read_launch_script(script).arguments
    ]


Curve = Callable[[int, int], dict[int, tuple[float, float]]]


@pytest.fixture(scope="module")
def uninterrupted(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Return a function that trains a number of samples uninterrupted and returns the curve."""

    def run(ranks: int, samples: int) -> dict[int, tuple[float, float]]:
        folder = tmp_path_factory.mktemp("uninterrupted")
        argv = plain_arguments(folder, TRAIN_SAMPLES=samples, EXIT_INTERVAL=100_000)
        succeed(pool.run(ranks, pretrain, argv))
        entries = read_metrics(folder / "tiny-logs" / "logs" / "metrics.jsonl")
        return {entry["iteration"]: (entry["lm_loss"], entry["grad_norm"]) for entry in entries}

    return run


@pytest.mark.full
def test_array_tasks_run_one_after_another(tiny: TinyRun, uninterrupted: Curve) -> None:
    """Three array tasks train ten iterations each, and the fourth one is cancelled."""
    samples = 64 + 16 * 22
    job = tiny.submit("--array=1-4%1", TRAIN_SAMPLES=str(samples))
    tiny.wait_for_end(job)
    log = tiny.main_log()
    assert [attempt["element"] for attempt in tiny.attempts()] == ["1", "2", "3"]
    lines = re.findall(r"array task \d+_(\d) (starts|ended at iteration \d+)", log)
    # Each one starts after the end of the one before.
    assert lines == [
        (str(n), word) for n in range(1, 4) for word in ("starts", f"ended at iteration {10 * n}")
    ]
    loaded = re.findall(r"successfully loaded checkpoint from \S+ at iteration +(\d+)", log)
    assert loaded == ["10", "20"]
    assert "training is complete at iteration 30" in log
    assert f"the pending tasks of array {job} are cancelled" in log
    assert tiny.curve() == uninterrupted(4, samples)
    assert len(tiny.curve()) == 30


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_training_survives_a_killed_rank_a_lost_node_and_a_signal(
    ranks: int, tiny: TinyRun, uninterrupted: Curve
) -> None:
    """The curve equals that of an uninterrupted run, and the dependent job continues it."""
    # The signal comes after iteration 15 or 20, and must not find a complete training.
    samples = 64 + 16 * 32
    variables = {"TRAIN_SAMPLES": str(samples), "EXIT_INTERVAL": "100000"}
    tasks = f"--ntasks-per-node={ranks // 2}"
    job = tiny.submit(tasks, **variables)
    after = tiny.submit(tasks, f"--dependency=afterany:{job}", **variables)
    tiny.wait_for_line(SAVED, 1)
    os.kill(tiny.pids(job, "n2")[0], signal.SIGKILL)
    tiny.wait_for_line(f"array task {job} starts the training again, restart 1 of 5 within 6 h")
    tiny.wait_for_line("successfully loaded checkpoint", 1)
    tiny.wait_for_line(SAVED, 2)
    tiny.cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    tiny.wait_for_line("successfully loaded checkpoint", 2)
    tiny.wait_for_line(SAVED, 4)
    assert "(Dependency)" in tiny.cluster.run("squeue", "--noheader", "--job", after)
    tiny.cluster.run("scancel", "--signal=USR1", job)
    tiny.wait_for_line("received a signal to stop")
    tiny.wait_for_end(job)
    assert (
        f"array task {job} (requeue 1) ended at iteration {max(tiny.curve())}: left in order"
        in tiny.main_log()
    )
    tiny.wait_for_end(after)
    assert "training is complete at iteration 40" in tiny.main_log()
    starts = [
        (attempt["job"], attempt["restart"], attempt["is_restart"]) for attempt in tiny.attempts()
    ]
    assert starts == [(job, 0, False), (job, 0, True), (job, 1, False), (after, 0, False)]
    curve = tiny.curve()
    assert len(curve) == 40
    assert curve == uninterrupted(ranks, samples)


@pytest.mark.full
def test_bad_node_is_excluded(tiny: TinyRun) -> None:
    """After a node could not write to its disk, both array tasks run without that node."""
    for node in ("n2", "n3", "n4"):
        (tiny.folder / "disks" / node).mkdir(parents=True)
    checks = f"--check-nodes --disk {tiny.folder}/disks/%h --memory-gib 0.1 --slower-than 0"
    job = tiny.submit("--array=1-2%1", ELEMENT_ARGS=checks, TRAIN_SAMPLES="224")
    tiny.wait_for_line("node n1 is not used any more")
    tiny.wait_for_end(job)
    log = tiny.main_log()
    assert re.search(r"ALERT.* node n1 is not used any more: rank [01]: disk: .*disks/n1", log)
    assert "requeued: bad nodes" in log
    assert "training is complete at iteration 18" in log
    assert len(re.findall("node n1 is not used any more", log)) == 1
    first, *later = tiny.attempts()
    assert first["nodes"] == "n[1-2]"
    assert all("1" not in attempt["nodes"] for attempt in later)
    assert len(tiny.curve()) == 18


def test_loop_of_crashes_ends_the_array(steps: TinyRun) -> None:
    """After three starts that saved nothing, the other array tasks are cancelled."""
    job = steps.submit("--array=1-9%1", ELEMENT_ARGS="--srun=--export=ALL,PYTHONHOME=/nowhere")
    steps.wait_for_end(job)
    log = steps.main_log()
    assert "ALERT" in log
    assert "3 starts in a row saved nothing after iteration 0" in log
    assert len(steps.attempts()) == 4
    assert f"the pending tasks of array {job} are cancelled: crash loop" in log
    assert not (steps.folder / "tiny-logs" / "logs" / "metrics.jsonl").exists()


def test_error_that_needs_a_person_ends_the_array(steps: TinyRun) -> None:
    job = steps.submit("--array=1-9%1", TWO_RANKS, MICRO_BATCH_SIZE="7")
    steps.wait_for_end(job)
    assert "ALERT" in steps.main_log()
    assert "an error that a person must fix: ConfigError" in steps.main_log()
    assert len(steps.attempts()) == 1


def test_next_array_task_resumes_and_kill_switch_ends_the_array(tiny: TinyRun) -> None:
    job = tiny.submit("--array=1-9%1", TWO_RANKS, TRAIN_SAMPLES="6400", EXIT_INTERVAL="100000")
    tiny.wait_for_line(SAVED, 1)
    # scancel --signal fails with code 229 for the task of an array here.
    number = tiny.cluster.run("squeue", "--noheader", "--format=%A", "--job", f"{job}_1").strip()
    os.kill(tiny.pids(number, "n2")[0], signal.SIGUSR1)
    tiny.wait_for_line("successfully loaded checkpoint")
    loaded = re.findall(r"successfully loaded .* at iteration +(\d+)", tiny.main_log())
    assert f"array task {job}_1 ended at iteration {loaded[0]}: left in order" in tiny.main_log()
    (tiny.folder / "kill-switch").touch()
    tiny.wait_for_end(job)
    assert "Detected kill switch" in tiny.main_log()
    assert [attempt["element"] for attempt in tiny.attempts()] == ["1", "2"]
    assert sorted(tiny.curve()) == list(range(1, max(tiny.curve()) + 1))
    again = tiny.submit("--array=1-9%1", TWO_RANKS)
    tiny.wait_for_end(again)
    assert "nothing starts until it is removed" in tiny.main_log()
    assert len(tiny.attempts()) == 3


@pytest.mark.full
def test_array_continues_after_a_rollback(tiny: TinyRun, pool: ProcessPool) -> None:
    """The steps of docs/operations.md give the same curve as the intervention without a cluster.

    They are: stop, roll back, skip bad data with another learning rate, and submit again.
    """
    job = tiny.submit("--array=1-4%1")
    tiny.wait_for_line("_2 ended at iteration 20")
    switch = tiny.folder / "kill-switch"
    switch.touch()
    tiny.wait_for_end(job)
    log = tiny.folder / "tiny-logs" / "logs" / "main_log.txt"
    chronicles = tiny.folder / "chronicles.md"
    request = ["--to", "10", "--skip", "13-14", "--lr", "5e-4", "--reason", "spike"]
    done = subprocess.run(
        [
            sys.executable,
            "tools/rollback.py",
            str(tiny.checkpoints),
            *request,
            f"--main-log={log}",
            f"--chronicles={chronicles}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    flags = next(
        line.strip()
        for line in done.stdout.splitlines()
        if line.strip().startswith("--skip-train-iteration-range")
    )
    switch.unlink()
    assert sorted(tiny.curve()) == list(range(1, 11))
    # Two array tasks, because the second one must keep the intervention.
    again = tiny.submit("--array=1-5%1", INTERVENTION_ARGS=flags, EXIT_INTERVAL="20")
    tiny.wait_for_end(again)
    text = tiny.main_log()
    assert "training is complete at iteration 40" in text
    assert f"the pending tasks of array {again} are cancelled" in text
    lines = re.findall(rf"array task {again}_(\d) (starts|ended at iteration \d+)", text)
    # The second task starts after the end of the first.
    assert lines == [
        ("1", "starts"),
        ("1", "ended at iteration 20"),
        ("2", "starts"),
        ("2", "ended at iteration 40"),
    ]
    assert "Skipped iterations 13 to 14" in tiny.main_log()
    iterations = [
        entry["iteration"]
        for entry in read_metrics(tiny.folder / "tiny-logs" / "logs" / "metrics.jsonl")
    ]
    assert iterations == [*range(1, 13), *range(15, 41)]
    assert "spike" in chronicles.read_text()
    # The same intervention without a cluster.
    arguments = plain_arguments(tiny.folder / "plain", EXIT_INTERVAL=10)
    succeed(pool.run(4, pretrain, arguments))
    succeed(pool.run(4, pretrain, [*arguments, *flags.split(), "--exit-interval", "100"]))
    entries = read_metrics(tiny.folder / "plain" / "tiny-logs" / "logs" / "metrics.jsonl")
    assert tiny.curve() == {
        entry["iteration"]: (entry["lm_loss"], entry["grad_norm"]) for entry in entries
    }


@pytest.mark.full
def test_run_saves_at_the_time_limit_of_the_job(tiny: TinyRun) -> None:
    """Slurm then sends SIGTERM, and waits KillWait for the end. It checks every 30 seconds."""
    job = tiny.submit(
        "--time=00:01:00", "--signal=B:CONT@1", TRAIN_SAMPLES="64000", EXIT_INTERVAL="100000"
    )
    tiny.wait_for_line(SAVED)
    tiny.wait_for_end(job)
    last = max(tiny.curve())
    assert "received a signal to stop" in tiny.main_log()
    assert f"{SAVED} {last:7d}" in tiny.main_log()


def test_cancelled_array_stays_cancelled(tiny: TinyRun) -> None:
    """The ranks end before they train, and nothing is requeued."""
    job = tiny.submit("--array=1-3%1")
    tiny.wait_for_line(f"array task {job}_1 starts")
    tiny.cluster.run("scancel", job)
    tiny.wait_for_end(job)
    tiny.wait_for_line("ended at iteration 0: ended by Slurm")
    assert len(tiny.attempts()) == 1


def test_job_without_a_signal_knows_that_it_was_cancelled(tiny: TinyRun) -> None:
    """srun may fail before Slurm's signal reaches the script. The script ignores it here."""
    program = tiny.folder / "job.py"
    program.write_text(
        "import os, signal, subprocess\n"
        "from megatron.extras.operations.slurm import client\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "before = client.is_ending()\n"
        "subprocess.run(['scancel', os.environ['SLURM_JOB_ID']], check=True)\n"
        "print('ending:', before, client.is_ending(), flush=True)\n"
    )
    output = tiny.folder / "job.out"
    job = tiny.cluster.run(
        "sbatch",
        "--job-name=tiny",
        f"--chdir={ROOT}",
        f"--output={output}",
        f"--wrap=exec {sys.executable} {program}",
        PYTHONPATH=str(ROOT),
    ).split()[-1]
    tiny.wait_for_end(job)
    assert "ending: False True" in output.read_text()


def test_node_check_that_all_nodes_fail_excludes_none(steps: TinyRun) -> None:
    job = steps.submit(
        "--array=1-3%1",
        TWO_RANKS,
        ELEMENT_ARGS=f"--check-nodes --disk {steps.folder}/nowhere --memory-gib 0.1",
    )
    steps.wait_for_end(job)
    assert "ALERT: the node check failed on 2 of 2 nodes" in steps.main_log()
    assert "is not used any more" not in steps.main_log()
    assert len(steps.attempts()) == 1


def test_unusable_save_folder_ends_the_array(steps: TinyRun) -> None:
    steps.checkpoints.write_text("a file")
    job = steps.submit("--array=1-3%1")
    steps.wait_for_end(job)
    assert re.search(rf"ALERT: array task {job}_1 cannot run: .*checkpoints", steps.main_log())
    assert steps.main_log().count("ALERT") == 1


@pytest.mark.full
def test_only_the_last_array_task_is_requeued(tiny: TinyRun) -> None:
    """Its job number is also that of the array, which would requeue the first array task too."""
    # The second array task trains until it is killed: 100 iterations take longer than the kill.
    job = tiny.submit(
        "--array=1-2%1",
        TRAIN_SAMPLES="6400",
        EXIT_INTERVAL="100",
        ELEMENT_ARGS="--max-restarts 0",
    )
    tiny.wait_for_line(f"array task {job}_2 starts")
    tiny.wait_for_line("successfully loaded checkpoint")
    os.kill(tiny.pids(job, "n2")[0], signal.SIGKILL)
    tiny.wait_for_end(job)
    assert f"job {job}_2 is requeued: crashed" in tiny.main_log()
    assert [(attempt["element"], attempt["restart"]) for attempt in tiny.attempts()] == [
        ("1", 0),
        ("2", 0),
        ("2", 1),
    ]
    assert max(tiny.curve()) == 200
