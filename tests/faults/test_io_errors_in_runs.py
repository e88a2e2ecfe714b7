"""One I/O error at one call of rank 0: the log reports what is on the disk, and the run continues.

tests/checkpoint/test_io_errors.py covers all calls.
"""

import pytest
from faults.launches import NewJob, loaded_line, saved_lines
from faults.test_disk import failures

from megatron.checkpoint.folder import point_to

FLAGS = "--save-interval 4 --save-retry-interval 2 --keep-latest-checkpoints 2"


FULL = pytest.mark.full
CASES = [
    ("replace latest.new", [(4, 1)], True, "global_step4 is complete and stays"),
    pytest.param("rename global_step4.unfinished", [(4, 1)], False, "failed", marks=FULL),
    pytest.param("unlink no_checkpoint_yet", [], True, "next save tries again", marks=FULL),
    pytest.param("rename global_step4", [], True, "global_step4 could not be removed", marks=FULL),
]


@pytest.mark.parametrize(("call", "failed", "kept", "phrase"), CASES)
@pytest.mark.parametrize("mode", ["--async-save", pytest.param("", marks=FULL)])
def test_run_survives_one_io_error(
    mode: str, call: str, failed: list[tuple[int, int]], kept: bool, phrase: str, new_job: NewJob
) -> None:
    """One I/O error does not end the run, and the log reports its effect.

    `kept` tells whether the checkpoint of iteration 4 is reported as saved.
    """
    job = new_job("job", f"{FLAGS} {mode}", 1)
    output = job.succeed(io_error=(str(job.folder), call))
    assert "Input/output error" in output
    assert failures(output) == failed
    assert (4 in saved_lines(output)) == kept
    assert phrase in output
    job.check(10)
    assert len(job.names()) in (2, 3)  # 3: the last save could not remove one
    assert job.curve().keys() == set(range(1, 11))
    job.succeed("--train-iters 14")  # two more saves, at 12 and 14
    job.check(14, saved=[12, 14])
    assert not (job.folder / "no_checkpoint_yet").exists()


def test_new_start_counts_a_checkpoint_that_no_pointer_names(new_job: NewJob) -> None:
    """Retention removes it like any other, and keeps one that was rolled back."""
    job = new_job("job", "--save-interval 2 --keep-latest-checkpoints 2 --max-save-failures 1", 1)
    job.succeed("--exit-interval 2")
    error = job.fail("--exit-interval 6", io_error=(str(job.folder), "replace latest.new"))
    assert "global_step4 is complete and stays" in error
    assert job.names() == {"global_step2", "global_step4"}
    output = job.succeed("--save-interval 3 --exit-interval 6")
    assert loaded_line(output) == 2
    assert job.names() == {"global_step3", "global_step6"}
    point_to(job.folder, 3)
    job.succeed("--save-interval 4 --exit-interval 9")
    assert job.names() == {"global_step6", "global_step8", "global_step9"}
