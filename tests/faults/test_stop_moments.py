"""A signal to stop at any moment of a run that evaluates, exports and saves.

All ranks end together, soon after the signal and with a checkpoint of everything that was trained.
The same command resumes the run, whose numbers equal those of an uninterrupted one.
"""

import os
import random
import signal
import time

import pytest
from faults.launches import Job, Launch, NewJob, saved_lines

from megatron.observe.metrics import read_metrics

SECONDS = 5.0
"""The longest time from a signal to the end of all processes, besides that of the save."""
LENGTH = 40
EVALUATING = (
    f"--train-iters {LENGTH} --num-layers 3 --split 8,1,1 --eval-interval 5 --eval-iters 40 "
    "--save-interval 15 --log-interval 1"
)
EXPORTING = (
    "--hf-export-interval 15 --position-embedding-type rotary --normalization RMSNorm "
    "--glu-activation swiglu --no-add-bias-linear --untie-embeddings-and-output-weights"
)
THREE_STAGES = "--pipeline-model-parallel-size 3 --micro-batch-size 1"


def read_numbers(job: Job) -> dict[int, tuple[object, ...]]:
    """Return iteration -> loss, gradient norm and validation of a run."""
    numbers: dict[int, tuple[object, ...]] = {}
    for entry in read_metrics(job.metrics_file):
        found = (entry["lm_loss"], entry["grad_norm"], entry.get("validation"))
        numbers[entry["iteration"]] = found
    return numbers


def stop(launch: Launch, rank: int | None) -> float:
    """Send SIGTERM to one rank or to all, and return the seconds until all have ended."""
    start = time.monotonic()
    for chosen in launch.running() if rank is None else [rank]:
        os.kill(launch.pids[chosen], signal.SIGTERM)
    assert launch.codes(by_themselves=True) == [0] * len(launch.pids), launch.all_output()
    return time.monotonic() - start


def interrupt_until_complete(job: Job, moments: int, seed: int) -> list[str]:
    """Stop launches at random moments, and complete the run. Return the logs of all launches."""
    chance = random.Random(seed)
    logs = []
    for number in range(moments):
        launch = job.launch()
        # Before its first line, a rank may not have met the others, and the signal ends it alone.
        launch.wait_for(lambda: launch.output(), "a line of the log")
        # The first of two moments is in the start, and the second one mostly in an evaluation.
        time.sleep(chance.uniform(0, 1.0) if number % 2 else chance.uniform(1.0, 4.0))
        if not launch.running():
            break
        seconds = stop(launch, chance.choice([None, *range(job.ranks)]))
        logs.append(launch.output())
        assert seconds < SECONDS + 1.0 * len(saved_lines(launch.output())), launch.all_output()
        assert "Error" not in launch.all_output(), launch.all_output()
    logs.append(job.succeed())
    return logs


@pytest.mark.parametrize(
    ("ranks", "flags", "moments"),
    [
        (2, "--pipeline-model-parallel-size 2 --num-layers 2 --micro-batch-size 1", 3),
        pytest.param(1, EXPORTING, 30, marks=pytest.mark.full),
        pytest.param(3, f"{EXPORTING} {THREE_STAGES}", 30, marks=pytest.mark.full),
    ],
)
def test_numbers_do_not_change(ranks: int, flags: str, moments: int, new_job: NewJob) -> None:
    flags = f"{EVALUATING} {flags}"
    reference = new_job("reference", flags, ranks)
    reference.succeed()
    job = new_job("job", flags, ranks)
    logs = interrupt_until_complete(job, moments, seed=ranks)
    assert read_numbers(job) == read_numbers(reference)
    assert logs[-1].startswith("this run resumes at iteration")
