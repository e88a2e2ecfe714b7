"""Schedules of the batch size whose thresholds have no unit, at a launch and at a resume."""

from pathlib import Path

from training.runs import Runner, rewrite_config

STEPS = "--step-batch-size-schedule 0:2 12samples:4"
BARE = "--step-batch-size-schedule 0:2 12:4"


def make_old(folder: Path) -> None:
    """Give a checkpoint the schedule that earlier versions stored.

    It is one text, and its thresholds have no unit.
    """
    rewrite_config(folder, r"(step_batch_size_schedule: ).*", r'\1"0:2 12:4"')


def test_old_run_with_bare_thresholds_continues_in_samples(run: Runner, other: Runner) -> None:
    other(STEPS)
    sizes = [entry["global_batch_size"] for entry in other.metrics()]
    assert sizes == [2] * 6 + [4] * 4
    run(f"{STEPS} --exit-interval 4")
    make_old(run.folder / "global_step4")
    output = run(f"{BARE} --exit-interval 8")
    assert "'0:2 12:4' is read as '0:2 12samples:4'" in output
    output = run(BARE)  # from a checkpoint of this version
    assert "'0:2 12:4' is read as '0:2 12samples:4'" in output
    assert run.losses() == other.losses()


def test_bare_thresholds_are_refused_for_a_new_run(run: Runner) -> None:
    error = run.error(BARE)
    assert error.startswith("ConfigError")
    assert "'12:4' has no unit" in error
    assert "12tokens" in error
    assert "12samples" in error
    assert not (run.folder / "latest").exists()


def test_bare_thresholds_that_differ_from_the_checkpoints_are_refused(run: Runner) -> None:
    run(f"{STEPS} --exit-interval 4")
    assert "'16:4' has no unit" in run.error("--step-batch-size-schedule 0:2 16:4")
