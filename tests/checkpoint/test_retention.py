"""What may be removed, and that nothing else is."""

import itertools
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.course import Ancestor, superfluous
from megatron.checkpoint.folder import LATEST, LATEST_ITERATION, saved_iterations
from megatron.checkpoint.save import Contents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.chunk import Chunk


def course(*saved: int, kept: tuple[int, ...] = ()) -> list[Ancestor]:
    return [Ancestor(iteration, f"digest of {iteration}", iteration in kept) for iteration in saved]


def test_nothing_goes_unless_asked() -> None:
    assert superfluous(course(1, 2, 3), CheckpointConfig()) == []


@pytest.mark.parametrize(
    ("config", "saved", "going"),
    [
        (CheckpointConfig(keep_latest_checkpoints=1), course(2, 4, 6), [2, 4]),
        (CheckpointConfig(keep_latest_checkpoints=2), course(2, 4, 6), [2]),
        (CheckpointConfig(keep_latest_checkpoints=5), course(2, 4, 6), []),
        (CheckpointConfig(keep_latest_checkpoints=1, keep_every=4), course(2, 4, 6, 8, 10), [2, 6]),
        (CheckpointConfig(keep_latest_checkpoints=1, save_at=(2,)), course(2, 4, 6), [4]),
        # 7 was saved for 6, which a jump passed.
        (CheckpointConfig(keep_latest_checkpoints=1, save_at=(6,)), course(2, 4, 7, 8, kept=(7,)), [2, 4]),
        # What is kept for ever takes nobody's place among the newest.
        (CheckpointConfig(keep_latest_checkpoints=2, keep_every=6), course(2, 4, 6), [2]),
        # Rolled back from 9 to 3, then saved at 7: in the order of the course, not of the numbers.
        (CheckpointConfig(keep_latest_checkpoints=2), course(3, 9, 7), [3]),
    ],
)
def test_superfluous(config: CheckpointConfig, saved: list[Ancestor], going: list[int]) -> None:
    assert [ancestor.iteration for ancestor in superfluous(saved, config)] == going


def test_the_newest_are_always_kept() -> None:
    for saved in itertools.chain.from_iterable(itertools.combinations(range(1, 7), n) for n in range(1, 7)):
        for keep in (1, 2, 3):
            config = CheckpointConfig(keep_latest_checkpoints=keep, keep_every=3, save_at=(2,))
            going = [ancestor.iteration for ancestor in superfluous(course(*saved), config)]
            assert set(saved[-keep:]).isdisjoint(going)
            assert all(iteration not in going for iteration in (2, 3, 6))


def test_a_run_keeps_what_it_is_told(tmp_path: Path) -> None:
    config = CheckpointConfig(save_interval=1, keep_latest_checkpoints=2, keep_every=4, save_at=(3,))
    said: list[str] = []
    saver = Saver(tmp_path, config, say=said.append)
    for iteration in range(1, 10):
        assert saver.is_due(iteration - 1, iteration)
        saver.begin(Contents(iteration, None, {}, ""), [Chunk("weight", "w", (4,), (0,), torch.ones(4), owner=True)])
        saver.complete()
    assert saved_iterations(tmp_path) == [3, 4, 8, 9]
    assert {entry.name for entry in tmp_path.iterdir() if not entry.is_dir()} == {"course.json", LATEST, LATEST_ITERATION}
    assert "removed by --keep-latest-checkpoints: global_step7" in said


def test_nothing_is_removed_for_a_checkpoint_that_the_disk_holds_wrongly(tmp_path: Path) -> None:
    """The bytes change between the write and the reading back: the save has failed, and the older ones stay."""
    config = CheckpointConfig(keep_latest_checkpoints=1)
    said: list[str] = []
    saver = Saver(tmp_path, config, say=said.append)
    chunk = Chunk("weight", "w", (4,), (0,), torch.ones(4), owner=True)
    saver.begin(Contents(1, None, {}, ""), [chunk])
    saver.complete()
    saver.begin(Contents(2, None, {}, ""), [chunk])
    assert saver._save is not None
    saver._save.work.wait()
    file = tmp_path / "global_step2.unfinished" / "rank_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 4
    file.write_bytes(raw)
    saver.complete()
    assert saver.saved_iteration == 1
    assert saved_iterations(tmp_path) == [1]
    assert len(said) == 1
    assert "rank_00000.safetensors is not what was written" in said[0]
    saver.begin(Contents(3, None, {}, ""), [chunk])
    saver.complete()
    assert saved_iterations(tmp_path) == [3]
