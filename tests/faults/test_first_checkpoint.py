"""Before the first checkpoint there is nothing to lose: the same command begins again, and only then."""

import json
from collections.abc import Callable

from launches import Job


def test_a_run_that_died_before_its_first_checkpoint_begins_again(
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


def test_checkpoints_that_are_gone_are_no_fresh_start(new_job: Callable[..., Job]) -> None:
    """There was one: to begin at iteration 0 would be to lose it quietly."""
    job = new_job("job", "--train-iters 12")
    job.succeed("--exit-interval 4")
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        (job.folder / name).unlink()
    for name in job.names():
        (job.folder / name).rename(job.folder.parent / f"{job.folder.name}_{name}")
    assert "holds traces of a run" in job.fail()
    assert json.loads((job.metrics_file.read_text().splitlines())[-1])["iteration"] == 4
