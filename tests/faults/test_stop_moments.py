"""A signal to stop at any moment of a run that evaluates, exports and saves.

All ranks end together, soon after the signal and with a checkpoint of everything that was trained.
The same command resumes the run, whose numbers equal those of an uninterrupted one.
"""

import os
import random
import signal
import time
from typing import Any

import pytest
from faults.launches import Job, Launch, NewJob, saved_lines

from megatron.observe.metrics import read_metrics

SECONDS = 5.0
"""The longest time from a signal to the end of all processes, besides that of the save."""
SAVE_SECONDS = 1.0
"""The longest time of a save."""
MOMENTS = 30
EVALUATING = "--split 8,1,1 --log-interval 1 --num-layers 3 --train-iters"
ENDLESS = f"{EVALUATING} 300000 --eval-interval 5 --eval-iters 20 --save-interval 15"
SHORT = f"{EVALUATING} 6 --eval-interval 3 --eval-iters 100 --pipeline-model-parallel-size 3"
EXPORTING = (
    "--hf-export-interval 15 --position-embedding-type rotary --normalization RMSNorm "
    "--glu-activation swiglu --no-add-bias-linear --untie-embeddings-and-output-weights"
)
NO_EXPORT = "--hf-export-interval 1000"
"""The last launch would wait for its exports, which take long on a busy machine."""
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


def hang_in_read(rank: int) -> None:
    """Let the last rank's second read of training data hang, as a file system may."""
    from megatron.data.indexed_source import IndexedSource

    fill = IndexedSource.fill
    reads = 0

    def hang(self: IndexedSource, positions: Any, samples: Any) -> None:
        nonlocal reads
        reads += 1
        if reads == 4 and rank == int(os.environ["WORLD_SIZE"]) - 1:
            print("the read hangs", flush=True)
            time.sleep(600)
        fill(self, positions, samples)

    IndexedSource.fill = hang  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_read_that_hangs_does_not_keep_a_run_from_ending(ranks: int, new_job: NewJob) -> None:
    job = new_job("job", "--train-iters 300000", ranks)
    launch = job.launch(prepare=hang_in_read)
    launch.wait_for(lambda: "the read hangs" in launch.output(ranks - 1), "the read")
    launch.wait_for_line("iteration        3/")
    time.sleep(0.5)
    assert stop(launch, 0) < SECONDS + 1.0
    assert saved_lines(launch.output()) == [3]
    job.succeed("--exit-interval 6")
    job.check(6)


def interrupt_often(job: Job, moments: int, seed: int) -> list[float]:
    """Stop launches at random moments. Return how long each one took to end, without its saves."""
    chance = random.Random(seed)
    spent = []
    for number in range(moments):
        launch = job.launch()
        # Before its first line, a rank may not have met the others, and the signal ends it alone.
        launch.wait_for_line("\n")
        # The first of two moments is mostly in the start, and the second one in an evaluation.
        time.sleep(chance.uniform(0, 1.0) if number % 2 else chance.uniform(1.0, 4.0))
        assert len(launch.running()) == job.ranks, launch.all_output()
        reached = launch.output().strip().splitlines()[-1][:60]
        seconds = stop(launch, chance.choice([None, *range(job.ranks)]))
        output = launch.output()
        spent.append(seconds - SAVE_SECONDS * len(saved_lines(output)))
        assert spent[-1] < SECONDS, launch.all_output()
        assert "Error" not in launch.all_output(), launch.all_output()
        print(f"signal {number + 1}: {seconds:.2f} s, {saved_lines(output)} saved, at: {reached}")
    return spent


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "flags"), [(1, ""), (3, THREE_STAGES)])
def test_numbers_do_not_change(ranks: int, flags: str, new_job: NewJob) -> None:
    flags = f"{ENDLESS} {EXPORTING} {flags}"
    job = new_job("job", flags, ranks)
    spent = interrupt_often(job, MOMENTS, seed=ranks)
    trained = max(job.curve())
    # The last signal may have interrupted an evaluation, so both runs end after another one.
    end = f"--exit-interval {5 * (trained // 5 + 1)} {NO_EXPORT}"
    assert job.succeed(end).startswith("this run resumes at iteration")
    reference = new_job("reference", flags, ranks)
    reference.succeed(end)
    numbers = read_numbers(reference)
    assert read_numbers(job) == numbers
    assert sum(validation is not None for _, _, validation in numbers.values()) >= 5
    print(f"{ranks} ranks, {len(spent)} signals: at most {max(spent):.2f} s; {trained} iterations")


def test_one_rank_of_three_stages_stops_an_evaluation_and_a_start(new_job: NewJob) -> None:
    reference = new_job("reference", SHORT, 3)
    reference.succeed()
    job = new_job("job", SHORT, 3)
    launch = job.launch()
    launch.wait_for_line("iteration        3/")
    # The evaluation of iteration 3 follows.
    time.sleep(0.1)
    assert stop(launch, 1) < SECONDS + 1.0
    assert "a signal interrupts the validation" in launch.output()
    assert saved_lines(launch.output()) == [3]
    launch = job.launch()
    launch.wait_for_line("this run resumes at iteration 3")
    assert stop(launch, 2) < SECONDS
    assert "iteration        4/" not in launch.output()
    job.succeed()
    assert read_numbers(job) == read_numbers(reference)
