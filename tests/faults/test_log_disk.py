"""A log that cannot be written: training goes on, ends with 0, and its checkpoint and numbers are those of any other run.

Real full disks (a tmpfs, /dev/full) and real pipes whose reader goes away.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import Job, Launch, NewJob
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_disk import Disk, disk, new_disk  # noqa: F401

from megatron.observe.report import Axes
from megatron.operations.cutting import find_events_cut

ROOT = Path(__file__).resolve().parents[2]
Curves = Callable[..., dict[int, tuple[float, float]]]
ITERATIONS = 10
LOST = re.compile(
    r"warning: (\d+) lines of standard output were lost before this one \(No space left on device\)"
)


def words(job: Job) -> list[str]:
    return [sys.executable, "pretrain_gpt.py", *job.argv]


def environment() -> dict[str, str]:
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launched}


def run(job: Job, **streams: Any) -> int:
    """Exit code of the program in an interpreter of its own, whose end counts, too."""
    return subprocess.run(
        words(job), cwd=ROOT, env=environment(), timeout=300, check=False, **streams
    ).returncode


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_full_disk_from_the_first_line(
    both: bool, new_job: NewJob, uninterrupted: Curves, tmp_path: Path
) -> None:
    """`> /dev/full`, and with `2>&1`; every later line fails, and so does the last flush of the interpreter."""
    job = new_job("job", "--save-interval 4")
    with open("/dev/full", "wb") as full, open(tmp_path / "err", "wb") as errors:
        assert run(job, stdout=full, stderr=full if both else errors) == 0, (
            tmp_path / "err"
        ).read_text()
    if not both:
        told = (tmp_path / "err").read_text()
        assert told.count("standard output cannot be written (No space left on device)") == 1
        assert "Traceback" not in told
        assert "Exception ignored" not in told
    assert job.curve() == uninterrupted("", ITERATIONS)
    job.check(ITERATIONS, saved=[4, 8, 10])


@pytest.mark.full
@pytest.mark.parametrize("gone", ["stdout", "stderr", "both"])
def test_a_reader_that_goes_away(
    gone: str, new_job: NewJob, uninterrupted: Curves, tmp_path: Path
) -> None:
    """`| head -3`: the reader takes three lines and ends; the other stream reports it once."""
    job = new_job("job", "--save-interval 4")
    kept = tmp_path / "kept"
    with open(kept, "wb") as other:
        streams = {
            name: subprocess.PIPE if gone in (name, "both") else other
            for name in ("stdout", "stderr")
        }
        if gone == "both":
            streams["stderr"] = subprocess.STDOUT
        process = subprocess.Popen(words(job), cwd=ROOT, env=environment(), **streams)  # type: ignore[call-overload]
        pipe = process.stderr if gone == "stderr" else process.stdout
        if gone != "stderr":
            for _ in range(3):
                assert pipe.readline()
        pipe.close()
        assert process.wait(300) == 0, kept.read_text()
    told = kept.read_text()
    if gone == "stdout":
        assert told.count("standard output cannot be written (Broken pipe)") == 1
    if gone == "stderr":
        assert "training is complete" in told
    assert "Traceback" not in told
    assert job.curve() == uninterrupted("", ITERATIONS)
    job.check(ITERATIONS, saved=[4, 8, 10])


def test_a_disk_that_fills_up_under_everything_that_is_written_beside_checkpoints(
    disk: Disk,  # noqa: F811
    new_job: NewJob,
    uninterrupted: Curves,
    tmp_path: Path,
) -> None:
    """Log, metrics, TensorBoard and emissions: reported, tried again, and told how much was lost when there is room."""
    pytest.importorskip("codecarbon")
    switch, records = tmp_path / "stop", disk.folder / "records"
    flags = "--train-iters 3000"
    beside = (
        f"--save-interval 1000 --kill-switch-path {switch} --tensorboard-dir {records}/tb --tensorboard-queue-size 5 "
        f"--codecarbon-dir {records}/codecarbon"
    )
    job = new_job("job", f"{flags} {beside}", metrics=records / "metrics.jsonl")
    launch = Launch(
        [*job.argv],
        1,
        disk.folder / "logs",
        constants={"megatron.observe.tensorboard._RETRY_SECONDS": 0.05},
    )
    job.launches.append(launch)
    log = disk.folder / "logs" / "rank_0.txt"
    launch.wait_for_line(" iteration ", times=5)
    with launch.frozen():
        disk.fill()
    size = [0, 0]

    def stands_still() -> bool:
        """No byte more in the log or the metrics since the last look, half a second ago."""
        now = [log.stat().st_size, (records / "metrics.jsonl").stat().st_size]
        still, size[:] = now == size, now
        return still

    launch.wait_for(stands_still, "a full disk", step=0.5)
    disk.make_room()
    launch.wait_for(lambda: LOST.search(launch.output()), "the line that tells what was lost")
    launch.wait_for_line(" iteration ", times=launch.output().count(" iteration ") + 5)
    switch.touch()
    assert launch.codes() == [0], launch.all_output()
    output = launch.output()
    lost = int(LOST.search(output)[1])  # type: ignore[index]
    shown = [int(found) for found in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)]
    assert lost > 0
    assert (
        shown[-1] - len(shown) >= lost - 4
    )  # warnings of the others were lost with the lines of iterations
    assert "Traceback" not in output
    assert "metrics are written to" in output
    last = shown[-1]
    job.check(last)
    whole = uninterrupted(flags, last)
    curve = job.curve()
    assert len(curve) < last
    assert all(whole[iteration] == values for iteration, values in curve.items())
    # No event is lost, none is torn, and TensorBoard's own reader sees all.
    (events,) = (records / "tb").iterdir()
    accumulator = EventAccumulator(str(records / "tb"), size_guidance={"scalars": 0})
    accumulator.Reload()
    steps = [scalar.step for scalar in accumulator.Scalars("lm-loss-training/lm loss")]
    assert steps == list(range(1, last + 1))
    assert (
        find_events_cut(
            events,
            Axes(
                iteration=last,
                consumed_samples=1 << 40,
                consumed_tokens=1 << 40,
                gigaflops_without_embeddings=1e18,
            ),
        ).unreadable
        == ()
    )
