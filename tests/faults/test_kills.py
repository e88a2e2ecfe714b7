"""A run that is killed repeatedly ends with the same curve as an uninterrupted run.

Kills happen at random times, and hit all ranks or one. After each kill the pointers must name a
valid checkpoint that is at least as new as the last one that was reported as saved. The same
command must resume from it.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.launches import BOUND_SECONDS, Job, Launch, NewJob, loaded_line, saved_lines

from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--train-iters 12 --save-interval 2 --keep-latest-checkpoints 2 --num-layers 2"
LAYOUTS = (
    (2, ""),
    (2, "--pipeline-model-parallel-size 2"),
    (2, "--tensor-model-parallel-size 2"),
    (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    (4, "--sharding-strategy hsdp --hsdp-shard-size 2 --micro-batch-size 1"),
)
ATTEMPTS = 40
SHORT = (0, 3, 4)
"""The seeds of the short suite: ranks that share nothing else, four in both directions, copies."""
SEEDS = [
    seed if seed in SHORT else pytest.param(seed, marks=pytest.mark.full) for seed in range(30)
]
_references: dict[int, tuple[dict[int, tuple[float, float]], float]] = {}


def uninterrupted(new_job: NewJob, layout: int) -> tuple[dict[int, tuple[float, float]], float]:
    """Return the curve and the seconds of a run without kills, trained once for each layout."""
    if layout not in _references:
        ranks, flags = LAYOUTS[layout]
        job = new_job(f"reference_{layout}", f"{FLAGS} {flags} --save-interval 100", ranks)
        start = time.monotonic()
        job.succeed()
        curve = job.curve()
        assert sorted(curve) == list(range(1, 13))
        _references[layout] = curve, time.monotonic() - start
    return _references[layout]


def wait_for_random_event(chance: random.Random, job: Job, launch: Launch, seconds: float) -> str:
    """Wait for a random event of a launch, and return a description of it."""
    kind = chance.choice(
        ("any", "any", "iteration", "unfinished", "unfinished", "renamed", "pointer")
    )
    before = marks(job)
    before_lines = lines(job)
    delay = chance.choice((0.0, chance.uniform(0, 0.005), chance.uniform(0, 0.2)))
    if kind == "any":
        delay = chance.uniform(0, seconds)
    iterations = chance.randint(1, 9)
    pointers = chance.randint(1, 3)
    seen = {before["latest"]}
    while kind != "any" and launch.running():
        now = marks(job)
        seen.add(now["latest"])
        if kind == "iteration" and lines(job) > before_lines + iterations:
            break
        if kind == "unfinished" and any(
            name.endswith(".unfinished") for name in now["names"] - before["names"]
        ):
            break
        if kind == "renamed" and any(
            name.endswith((".deleting", ".replaced")) for name in now["names"] - before["names"]
        ):
            break
        if kind == "pointer" and len(seen) > pointers:
            break
        time.sleep(0.0005)
    time.sleep(delay)
    return f"{kind} + {1000 * delay:.1f} ms"


def marks(job: Job) -> dict:
    """Return the names in a job's folder and its pointer, as far as they exist."""
    names: set[str] = set()
    latest = ""
    with contextlib.suppress(OSError):
        names = {entry.name for entry in os.scandir(job.folder)}
        latest = (job.folder / "latest").read_text()
    return {"names": names, "latest": latest}


def lines(job: Job) -> int:
    """Return the number of lines in a job's metrics file."""
    return job.metrics_file.read_bytes().count(b"\n") if job.metrics_file.exists() else 0


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_lose_nothing(seed: int, new_job: NewJob) -> None:
    chance = random.Random(seed)
    layout = seed % len(LAYOUTS)
    ranks, flags = LAYOUTS[layout]
    expected, seconds = uninterrupted(new_job, layout)
    asynchronous = "--async-save" if seed // 2 % 2 else ""
    job = new_job("killed", f"{FLAGS} {flags} {asynchronous}", ranks)
    wanted = chance.randint(1, 2 if seed in SHORT else 4)
    kills = 0
    safe = 0
    for _ in range(ATTEMPTS):
        lines_before = lines(job)
        launch = job.launch()
        event = wait_for_random_event(chance, job, launch, seconds)
        victims = chance.choice((list(range(ranks)), [chance.randrange(ranks)]))
        killed = launch.kill(victims)
        context = f"seed {seed}, killed ranks {killed} at {event}"
        if lines(job) == lines_before:
            # During a start the others may wait for the killed rank as long as for a slow one.
            launch.kill()
        codes = launch.codes(by_themselves=True)
        assert not killed or any(code != 0 for code in codes), f"{context}: {codes}"
        safe = check_after_kill(job, launch, safe, context)
        if killed:
            kills += 1
        else:
            # The run had ended before the kill.
            assert job.curve() == expected, context
            job.clear()
            safe = 0
        if kills == wanted:
            break
    assert kills == wanted
    output = job.succeed()
    assert loaded_line(output) >= safe, output
    assert job.curve() == expected
    job.check(12)
    # A kill between the last update of the pointers and the removal leaves one checkpoint more. No
    # later save removes it.
    assert list_saved_iterations(job.folder) in ([10, 12], [8, 10, 12])


def check_after_kill(job: Job, launch: Launch, safe: int, context: str) -> int:
    """Check the folder and the log of a launch after a kill.

    `safe` is the newest iteration that an earlier launch reported as saved. Return the newest one
    of all launches so far.
    """
    output = launch.output()
    if "iteration        " in output:
        assert loaded_line(output) >= safe, f"{context}: iteration {safe} was safe\n{output}"
    assert "is damaged" not in output, f"{context}\n{output}"
    safe = max([safe, *saved_lines(output)])
    pointed = None
    if (job.folder / "latest").exists():
        pointed = read_pointed_iteration(job.folder)
        assert pointed is not None
        job.verify(pointed)
    assert (pointed or 0) >= safe, (
        f"{context}: iteration {safe} was safe, the pointers name {pointed}\n{output}"
    )
    return safe


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_other_ranks_end_when_one_rank_is_killed(victim: int, new_job: NewJob) -> None:
    """The other ranks end by themselves with an error, and the next start waits for no lease."""
    job = new_job(
        "job", "--train-iters 3000 --save-interval 2 --keep-latest-checkpoints 2 --async-save", 2
    )
    for _ in range(2):
        launch = job.launch()
        launch.wait_for_line("successfully saved checkpoint", times=2)
        assert launch.kill([victim]) == [victim]
        codes = launch.codes(by_themselves=True)
        assert codes[1 - victim] not in (0, None), launch.all_output()
    pointed = read_pointed_iteration(job.folder)
    assert pointed is not None
    output = job.succeed(f"--exit-interval {pointed + 3}")
    assert loaded_line(output) > 0
    assert "waiting" not in output
    # Rank 0 holds the lease.
    assert ("gone; this run takes the folder over" in output) == (victim == 0)


@pytest.mark.full
def test_separate_programs_end_when_one_is_killed(corpus: str, tmp_path: Path) -> None:
    """A `python pretrain_gpt.py` without a launcher ends when the other rank is killed."""
    from process_pool import find_free_port

    folder = tmp_path / "run"
    job = Job(
        corpus,
        tmp_path / "cache",
        folder,
        tmp_path / "logs",
        "--train-iters 3000 --save-interval 2 --async-save",
        2,
        None,
    )
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    try:
        for rank in range(2):
            own = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(tmp_path / f"{rank}.txt", "wb") as log:
                command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *job.argv]
                ranks.append(
                    subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT)
                )
        end = time.monotonic() + BOUND_SECONDS
        while not (folder / "latest").exists():
            assert ranks[0].poll() is None, (tmp_path / "0.txt").read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        ranks[1].kill()
        assert ranks[0].wait(BOUND_SECONDS) != 0
        saved = read_pointed_iteration(folder)
        assert saved is not None
        job.verify(saved)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
