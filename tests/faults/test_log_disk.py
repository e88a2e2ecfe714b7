"""A log that cannot be written does not change training, checkpoints or the exit code.

The tests use real full disks (a tmpfs, /dev/full) and real pipes whose reader ends.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.launches import Job, Launch, NewJob
from faults.test_disk import Disk, disk, new_disk  # noqa: F401
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.extras.operations.rollback.cutting import find_events_cut
from megatron.observe.report import Axes

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
    """Return the exit code of the program in its own interpreter."""
    return subprocess.run(
        words(job), cwd=ROOT, env=environment(), timeout=300, check=False, **streams
    ).returncode


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.full)])
def test_full_disk_from_the_first_line_on(
    both: bool, new_job: NewJob, uninterrupted: Curves, tmp_path: Path
) -> None:
    """A run with its output on /dev/full trains to the end and exits with 0.

    Every line fails, and so does the last flush of the interpreter. `both` adds `2>&1`.
    """
    job = new_job("job", "--save-interval 4")
    with open("/dev/full", "wb") as full, open(tmp_path / "err", "wb") as errors:
        assert run(job, stdout=full, stderr=full if both else errors) == 0, (
            tmp_path / "err"
        ).read_text()
    if not both:
        messages = (tmp_path / "err").read_text()
        assert messages.count("standard output cannot be written (No space left on device)") == 1
        assert "Traceback" not in messages
        assert "Exception ignored" not in messages
    assert job.curve() == uninterrupted("", ITERATIONS)
    job.check(ITERATIONS, saved=[4, 8, 10])


@pytest.mark.full
@pytest.mark.parametrize("gone", ["stdout", "stderr", "both"])
def test_reader_of_the_log_that_ends(
    gone: str, new_job: NewJob, uninterrupted: Curves, tmp_path: Path
) -> None:
    """A reader that ends, as `| head -3` does, is reported once on the other stream."""
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
    messages = kept.read_text()
    if gone == "stdout":
        assert messages.count("standard output cannot be written (Broken pipe)") == 1
    if gone == "stderr":
        assert "training is complete" in messages
    assert "Traceback" not in messages
    assert job.curve() == uninterrupted("", ITERATIONS)
    job.check(ITERATIONS, saved=[4, 8, 10])


def test_full_disk_for_everything_except_checkpoints(
    disk: Disk,  # noqa: F811
    new_job: NewJob,
    uninterrupted: Curves,
    tmp_path: Path,
) -> None:
    """A full disk for log, metrics, TensorBoard and emissions is reported and tried again.

    When there is room again, the number of lost lines is reported.
    """
    pytest.importorskip("codecarbon")
    switch = tmp_path / "stop"
    records = disk.folder / "records"
    flags = "--train-iters 3000"
    beside = (
        f"--save-interval 1000 --kill-switch-path {switch} --tensorboard-dir {records}/tb "
        f"--tensorboard-queue-size 5 --codecarbon-dir {records}/codecarbon"
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

    def has_stopped_growing() -> bool:
        """Return whether log and metrics have the same size as half a second ago."""
        now = [log.stat().st_size, (records / "metrics.jsonl").stat().st_size]
        same = now == size
        size[:] = now
        return same

    launch.wait_for(has_stopped_growing, "a full disk", step=0.5)
    disk.make_room()
    launch.wait_for(lambda: LOST.search(launch.output()), "the line that reports the loss")
    launch.wait_for_line(" iteration ", times=launch.output().count(" iteration ") + 5)
    switch.touch()
    assert launch.codes() == [0], launch.all_output()
    output = launch.output()
    lost = int(LOST.search(output)[1])  # type: ignore[index]
    shown = [int(found) for found in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)]
    assert lost > 0
    # Up to four of the lost lines are warnings of the other outputs.
    assert shown[-1] - len(shown) >= lost - 4
    assert "Traceback" not in output
    assert "metrics are written to" in output
    last = shown[-1]
    job.check(last)
    expected = uninterrupted(flags, last)
    curve = job.curve()
    assert len(curve) < last
    assert all(expected[iteration] == values for iteration, values in curve.items())
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
