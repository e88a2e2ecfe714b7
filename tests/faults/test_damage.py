"""Damaged checkpoint files and wrong pointers.

A run resumes from the newest valid checkpoint and logs a warning.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults.launches import Job, NewJob, loaded_line

from megatron.base.errors import DamagedError
from megatron.checkpoint.folder import (
    LATEST,
    LATEST_ITERATION,
    list_saved_iterations,
    read_pointed_iteration,
)
from megatron.checkpoint.manifest import read_manifest

# Each of the two ranks has a file that only it writes and reads, of more than one block.
FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 128 "
    "--untie-embeddings-and-output-weights --save-interval 2"
)


@dataclass(frozen=True)
class Base:
    """The run that each test damages a copy of."""

    folder: Path
    """Folder of a run with checkpoints at 2, 4 and 6."""
    curve: dict[int, tuple[float, float]]
    """Curve of an uninterrupted run with 10 iterations."""


@pytest.fixture(scope="module")
def base(corpus: str, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Base:
    root = tmp_path_factory.mktemp("damage")
    reference = Job(corpus, cache, root / "reference", root / "reference_logs", FLAGS, 2, None)
    reference.succeed("--save-interval 100")
    job = Job(corpus, cache, root / "run", root / "run_logs", FLAGS, 2, None)
    job.succeed("--exit-interval 6")
    job.check(6, saved=[2, 4, 6])
    for rank in range(2):
        assert (job.folder / f"global_step6/rank_0000{rank}.safetensors").stat().st_size > 4 << 20
    return Base(job.folder, reference.curve())


@pytest.fixture
def job(base: Base, new_job: NewJob) -> Job:
    made = new_job("job", FLAGS, 2)
    shutil.copytree(base.folder, made.folder)
    return made


def flip(path: Path, position: int) -> None:
    """Flip one bit of the byte at `position`, which counts from the end if it is negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte": lambda path: flip(path, 0),
    "header": lambda path: flip(path, 100),
    "first block": lambda path: flip(path, path.stat().st_size // 10),
    "middle": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": lambda path: flip(path, -1),
    "truncated by two bytes": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "truncated to half": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
    ),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "removed": Path.unlink,
}
FILES = (
    "rank_00000.safetensors",
    "rank_00001.safetensors",
    "index.json",
    "manifest.json",
    "config.yaml",
)
SHORT = {
    ("rank_00000.safetensors", "header"),
    ("rank_00001.safetensors", "last byte"),
    ("index.json", "middle"),
    ("manifest.json", "removed"),
    ("config.yaml", "empty"),
}
CASES = [
    pytest.param(file, damage, marks=() if (file, damage) in SHORT else pytest.mark.full)
    for file in FILES
    for damage in DAMAGES
]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_damaged_checkpoint_is_renamed_and_the_previous_one_is_used(
    file: str, damage: str, job: Job, base: Base
) -> None:
    DAMAGES[damage](job.folder / "global_step6" / file)
    kept = {path.name: path.read_bytes() for path in (job.folder / "global_step6").iterdir()}
    if file == "manifest.json" and damage == "removed":
        # Only the pointers show that there was another checkpoint.
        assert list_saved_iterations(job.folder) == [2, 4]
    output = job.succeed()
    assert loaded_line(output) == 4, output
    assert f"global_step6 is damaged: {file}" in output
    assert "renamed to global_step6.damaged" in output
    assert "resuming from global_step4" in output
    assert job.curve() == base.curve
    job.check(10, saved=[2, 4, 6, 8, 10])
    for iteration in (2, 4, 6, 8):
        job.verify(iteration)
    aside = job.folder / "global_step6.damaged"
    # The damaged files are kept for an analysis of the damage.
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == kept


@pytest.mark.parametrize(
    "file", ["rank_00001.safetensors", pytest.param("config.yaml", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "flags", ["--load-iteration 6", pytest.param("--no-load-fallback", marks=pytest.mark.full)]
)
def test_damage_is_an_error_if_no_fallback_is_allowed(file: str, flags: str, job: Job) -> None:
    flip(job.folder / "global_step6" / file, -1)
    before = job.snapshot()
    curve = job.curve()
    output = job.fail(flags)
    assert "CheckpointError" in output or "DamagedError" in output
    assert "global_step6" in output
    assert file in output.rpartition("Error:")[2]
    assert job.snapshot() == before  # nothing is renamed, no pointer moved, no lease left
    assert job.curve() == curve


@pytest.mark.parametrize("file", ["rank_00001.safetensors", "manifest.json"])
def test_no_valid_checkpoint_is_an_error_and_not_a_start_from_scratch(file: str, job: Job) -> None:
    for iteration in (2, 4, 6):
        DAMAGES["zeros"](job.folder / f"global_step{iteration}" / file)
    curve = job.curve()
    output = job.fail("--allow-fresh-start")
    error = output.rpartition("CheckpointError:")[2]
    for iteration in (2, 4, 6):
        assert f"global_step{iteration} is damaged: {file}" in error, output
    again = job.fail("--allow-fresh-start")
    assert "is damaged" in again.rpartition("CheckpointError:")[2]
    assert job.curve() == curve
    # Each checkpoint still exists, with its own or another name.
    assert len(job.names()) == 3


@pytest.mark.full
def test_two_damaged_checkpoints(job: Job, base: Base) -> None:
    """Two damaged checkpoints are skipped.

    The damage of one is in a small file. Only the rank that reads the other one finds its damage.
    """
    flip(job.folder / "global_step6" / "manifest.json", 50)
    flip(job.folder / "global_step4" / "rank_00001.safetensors", -1)
    output = job.succeed()
    assert loaded_line(output) == 2
    assert {"global_step4.damaged", "global_step6.damaged"} <= job.names()
    assert job.curve() == base.curve
    job.check(10, saved=[2, 4, 6, 8, 10])


def test_pointers_are_correct_as_soon_as_a_checkpoint_is_renamed(
    job: Job, base: Base, tmp_path: Path
) -> None:
    """The pointers are correct even if the launch that finds the damage ends right after that.

    It ends because its corpus is missing.
    """
    flip(job.folder / "global_step6" / "rank_00000.safetensors", -1)
    output = job.fail(f"--data-path {tmp_path / 'nowhere'}")
    assert "renamed to global_step6.damaged" in output
    assert "DataError" in output
    job.check(4, saved=[2, 4])
    output = job.succeed()
    assert "is damaged" not in output
    assert loaded_line(output) == 4
    assert job.curve() == base.curve


@pytest.mark.full
def test_second_damage_of_an_iteration_keeps_the_first_folder(job: Job, base: Base) -> None:
    for _ in range(2):
        flip(job.folder / "global_step6" / "rank_00000.safetensors", -1)
        assert loaded_line(job.succeed("--exit-interval 6")) == 4
    assert {"global_step6", "global_step6.damaged", "global_step6.damaged2"} <= job.names()
    assert {number: job.curve()[number] for number in range(1, 7)} == {
        number: base.curve[number] for number in range(1, 7)
    }


@pytest.mark.full
def test_every_flipped_bit_of_a_manifest_is_found(base: Base, tmp_path: Path) -> None:
    """Every flipped bit of a manifest is reported as damage, or does not change its meaning.

    An example of the latter is the exponent's "e" as a capital letter.
    """
    original = (base.folder / "global_step6/manifest.json").read_bytes()
    expected = read_manifest(base.folder / "global_step6")
    missed = []
    for position in range(len(original)):
        for bit in range(8):
            data = bytearray(original)
            data[position] ^= 1 << bit
            (tmp_path / "manifest.json").write_bytes(data)
            try:
                found = read_manifest(tmp_path)
            except DamagedError:
                continue
            except Exception as error:
                missed.append(f"byte {position}, bit {bit}: {type(error).__name__}: {error}")
                continue
            if found != expected:
                missed.append(f"byte {position}, bit {bit}: was taken for valid")
    assert not missed, "\n".join(missed[:20])


# -- pointers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latest", "number", "phrase"),
    [
        ("global_step99", "99", "global_step99, which is not a finished checkpoint"),
        pytest.param(
            "global_step99",
            None,
            "global_step99, which is not a finished checkpoint",
            marks=pytest.mark.full,
        ),
        (None, "99", "global_step99, which is not a finished checkpoint"),
        pytest.param(
            "global_step99",
            "6",
            "global_step99, which is not a finished checkpoint",
            marks=pytest.mark.full,
        ),
        ("six", "6", "holds 'six', which names no checkpoint"),
        pytest.param("", "6", "holds '', which names no checkpoint", marks=pytest.mark.full),
        pytest.param(
            "global_step6.damaged", "6", "which names no checkpoint", marks=pytest.mark.full
        ),
        ("../global_step6", "6", "which names no checkpoint"),
        pytest.param("\udcff\udcfe", "6", "which names no checkpoint", marks=pytest.mark.full),
        (None, "release", "holds 'release', which names no checkpoint"),
        (None, None, "give --allow-fresh-start"),
    ],
)
def test_pointer_without_a_checkpoint_is_an_error(
    latest: str | None, number: str | None, phrase: str, job: Job, new_job: NewJob
) -> None:
    # One rank is enough, because this error is found before the ranks join.
    one = new_job("one", "--save-interval 2", 1, folder=job.folder)
    for name, text in ((LATEST, latest), (LATEST_ITERATION, number)):
        if text is None:
            (job.folder / name).unlink()
        else:
            (job.folder / name).write_bytes(text.encode(errors="surrogateescape"))
    before = one.snapshot()
    curve = one.curve()
    output = one.fail()
    assert phrase in output
    assert "global_step6" in output  # the newest checkpoint that exists
    assert one.snapshot() == before
    assert one.curve() == curve


@pytest.mark.parametrize(
    ("latest", "number", "start"),
    [
        ("global_step4", "6", 4),
        pytest.param("global_step6", "4", 6, marks=pytest.mark.full),
        pytest.param("global_step6", "rubbish", 6, marks=pytest.mark.full),
    ],
)
def test_latest_decides_if_the_pointers_differ(
    latest: str, number: str, start: int, job: Job, base: Base
) -> None:
    (job.folder / LATEST).write_text(latest)
    (job.folder / LATEST_ITERATION).write_text(number)
    output = job.succeed()
    assert f"latest names {latest}" in output
    assert f"holds '{number}'" in output
    assert loaded_line(output) == start
    assert job.curve() == base.curve
    job.check(10, saved=[2, 4, 6, 8, 10])


@pytest.mark.full
@pytest.mark.parametrize("missing", [LATEST, LATEST_ITERATION])
def test_one_pointer_is_enough(missing: str, job: Job, base: Base) -> None:
    (job.folder / missing).unlink()
    assert loaded_line(job.succeed()) == 6
    assert job.curve() == base.curve
    job.check(10, saved=[2, 4, 6, 8, 10])


def test_pointer_moved_back_by_hand_keeps_later_checkpoints(job: Job, base: Base) -> None:
    """Checkpoints after a pointer that was moved back are named, and do not count as the newest.

    They are removed only when a save of their iteration replaces them.
    """
    (job.folder / LATEST).write_text("global_step2\n")  # an editor's newline
    (job.folder / LATEST_ITERATION).write_text("2\n")
    later = {
        name: data for name, data in job.snapshot().items() if name.startswith("global_step6/")
    }
    assert later
    keep = "--keep-latest-checkpoints 2"
    output = job.succeed(f"{keep} --exit-interval 4")
    assert loaded_line(output) == 2
    assert (
        "later than global_step2, from which this run starts: global_step4, global_step6" in output
    )
    assert "removed by" not in output
    job.check(4, saved=[2, 4, 6])
    assert {
        name: data for name, data in job.snapshot().items() if name.startswith("global_step6/")
    } == later
    output = job.succeed(f"{keep} --exit-interval 5")  # a save between them
    assert "later than global_step4, from which this run starts: global_step6" in output
    job.check(5, saved=[4, 5, 6])
    assert {
        name: data for name, data in job.snapshot().items() if name.startswith("global_step6/")
    } == later
    output = job.succeed(keep)
    assert job.curve() == base.curve
    job.check(10, saved=[8, 10])


@pytest.mark.full
def test_load_iteration_keeps_later_checkpoints(job: Job, base: Base) -> None:
    output = job.succeed("--load-iteration 2 --exit-interval 4 --keep-latest-checkpoints 1")
    assert loaded_line(output) == 2
    assert "global_step4, global_step6" in output
    job.check(4, saved=[4, 6])
    job.succeed()
    assert job.curve() == base.curve


# -- leftovers of an interrupted run -----------------------------------------------------------


def test_leftovers_are_removed_at_the_start(job: Job, base: Base) -> None:
    root = job.folder
    (root / "global_step8.unfinished").mkdir()
    (root / "global_step8.unfinished/rank_00000.safetensors").write_bytes(b"torn")
    (root / "global_step2").rename(root / "global_step2.deleting")
    (root / "global_step2.deleting/index.json").unlink()
    # An interruption after both renames of a replacement, and one between them.
    shutil.copytree(root / "global_step6", root / "global_step6.replaced")
    (root / "global_step4").rename(root / "global_step4.replaced")
    output = job.succeed("--exit-interval 7")
    assert loaded_line(output) == 6
    job.check(7, saved=[4, 6, 7])
    job.verify(4)
    assert {number: job.curve()[number] for number in range(1, 8)} == {
        number: base.curve[number] for number in range(1, 8)
    }


def test_replacement_interrupted_between_its_renames(job: Job, base: Base) -> None:
    """A checkpoint is found if its replacement was interrupted between the two renames.

    The pointers name a folder that still has its temporary name. A reader without the lease finds
    it too, and changes nothing.
    """
    (job.folder / "global_step6").rename(job.folder / "global_step6.replaced")
    (job.folder / "global_step6.unfinished").mkdir()
    before = job.snapshot()
    output = job.succeed("--eval-only --eval-iters 1")
    assert loaded_line(output) == 6
    assert job.snapshot() == before
    assert "global_step6.unfinished" in job.names()
    output = job.succeed()
    assert loaded_line(output) == 6
    assert "is damaged" not in output
    assert job.curve() == base.curve
    job.check(10, saved=[2, 4, 6, 8, 10])


@pytest.mark.full
def test_checkpoints_of_another_run_are_only_read(job: Job, new_job: NewJob) -> None:
    """Nothing is renamed, removed or changed in a --load folder that is not --save."""
    flip(job.folder / "global_step6" / "rank_00001.safetensors", -1)
    (job.folder / "global_step8.unfinished").mkdir()
    before = job.snapshot()
    names = job.names()
    other = new_job("other", FLAGS, 2)
    output = other.succeed(f"--load {job.folder}")
    assert "global_step6 is damaged: rank_00001.safetensors" in output
    assert "renamed to" not in output
    assert loaded_line(output) == 4
    assert job.snapshot() == before
    assert job.names() == names
    other.check(10, saved=[6, 8, 10])


@pytest.mark.full
def test_checkpoint_renamed_by_hand_is_reported(job: Job, base: Base) -> None:
    """A checkpoint of iteration 4 with the name of iteration 6 is not loaded as iteration 6."""
    shutil.rmtree(job.folder / "global_step6")
    shutil.copytree(job.folder / "global_step4", job.folder / "global_step6")
    assert json.loads((job.folder / "global_step6/manifest.json").read_text())["iteration"] == 4
    output = job.succeed()
    assert "it is the checkpoint of iteration 4, renamed" in output
    assert loaded_line(output) == 4
    assert job.curve() == base.curve
    assert read_pointed_iteration(job.folder) == 10


def test_run_falls_back_from_a_deeply_nested_manifest(new_job: NewJob) -> None:
    job = new_job("job", "--save-interval 2")
    job.succeed("--exit-interval 4")
    (job.folder / "global_step4" / "manifest.json").write_text("[" * 100_000)
    output = job.succeed("--exit-interval 6")
    assert loaded_line(output) == 2
    assert "is damaged" in output
    job.check(6)
