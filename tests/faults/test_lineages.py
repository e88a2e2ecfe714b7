"""Rollbacks leave checkpoints of a course that was given up: nothing falls back to them, counts them, or removes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_damage import flip
from launches import Job, NewJob

from megatron.checkpoint.folder import list_saved_iterations, point_to

EVERY_3 = "--train-iters 12 --save-interval 3"
ROLLED_BACK = f"{EVERY_3} --skip-train-iteration-range 5-7"


def roll_back(job: Job, to: int) -> None:
    """As an operator does it."""
    point_to(job.folder, to)


def test_a_course_that_was_given_up_is_not_fallen_back_to(new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 9")
    roll_back(job, 3)
    rolled = new_job("rolled", ROLLED_BACK, folder=job.folder, metrics=job.metrics_file)
    rolled.succeed("--exit-interval 7")
    assert list_saved_iterations(job.folder) == [3, 6, 7, 9]
    flip(job.folder / "global_step7" / "rank_00000.safetensors")
    output = rolled.succeed("--exit-interval 8")
    assert "going on from global_step3" in output
    assert sorted(rolled.curve()) == [1, 2, 3, 4, 8]  # 5 to 7 were never trained on


@pytest.mark.parametrize("file", ["manifest.json", "rank_00000.safetensors"])
def test_the_course_is_known_without_the_manifest(file: str, new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 9")
    roll_back(job, 3)
    rolled = new_job("rolled", ROLLED_BACK, folder=job.folder, metrics=job.metrics_file)
    rolled.succeed("--exit-interval 7")
    flip(job.folder / "global_step7" / file, position=200)
    assert "going on from global_step3" in rolled.succeed("--exit-interval 8")


def test_without_manifest_and_course_nothing_is_guessed(new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 9")
    flip(job.folder / "global_step9" / "manifest.json", position=200)
    (job.folder / "course.json").unlink()
    error = job.fail()
    assert (
        "which older ones the run came through cannot be read; there are: global_step3, global_step6"
        in error
    )
    roll_back(job, 6)
    job.succeed("--exit-interval 7")


def test_retention_leaves_what_is_of_another_course(new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 9")
    roll_back(job, 3)
    rolled = new_job(
        "rolled",
        f"{ROLLED_BACK} --keep-latest-checkpoints 2",
        folder=job.folder,
        metrics=job.metrics_file,
    )
    rolled.succeed("--exit-interval 7")
    assert list_saved_iterations(job.folder) == [3, 6, 7, 9]
    output = rolled.succeed("--exit-interval 10")
    assert "removed by --keep-latest-checkpoints: global_step3" in output
    assert list_saved_iterations(job.folder) == [6, 9, 10]  # 9 has been replaced by this course's
    rolled.succeed()
    assert list_saved_iterations(job.folder) == [6, 10, 12]


def test_checkpoints_that_a_jump_moved_are_kept(new_job: NewJob) -> None:
    job = new_job(
        "job", f"{EVERY_3} --skip-train-iteration-range 5-7 --save-at 6 --keep-latest-checkpoints 1"
    )
    job.succeed()
    assert list_saved_iterations(job.folder) == [7, 12]
    manifest = json.loads((job.folder / "global_step12" / "manifest.json").read_text())
    assert [[iteration, keep] for iteration, _, keep, _ in manifest["course"]] == [
        [7, True],
        [9, False],
    ]


def test_finetuning_over_its_source_is_refused(new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 3")
    before = job.snapshot()
    error = job.fail("--finetune")
    assert "--finetune would begin at iteration 0 over it" in error
    assert job.snapshot() == before


@pytest.mark.parametrize("flag", ["--finetune", "--eval-only --eval-iters 1 --split 80,20,0"])
def test_no_random_weights_where_some_were_asked_for(flag: str, new_job: NewJob) -> None:
    source, job = new_job("source", EVERY_3), new_job("job", EVERY_3)
    source.succeed("--exit-interval 3")
    error = job.fail(f"{flag} --load {source.folder.parent}/nowhere")
    assert "leads to no checkpoint" in error or "nothing to load" in error
    assert "is one checkpoint; give its run's folder" in job.fail(
        f"{flag} --load {source.folder}/global_step3"
    )


def test_the_first_checkpoint_is_found_without_pointers(new_job: NewJob) -> None:
    """Cut off between its name and the pointers."""
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 3")
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        (job.folder / name).unlink()
    (job.folder / "no_checkpoint_yet").touch()
    assert "at iteration 3" in job.succeed("--exit-interval 4")
    assert not (job.folder / "no_checkpoint_yet").exists()


def test_what_cannot_be_removed_stops_nothing(new_job: NewJob, tmp_path: Path) -> None:
    job = new_job("job", f"{EVERY_3} --keep-latest-checkpoints 1")
    job.succeed("--exit-interval 3")
    (job.folder / "global_step3").rename(tmp_path / "elsewhere")
    (job.folder / "global_step3").symlink_to(tmp_path / "elsewhere")
    job.succeed()
    assert list_saved_iterations(job.folder) == [12]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


@pytest.mark.parametrize("asynchronous", ["", "--async-save"])
def test_what_was_being_written_survives_a_training_error(
    asynchronous: str, new_job: NewJob
) -> None:
    job = new_job(
        "job",
        f"--train-iters 12 --save-interval 1 --lr 1e30 --clip-grad 0 --max-nan-iterations 1 {asynchronous}",
    )
    assert "not finite" in job.fail()
    last = max(list_saved_iterations(job.folder))
    job.check(last)


SAVE = """
import locale, sys, torch
from pathlib import Path
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, save_checkpoint
from megatron.parallel.shard import TensorShard
print(locale.getpreferredencoding(False))
root = Path(sys.argv[1])
text = "checkpoint: {save: k\\u00e9}"
save_checkpoint(root, CheckpointContents(1, None, {}, text), [TensorShard("weight", "w", (1,), (0,), torch.ones(1), True)])
print(open_checkpoint(root, 1).config_yaml == text)
"""


def test_the_locale_changes_no_byte(tmp_path: Path) -> None:
    """Python's own UTF-8 mode is off, as in an old locale on a cluster."""
    subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / "en_US.ISO-8859-1")],
        check=True,
    )
    environment = {
        **os.environ,
        "LOCPATH": str(tmp_path),
        "LC_ALL": "en_US.ISO-8859-1",
        "PYTHONUTF8": "0",
    }
    run = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["ISO-8859-1", "True"]
