"""An I/O error at each call of a save that changes the file system, one after the other.

Whatever fails: the pointers name a whole checkpoint, the message says what is on the disk, a later
save succeeds, and nothing that a later save should remove is left after two of them.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from failing_calls import FailingCalls

from megatron.checkpoint.folder import (
    LATEST,
    LATEST_ITERATION,
    STARTED_MARKER,
    find_stored_folder,
    list_saved_iterations,
    mark_started,
    read_pointer,
    remove_interrupted_leftovers,
    step_folder,
)
from megatron.checkpoint.lineage import read_lineage
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.checkpoint.start import find_start
from megatron.checkpoint.verification import verify
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError
from megatron.parallel.shard import TensorShard


class Run:
    """A run that has saved iterations 1 and 2 and keeps two; iteration 3 is there, too, of a course
    that was left."""

    def __init__(self, root: Path, *, asynchronous: bool) -> None:
        self.root, self.said, self.saved = root, list[str](), list[int]()
        lineage = read_lineage(read_manifest(step_folder(root, 2)))
        config = CheckpointConfig(
            keep_latest_checkpoints=2, max_save_failures=100, async_save=asynchronous
        )
        self._saver = Saver(
            root, config, say=self.said.append, saved=self.saved.append, lineage=lineage
        )

    def save(self, iteration: int) -> bool:
        """Return whether the run calls it saved."""
        save(self._saver, iteration)
        return self.saved[-1:] == [iteration]


def save(saver: Saver, iteration: int, who: str = "this run") -> None:
    tensor = torch.full((4,), float(iteration))
    contents = CheckpointContents(iteration, None, {"applied_steps": iteration, "who": who}, "")
    saver.begin(contents, [TensorShard("weight", "w", (4,), (0,), tensor, owner=True)])
    saver.complete()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("io_errors") / "before"
    root.mkdir()
    save(Saver(root), 3, "another")
    saver = Saver(root)
    for iteration in (1, 2):
        save(saver, iteration)
    mark_started(root)  # as if its removal had failed
    return root


def is_ours(root: Path, iteration: int) -> bool:
    try:
        return read_manifest(step_folder(root, iteration)).state["who"] == "this run"
    except CheckpointError:
        return False


def check_pointers(root: Path) -> int:
    """Both name a whole checkpoint; returns the one that a start takes."""
    pointer = read_pointer(root)
    assert pointer is not None
    other = int((root / LATEST_ITERATION).read_text())
    for iteration in {pointer.iteration, other}:
        assert verify(find_stored_folder(root, iteration)).damage == ()
    start = find_start(CheckpointConfig(load=str(root), save=str(root)))
    assert start.damaged == ()
    assert start.iteration == pointer.iteration
    return pointer.iteration


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


def walk(
    before: Path,
    tmp_path: Path,
    retry: int,
    fails: Callable[[int], Callable[[int, str], bool]],
    **how: bool,
) -> None:
    """Save iteration 3 with the errors of `fails(n)`, for each call n; then `retry`, 5 and 6
    without errors."""
    asynchronous = how.pop("asynchronous", False)
    outcomes = set()
    number, calls = 0, [""]
    while number <= len(calls):
        number += 1
        root = tmp_path / f"call_{number}"
        shutil.copytree(before, root)
        run = Run(root, asynchronous=asynchronous)
        calling = FailingCalls(root, fails(number), **how)
        with calling.installed():
            saved = run.save(3)
        calls = calling.calls
        at = calls[number - 1] if number <= len(calls) else "nothing failed"
        said = "\n".join(run.said)
        failed = re.findall(r"saving iteration (\d+) to .* failed", said)
        pointed = check_pointers(root)
        stays = "global_step3 is whole and stays" in said
        assert failed == ([] if saved else ["3"]), (at, said)
        assert pointed == (3 if saved else 2), (at, said)
        assert is_ours(root, 3) == (saved or stays), (at, said)
        outcomes.add((saved, stays, "Input/output error" in said))
        for iteration in (retry, 5, 6):
            assert run.save(iteration), (at, run.said)
            assert check_pointers(root) == iteration
        assert is_ours(root, 5), at
        another = (
            {"global_step3"} if (root / "global_step3").exists() and not is_ours(root, 3) else set()
        )
        assert names(root) - another == {
            "global_step5",
            "global_step6",
            "course.json",
            LATEST,
            LATEST_ITERATION,
        }, at
        assert list_saved_iterations(root) == sorted(
            {*(int(name[11:]) for name in another), 5, 6}
        ), at
        assert remove_interrupted_leftovers(root) == []
        shutil.rmtree(root)
    assert number > 30, calls
    # Before its name; between name and pointers; after the pointers; and once without an error.
    assert outcomes == {
        (False, False, True),
        (False, True, True),
        (True, False, True),
        (True, False, False),
    }


def only(number: int) -> Callable[[int, str], bool]:
    return lambda call, _: call == number


def from_on(number: int) -> Callable[[int, str], bool]:
    return lambda call, _: call >= number


@pytest.mark.parametrize("retry", [4, pytest.param(3, marks=pytest.mark.full)])
def test_an_error_at_each_call(retry: int, before: Path, tmp_path: Path) -> None:
    """`retry` 3: as at the end of a run, where the same iteration is tried again."""
    walk(before, tmp_path, retry, only)


@pytest.mark.full
@pytest.mark.parametrize("retry", [4, 3])
def test_an_error_after_each_call_took_effect(retry: int, before: Path, tmp_path: Path) -> None:
    walk(before, tmp_path, retry, only, late=True)


@pytest.mark.full
@pytest.mark.parametrize("retry", [4, 3])
def test_a_disk_that_fails_from_each_call_on(retry: int, before: Path, tmp_path: Path) -> None:
    walk(before, tmp_path, retry, from_on, asynchronous=retry == 4)


def test_a_mark_that_cannot_be_removed_is_no_failed_save(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(before, root)
    run = Run(root, asynchronous=False)
    with FailingCalls(root, lambda _, call: call == f"unlink {STARTED_MARKER}").installed():
        assert run.save(3)
        assert run.save(4)
    assert sum(STARTED_MARKER in line and "next save tries again" in line for line in run.said) == 2
    assert (root / STARTED_MARKER).exists()
    assert run.save(5)
    assert not (root / STARTED_MARKER).exists()


def test_what_is_left_of_a_replaced_checkpoint_never_gets_its_name_back(
    before: Path, tmp_path: Path
) -> None:
    """Its removal stops in the middle; meanwhile the checkpoint that replaced it is removed by
    retention."""
    root = tmp_path / "run"
    shutil.copytree(before, root)
    run = Run(root, asynchronous=False)
    removal = re.compile(r"(rmdir|unlink) global_step3\.replaced.+")
    with FailingCalls(root, lambda _, call: removal.match(call) is not None).installed():
        for iteration in (3, 4, 5, 6):
            assert run.save(iteration)
    assert list_saved_iterations(root) == [5, 6]
    assert run.save(7)
    assert {name for name in names(root) if name.startswith("global_step")} == {
        "global_step6",
        "global_step7",
    }
