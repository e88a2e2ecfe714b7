"""Test saves in the background, and how failed saves are counted, reported and tried again."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.base.errors import CheckpointError
from megatron.checkpoint import stages
from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.shard import TensorShard


def make_shard(tensor: torch.Tensor) -> TensorShard:
    """Return a shard that is a complete tensor."""
    return TensorShard("weight", "w", tuple(tensor.shape), (0,) * tensor.dim(), tensor, owner=True)


def load_tensor(root: Path, iteration: int, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a checkpoint holds. It has the shape of `like`."""
    target = torch.empty_like(like)
    open_checkpoint(root, iteration).load_into([make_shard(target)])
    return target


def poll_until_done(saver: Saver) -> int:
    """Poll until the save is done, as the training loop does. Return the number of polls."""
    for polls in range(10_000):
        if not saver.in_flight:
            return polls
        time.sleep(0.01)
        saver.poll(0, 0, stage_is_done=not saver.is_working)
    raise AssertionError("the save never ends")


def test_background_save_holds_the_state_at_its_start(tmp_path: Path) -> None:
    saved: list[int] = []
    saver = Saver(
        tmp_path, CheckpointConfig(async_save=True, keep_latest_checkpoints=3), saved=saved.append
    )
    tensor = torch.randn(3000, 1000)
    for iteration in (1, 2):
        before = tensor.clone()
        saver.begin(CheckpointContents(iteration, None, {}, ""), [make_shard(tensor)])
        assert saver.in_flight
        assert iteration not in saved
        saver.wait_for_copy()
        # This is what the next step does.
        tensor.add_(1.0)
        assert poll_until_done(saver) > 0
        assert saved[-1] == iteration
        assert saver.saved_iteration == iteration
        assert torch.equal(load_tensor(tmp_path, iteration, tensor), before)


def test_second_save_waits_for_the_first_and_reports_it(tmp_path: Path) -> None:
    messages: list[str] = []
    saver = Saver(tmp_path, CheckpointConfig(async_save=True), log=messages.append)
    tensor = torch.ones(2000, 1000)
    for iteration in (1, 2):
        saver.begin(CheckpointContents(iteration, None, {}, ""), [make_shard(tensor)])
    saver.complete()
    assert list_saved_iterations(tmp_path) == [1, 2]
    assert any("the save of iteration 1 is still in progress" in line for line in messages)


def test_a_save_that_does_not_fit_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(2000, 1000)
    free = 4 * tensor.numel() + stages.SMALL_FILES - 1
    monkeypatch.setattr(stages, "free_bytes", lambda root: free)
    messages: list[str] = []
    saver = Saver(tmp_path, CheckpointConfig(), log=messages.append)
    saver.begin(CheckpointContents(1, None, {}, ""), [make_shard(tensor)])
    saver.complete()
    assert "the checkpoint needs 8.00 MB" in messages[0]
    assert "make room" in messages[0]
    assert not list(tmp_path.glob("global_step1*"))


def test_saves_are_due_at_intervals_and_named_iterations() -> None:
    saver = Saver(Path("unused"), CheckpointConfig(save_interval=10, save_at=(3, 17)))
    due = [after for after in range(1, 31) if saver.is_due(after - 1, after)]
    assert due == [3, 10, 17, 20, 30]
    assert saver.is_due(21, 39)
    assert not saver.is_due(21, 29)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failures_are_reported_and_retried_and_end_the_run(
    asynchronous: bool, tmp_path: Path
) -> None:
    """The folder is moved away and replaced by a file, so that it cannot be made again."""
    root = tmp_path / "run"
    root.mkdir()
    messages: list[str] = []
    config = CheckpointConfig(
        save_interval=100, save_retry_interval=7, max_save_failures=3, async_save=asynchronous
    )
    saver = Saver(root, config, log=messages.append)
    tensor = torch.ones(10)
    saver.begin(CheckpointContents(100, None, {}, ""), [make_shard(tensor)])
    saver.complete()
    root.rename(tmp_path / "moved")
    root.touch()
    saver.begin(CheckpointContents(200, None, {}, ""), [make_shard(tensor)])
    saver.complete()
    assert not saver.in_flight
    assert saver.saved_iteration == 100
    assert "saving iteration 200" in messages[0]
    assert "(1 of 3 in a row)" in messages[0]
    assert os.strerror(errno.ENOTDIR) in messages[0]
    assert "tried again after iteration 207" in messages[0]
    due = [after for after in range(201, 210) if saver.is_due(after - 1, after)]
    assert due == [207, 208, 209]
    saver.begin(CheckpointContents(207, None, {}, ""), [make_shard(tensor)])
    saver.complete()
    with pytest.raises(CheckpointError) as failed:
        saver.begin(CheckpointContents(214, None, {}, ""), [make_shard(tensor)])
    assert "(3 of 3 in a row)" in str(failed.value)
    assert "the newest: global_step100" in str(failed.value)
    root.unlink()
    (tmp_path / "moved").rename(root)
    assert read_pointed_iteration(root) == 100


def test_success_resets_the_count_of_failures(tmp_path: Path) -> None:
    root = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    root.mkdir()
    saver = Saver(root, CheckpointConfig(max_save_failures=2))
    for iteration in range(1, 7):
        if iteration % 2:
            root.rename(elsewhere)
        saver.begin(CheckpointContents(iteration, None, {}, ""), [make_shard(torch.ones(3))])
        saver.complete()
        if iteration % 2:
            elsewhere.rename(root)
    assert list_saved_iterations(root) == [2, 4, 6]


def raise_memory_error() -> None:
    """Raise the error of Python."""
    raise MemoryError


def exceed_memory() -> None:
    """Raise the error of PyTorch, which is a plain RuntimeError."""
    torch.empty(1 << 60)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fail", [raise_memory_error, exceed_memory])
def test_lack_of_memory_is_a_failed_save(
    fail: Callable[[], None], asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    saver = Saver(tmp_path, CheckpointConfig(async_save=asynchronous), log=messages.append)
    tensor = torch.ones(30, 10)
    with monkeypatch.context() as patched:
        # Both kinds of save write through this function.
        patched.setattr("megatron.checkpoint.stages.write_shard_file", lambda *arguments: fail())
        saver.begin(CheckpointContents(1, None, {}, ""), [make_shard(tensor)])
        saver.complete()
    assert "not enough memory of the host" in messages[0]
    assert "tried again" in messages[0]
    assert list_saved_iterations(tmp_path) == []
    saver.begin(CheckpointContents(2, None, {}, ""), [make_shard(tensor)])
    saver.complete()
    assert list_saved_iterations(tmp_path) == [2]


def test_other_errors_of_a_save_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a mistake of this package")

    monkeypatch.setattr("megatron.checkpoint.stages.write_shard_file", fail)
    saver = Saver(tmp_path)
    saver.begin(CheckpointContents(1, None, {}, ""), [make_shard(torch.ones(3))])
    with pytest.raises(RuntimeError, match="a mistake of this package"):
        saver.complete()
