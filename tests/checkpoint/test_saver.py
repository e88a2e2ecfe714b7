"""One save in the background: what it holds is the state when it began; failures are counted, told and survived."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError
from megatron.parallel.shard import TensorShard


def chunk_of(tensor: torch.Tensor) -> TensorShard:
    return TensorShard("weight", "w", tuple(tensor.shape), (0,) * tensor.dim(), tensor, owner=True)


def stored(root: Path, iteration: int, like: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(like)
    open_checkpoint(root, iteration).load_into([chunk_of(target)])
    return target


def finish(saver: Saver) -> int:
    """As the loop does, once an iteration; returns the number of iterations."""
    for asked in range(10_000):
        if not saver.in_flight:
            return asked
        time.sleep(0.01)
        saver.poll()
    raise AssertionError("the save never ends")


def test_a_background_save_holds_the_state_when_it_began(tmp_path: Path) -> None:
    saved: list[int] = []
    saver = Saver(
        tmp_path, CheckpointConfig(async_save=True, keep_latest_checkpoints=3), saved=saved.append
    )
    tensor = torch.randn(3000, 1000)
    for iteration in (1, 2):
        before = tensor.clone()
        saver.begin(CheckpointContents(iteration, None, {}, ""), [chunk_of(tensor)])
        assert saver.in_flight
        assert iteration not in saved
        saver.wait_for_copy()
        tensor.add_(1.0)  # the next step
        assert finish(saver) > 0
        assert saved[-1] == saver.saved_iteration == iteration
        assert torch.equal(stored(tmp_path, iteration, tensor), before)


def test_a_save_that_comes_too_early_waits_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    saver = Saver(tmp_path, CheckpointConfig(async_save=True), say=said.append)
    tensor = torch.ones(2000, 1000)
    for iteration in (1, 2):
        saver.begin(CheckpointContents(iteration, None, {}, ""), [chunk_of(tensor)])
    saver.complete()
    assert list_saved_iterations(tmp_path) == [1, 2]
    assert any(
        "the save of iteration 1 is still being written; iteration 2's waits for it" in line
        for line in said
    )


def test_is_due() -> None:
    saver = Saver(Path("unused"), CheckpointConfig(save_interval=10, save_at=(3, 17)))
    due = [after for after in range(1, 31) if saver.is_due(after - 1, after)]
    assert due == [3, 10, 17, 20, 30]
    assert saver.is_due(21, 39)
    assert not saver.is_due(21, 29)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failures_are_told_retried_and_end_the_run(asynchronous: bool, tmp_path: Path) -> None:
    """The target is a directory that is no longer there, and cannot be made: its parent became a file."""
    root = tmp_path / "run"
    root.mkdir()
    said: list[str] = []
    config = CheckpointConfig(
        save_interval=100, save_retry_interval=7, max_save_failures=3, async_save=asynchronous
    )
    saver = Saver(root, config, say=said.append)
    tensor = torch.ones(10)
    saver.begin(CheckpointContents(100, None, {}, ""), [chunk_of(tensor)])
    saver.complete()
    root.rename(tmp_path / "moved")
    root.touch()
    saver.begin(CheckpointContents(200, None, {}, ""), [chunk_of(tensor)])
    saver.complete()
    assert not saver.in_flight
    assert saver.saved_iteration == 100
    assert "saving iteration 200" in said[0]
    assert "(1 of 3 in a row)" in said[0]
    assert os.strerror(errno.ENOTDIR) in said[0]
    assert "tried again after iteration 207" in said[0]
    assert [after for after in range(201, 210) if saver.is_due(after - 1, after)] == [207, 208, 209]
    saver.begin(CheckpointContents(207, None, {}, ""), [chunk_of(tensor)])
    saver.complete()
    with pytest.raises(
        CheckpointError,
        match=r"(?s)3 of 3 in a row.*its last checkpoint is untouched: it is global_step100",
    ):
        saver.begin(CheckpointContents(214, None, {}, ""), [chunk_of(tensor)])
    root.unlink()
    (tmp_path / "moved").rename(root)
    assert read_pointed_iteration(root) == 100


def test_a_success_forgets_the_failures(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    root.mkdir()
    saver = Saver(root, CheckpointConfig(max_save_failures=2))
    for iteration in range(1, 7):
        if iteration % 2:
            root.rename(elsewhere)
        saver.begin(CheckpointContents(iteration, None, {}, ""), [chunk_of(torch.ones(3))])
        saver.complete()
        if iteration % 2:
            elsewhere.rename(root)
    assert list_saved_iterations(root) == [2, 4, 6]
