"""Rollbacks leave checkpoints of an abandoned lineage.

No run falls back to them, and retention neither counts nor removes them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_damage import flip
from faults.launches import Job, NewJob

from megatron.checkpoint.folder import list_saved_iterations, point_to

EVERY_3 = "--train-iters 12 --save-interval 3"
ROLLED_BACK = f"{EVERY_3} --skip-train-iteration-range 5-7"


def roll_back(job: Job, to: int) -> None:
    """Point to an older checkpoint, as an operator does."""
    point_to(job.folder, to)


def test_no_fallback_to_an_abandoned_lineage(new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 9")
    roll_back(job, 3)
    rolled = new_job("rolled", ROLLED_BACK, folder=job.folder, metrics=job.metrics_file)
    rolled.succeed("--exit-interval 7")
    assert list_saved_iterations(job.folder) == [3, 6, 7, 9]
    flip(job.folder / "global_step7" / "rank_00000.safetensors")
    output = rolled.succeed("--exit-interval 8")
    assert "resuming from global_step3" in output
    assert sorted(rolled.curve()) == [1, 2, 3, 4, 8]  # 5 to 7 were never trained on


@pytest.mark.parametrize("file", ["manifest.json", "rank_00000.safetensors"])
def test_lineage_is_known_without_the_manifest(file: str, new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 9")
    roll_back(job, 3)
    rolled = new_job("rolled", ROLLED_BACK, folder=job.folder, metrics=job.metrics_file)
    rolled.succeed("--exit-interval 7")
    flip(job.folder / "global_step7" / file, position=200)
    assert "resuming from global_step3" in rolled.succeed("--exit-interval 8")


def test_missing_manifest_and_lineage_file_are_an_error(new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 9")
    flip(job.folder / "global_step9" / "manifest.json", position=200)
    (job.folder / "course.json").unlink()
    error = job.fail()
    assert "the lineage of this run cannot be read; there are: global_step3, global_step6" in error
    roll_back(job, 6)
    job.succeed("--exit-interval 7")


def test_retention_keeps_checkpoints_of_another_lineage(new_job: NewJob) -> None:
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
    assert list_saved_iterations(job.folder) == [6, 9, 10]  # 9 was replaced by that of this lineage
    rolled.succeed()
    assert list_saved_iterations(job.folder) == [6, 10, 12]


def test_save_at_in_a_skipped_range_is_kept(new_job: NewJob) -> None:
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


def test_finetuning_into_its_source_folder_is_refused(new_job: NewJob) -> None:
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 3")
    before = job.snapshot()
    error = job.fail("--finetune")
    assert "--finetune would start at iteration 0 and overwrite it" in error
    assert job.snapshot() == before


@pytest.mark.parametrize("flag", ["--finetune", "--eval-only --eval-iters 1 --split 80,20,0"])
def test_missing_checkpoint_does_not_start_with_random_weights(flag: str, new_job: NewJob) -> None:
    source = new_job("source", EVERY_3)
    job = new_job("job", EVERY_3)
    source.succeed("--exit-interval 3")
    error = job.fail(f"{flag} --load {source.folder.parent}/nowhere")
    assert "contains no checkpoint" in error or "nothing to load" in error
    assert "is a single checkpoint; give the folder of its run" in job.fail(
        f"{flag} --load {source.folder}/global_step3"
    )


def test_first_checkpoint_is_found_without_pointers(new_job: NewJob) -> None:
    """A first checkpoint is found if the run was killed before it wrote the pointers."""
    job = new_job("job", EVERY_3)
    job.succeed("--exit-interval 3")
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        (job.folder / name).unlink()
    (job.folder / "no_checkpoint_yet").touch()
    assert "at iteration 3" in job.succeed("--exit-interval 4")
    assert not (job.folder / "no_checkpoint_yet").exists()


def test_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    new_job: NewJob, tmp_path: Path
) -> None:
    job = new_job("job", f"{EVERY_3} --keep-latest-checkpoints 1")
    job.succeed("--exit-interval 3")
    (job.folder / "global_step3").rename(tmp_path / "elsewhere")
    (job.folder / "global_step3").symlink_to(tmp_path / "elsewhere")
    job.succeed()
    assert list_saved_iterations(job.folder) == [12]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


@pytest.mark.parametrize("asynchronous", ["", "--async-save"])
def test_save_in_progress_survives_a_training_error(asynchronous: str, new_job: NewJob) -> None:
    job = new_job(
        "job",
        "--train-iters 12 --save-interval 1 --lr 1e30 --clip-grad 0 --max-nan-iterations 1 "
        f"{asynchronous}",
    )
    assert "not finite" in job.fail()
    last = max(list_saved_iterations(job.folder))
    job.check(last)


TESTS = str(Path(__file__).resolve().parents[1])
SAVE = """
import locale, sys, torch
from pathlib import Path
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents
from megatron.parallel.shard import TensorShard
sys.path.insert(0, sys.argv[-1])
from saved_checkpoint import save_checkpoint
print(locale.getpreferredencoding(False))
root = Path(sys.argv[1])
text = "checkpoint: {save: k\\u00e9}"
shard = TensorShard("weight", "w", (1,), (0,), torch.ones(1), True)
save_checkpoint(root, CheckpointContents(1, None, {}, text), [shard])
print(open_checkpoint(root, 1).config_yaml == text)
"""


def test_locale_does_not_change_the_files(tmp_path: Path) -> None:
    """Files are UTF-8 in any locale.

    Python's UTF-8 mode is off, as in an old locale on a cluster.
    """
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
        [sys.executable, "-c", SAVE, str(tmp_path / "run"), TESTS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["ISO-8859-1", "True"]
