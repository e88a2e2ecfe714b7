"""Test an I/O error at each call of a save that changes the file system, one after the other.

Whichever call fails, the pointers name a complete checkpoint and the message describes what is on
the disk. A later save succeeds, also after a new start. After two of them, nothing is left that
they should remove.
"""

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from failing_calls import FailingCalls

from megatron.base.durable import replace_file
from megatron.base.errors import CheckpointError
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
from megatron.checkpoint.lineage import find_run_lineage
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.save import CheckpointContents, Saver, check_writable
from megatron.checkpoint.start import find_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.extras.interop.inspection.verification import verify
from megatron.parallel.shard import TensorShard


class Run:
    """A run that has saved iterations 1 and 2, and keeps two checkpoints.

    The folder also has iteration 3 of another lineage.
    """

    def __init__(self, root: Path, *, asynchronous: bool) -> None:
        self.root = root
        self.messages: list[str] = []
        self.saved: list[int] = []
        lineage = find_run_lineage(root, read_manifest(step_folder(root, 2)))
        config = CheckpointConfig(
            keep_latest_checkpoints=2, max_save_failures=100, async_save=asynchronous
        )
        self._saver = Saver(
            root, config, log=self.messages.append, saved=self.saved.append, lineage=lineage
        )

    def save(self, iteration: int) -> bool:
        """Save an iteration. Return whether the saver reports success."""
        save(self._saver, iteration)
        return self.saved[-1:] == [iteration]


def save(saver: Saver, iteration: int, who: str = "this run") -> None:
    """Save an iteration. Its state has the name of the run that saved it."""
    tensor = torch.full((4,), float(iteration))
    contents = CheckpointContents(iteration, None, {"applied_steps": iteration, "who": who}, "")
    saver.begin(contents, [TensorShard("weight", "w", (4,), (0,), tensor, owner=True)])
    saver.complete()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that has saved iterations 1 and 2, after another run saved iteration 3."""
    root = tmp_path_factory.mktemp("io_errors") / "before"
    root.mkdir()
    save(Saver(root), 3, "another")
    saver = Saver(root)
    for iteration in (1, 2):
        save(saver, iteration)
    # The marker exists as if its removal had failed.
    mark_started(root)
    return root


def is_ours(root: Path, iteration: int) -> bool:
    """Return whether this run has saved the checkpoint of an iteration."""
    try:
        return read_manifest(step_folder(root, iteration)).state["who"] == "this run"
    except CheckpointError:
        return False


def check_pointers(root: Path) -> int:
    """Check that both pointers name a complete checkpoint. Return the one that a start takes."""
    pointer = read_pointer(root)
    assert pointer is not None
    other = int((root / LATEST_ITERATION).read_text())
    for iteration in {pointer.iteration, other}:
        assert verify(find_stored_folder(root, iteration)).damage == ()
    start = find_start(CheckpointConfig(load=str(root), save=str(root)))
    assert start.damaged == ()
    assert start.iteration == pointer.iteration
    return pointer.iteration


def list_names(root: Path) -> set[str]:
    """Return the names of all entries of a folder."""
    return {entry.name for entry in root.iterdir()}


def check_later_saves(run: Run, retry: int, call: str) -> None:
    """Save without errors, and check that nothing superfluous is left.

    Args:
        run: The run, after its failed save of iteration 3.
        retry: The iteration that is saved next, before 5 and 6.
        call: The call that failed, for messages.
    """
    root = run.root
    for iteration in (retry, 5, 6):
        assert run.save(iteration), (call, run.messages)
        assert check_pointers(root) == iteration
    assert is_ours(root, 5), call
    expected = {"global_step5", "global_step6", "course.json", LATEST, LATEST_ITERATION}
    iterations = [5, 6]
    # Retention never removes a checkpoint of another lineage.
    if (root / "global_step3").exists() and not is_ours(root, 3):
        expected.add("global_step3")
        iterations.insert(0, 3)
    assert list_names(root) == expected, call
    assert list_saved_iterations(root) == iterations, call
    assert remove_interrupted_leftovers(root) == []


def fail_each_call(
    before: Path,
    tmp_path: Path,
    retry: int,
    fails: Callable[[int], Callable[[int, str], bool]],
    *,
    late: bool = False,
    asynchronous: bool = False,
) -> None:
    """Save iteration 3 with errors, once for each call that can fail. Check what is left.

    Args:
        before: The folder to start from. It is copied for each call.
        tmp_path: Folder of the copies.
        retry: The iteration that is saved next, without errors.
        fails: Return which calls fail in the attempt with this number.
        late: See `FailingCalls`.
        asynchronous: Save with --async-save.
    """
    outcomes = set()
    number = 0
    calls = [""]
    while number <= len(calls):
        number += 1
        root = tmp_path / f"call_{number}"
        shutil.copytree(before, root)
        run = Run(root, asynchronous=asynchronous)
        failing = FailingCalls(root, fails(number), late=late)
        with failing.installed():
            saved = run.save(3)
        calls = failing.calls
        call = "nothing failed"
        if number <= len(calls):
            call = calls[number - 1]
        messages = "\n".join(run.messages)
        failed = re.findall(r"saving iteration (\d+) to .* failed", messages)
        stays = "global_step3 is complete and stays" in messages
        assert failed == ([] if saved else ["3"]), (call, messages)
        assert check_pointers(root) == (3 if saved else 2), (call, messages)
        assert is_ours(root, 3) == (saved or stays), (call, messages)
        if stays and retry == 4:
            # A new start, which never saves iteration 3 again, removes it like any other.
            again = tmp_path / f"again_{number}"
            shutil.copytree(root, again)
            check_later_saves(Run(again, asynchronous=asynchronous), retry, call)
            shutil.rmtree(again)
        outcomes.add((saved, stays, "Input/output error" in messages))
        check_later_saves(run, retry, call)
        shutil.rmtree(root)
    assert number > 30, calls
    # (saved, complete without pointers, error). The call was before the rename, between rename and
    # pointers, or after the pointers. The last attempt has no error.
    assert outcomes == {
        (False, False, True),
        (False, True, True),
        (True, False, True),
        (True, False, False),
    }


def fail_one(number: int) -> Callable[[int, str], bool]:
    """Return a function that makes one call fail."""
    return lambda call, _: call == number


def fail_from(number: int) -> Callable[[int, str], bool]:
    """Return a function that makes a call and all later ones fail."""
    return lambda call, _: call >= number


@pytest.mark.parametrize("retry", [4, pytest.param(3, marks=pytest.mark.full)])
def test_error_at_each_call(retry: int, before: Path, tmp_path: Path) -> None:
    """The next save is of a later iteration, or of the same one as at the end of a run."""
    fail_each_call(before, tmp_path, retry, fail_one)


@pytest.mark.full
@pytest.mark.parametrize("retry", [4, 3])
def test_error_after_each_call_took_effect(retry: int, before: Path, tmp_path: Path) -> None:
    fail_each_call(before, tmp_path, retry, fail_one, late=True)


@pytest.mark.full
@pytest.mark.parametrize("retry", [4, 3])
def test_disk_that_fails_from_each_call_on(retry: int, before: Path, tmp_path: Path) -> None:
    fail_each_call(before, tmp_path, retry, fail_from, asynchronous=retry == 4)


def test_marker_that_cannot_be_removed_is_no_failed_save(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(before, root)
    run = Run(root, asynchronous=False)
    with FailingCalls(root, lambda _, call: call == f"unlink {STARTED_MARKER}").installed():
        assert run.save(3)
        assert run.save(4)
    warnings = [line for line in run.messages if STARTED_MARKER in line]
    assert len(warnings) == 2
    assert all("next save tries again" in line for line in warnings)
    assert (root / STARTED_MARKER).exists()
    assert run.save(5)
    assert not (root / STARTED_MARKER).exists()


def test_rest_of_a_replaced_checkpoint_never_gets_its_name_back(
    before: Path, tmp_path: Path
) -> None:
    """The removal of the replaced checkpoint fails in the middle, and retention removes the new."""
    root = tmp_path / "run"
    shutil.copytree(before, root)
    run = Run(root, asynchronous=False)
    removal = re.compile(r"(rmdir|unlink) global_step3\.replaced.+")
    with FailingCalls(root, lambda _, call: removal.match(call) is not None).installed():
        for iteration in (3, 4, 5, 6):
            assert run.save(iteration)
    assert list_saved_iterations(root) == [5, 6]
    assert run.save(7)
    folders = {name for name in list_names(root) if name.startswith("global_step")}
    assert folders == {"global_step6", "global_step7"}


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_failed_replacement_leaves_no_temporary_file(call: str, tmp_path: Path) -> None:
    """The old text stays, and the first error is the one that is raised."""
    path = tmp_path / "latest"
    path.write_text("old")
    failing = FailingCalls(tmp_path, lambda _, description: description.startswith(call))
    with failing.installed(), pytest.raises(OSError) as failed:
        replace_file(path, "new")
    assert failed.value.errno == errno.EIO
    assert path.read_text() == "old"
    assert list_names(tmp_path) == {"latest"}


def test_folder_that_cannot_be_written_is_left_empty(tmp_path: Path) -> None:
    failing = FailingCalls(tmp_path, lambda _, call: call.startswith("replace"))
    with failing.installed(), pytest.raises(CheckpointError, match="cannot be written"):
        check_writable(tmp_path)
    assert list_names(tmp_path) == set()
