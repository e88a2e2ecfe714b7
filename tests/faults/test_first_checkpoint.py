"""A run without any checkpoint yet starts again with the same command, and only such a run."""

import json
from collections.abc import Callable

from faults.launches import Job


def test_run_killed_before_its_first_checkpoint_starts_again(
    new_job: Callable[..., Job],
) -> None:
    job = new_job("job", "--train-iters 12")
    launch = job.launch("--train-iters 3000")
    launch.wait_for_line("iteration        2/")
    launch.kill()
    assert job.curve()
    assert not job.names()
    output = job.succeed()
    assert "Unable to find latest file" in output
    assert sorted(job.curve()) == list(range(1, 13))


def test_missing_checkpoints_are_an_error_and_not_a_start_from_scratch(
    new_job: Callable[..., Job],
) -> None:
    """A run whose checkpoints are missing does not start from scratch without a word."""
    job = new_job("job", "--train-iters 12")
    job.succeed("--exit-interval 4")
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        (job.folder / name).unlink()
    for name in job.names():
        (job.folder / name).rename(job.folder.parent / f"{job.folder.name}_{name}")
    assert "holds traces of a run" in job.fail()
    assert json.loads((job.metrics_file.read_text().splitlines())[-1])["iteration"] == 4
