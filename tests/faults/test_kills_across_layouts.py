"""Tests that a run loses nothing when it is killed and resumes with copies of the model or without.

Every launch has another number of ranks, shards and copies than the one before.
"""

import pytest
from faults.launches import NewJob, loaded_line, saved_lines

BATCH = "--global-batch-size 12 --micro-batch-size 1"
FLAGS = (
    f"--num-layers 2 --train-iters 30 --save-interval 2 --keep-latest-checkpoints 2 {BATCH} "
    "--async-save"
)
HSDP = "--sharding-strategy hsdp --hsdp-shard-size 2"
LAUNCHES = (
    (4, HSDP),
    (3, "--sharding-strategy fsdp"),
    (2, "--sharding-strategy ddp"),
    (8, f"--pipeline-model-parallel-size 2 {HSDP}"),
)
"""Ranks and flags of each launch. The 3 ranks divide the rows unevenly."""
BOUND = 1e-5


@pytest.mark.full
def test_kills_between_strategies_lose_nothing(new_job: NewJob) -> None:
    alone = new_job("alone", f"{FLAGS} --save-interval 100", 1)
    alone.succeed()
    expected = alone.curve()
    job = new_job("job", FLAGS, 1)
    safe = 0
    for number, (ranks, flags) in enumerate(LAUNCHES):
        job.ranks = ranks
        if number == len(LAUNCHES) - 1:
            output = job.succeed(flags)
        else:
            launch = job.launch(flags)
            launch.wait_for_line("successfully saved checkpoint")
            # A rank of the second copy is the first to go.
            killed = launch.kill([ranks - 1])
            launch.codes(by_themselves=True)
            assert killed == [ranks - 1]
            output = launch.output()
        if number:
            assert loaded_line(output) >= safe > 0, output
        safe = max([safe, *saved_lines(output)])
    found = job.curve()
    assert sorted(found) == sorted(expected) == list(range(1, 31))
    for iteration, measures in found.items():
        assert measures == pytest.approx(expected[iteration], rel=BOUND)
    job.check(30)
