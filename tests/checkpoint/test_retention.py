"""What may be removed, and that nothing else is."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from checkpoint_damage import make_format_2

from megatron.checkpoint.folder import LATEST, LATEST_ITERATION, list_saved_iterations, set_aside
from megatron.checkpoint.lineage import LineageEntry, read_lineage, select_removable_entries
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import TrainingError
from megatron.parallel.shard import TensorShard


def make_lineage(*saved: int, kept: tuple[int, ...] = ()) -> list[LineageEntry]:
    return [
        LineageEntry(iteration, f"digest of {iteration}", iteration in kept) for iteration in saved
    ]


def test_nothing_goes_unless_asked() -> None:
    assert select_removable_entries(make_lineage(1, 2, 3), CheckpointConfig()) == []


@pytest.mark.parametrize(
    ("config", "saved", "going"),
    [
        (CheckpointConfig(keep_latest_checkpoints=1), make_lineage(2, 4, 6), [2, 4]),
        (CheckpointConfig(keep_latest_checkpoints=2), make_lineage(2, 4, 6), [2]),
        (CheckpointConfig(keep_latest_checkpoints=5), make_lineage(2, 4, 6), []),
        (
            CheckpointConfig(keep_latest_checkpoints=1, keep_every=4),
            make_lineage(2, 4, 6, 8, 10),
            [2, 6],
        ),
        (CheckpointConfig(keep_latest_checkpoints=1, save_at=(2,)), make_lineage(2, 4, 6), [4]),
        # 7 was saved for 6, which a jump passed.
        (
            CheckpointConfig(keep_latest_checkpoints=1, save_at=(6,)),
            make_lineage(2, 4, 7, 8, kept=(7,)),
            [2, 4],
        ),
        # What is kept permanently takes nobody's place among the newest.
        (CheckpointConfig(keep_latest_checkpoints=2, keep_every=6), make_lineage(2, 4, 6), [2]),
        # Rolled back from 9 to 3, then saved at 7: in the order of the course, not of the numbers.
        (CheckpointConfig(keep_latest_checkpoints=2), make_lineage(3, 9, 7), [3]),
    ],
)
def test_superfluous(config: CheckpointConfig, saved: list[LineageEntry], going: list[int]) -> None:
    assert [ancestor.iteration for ancestor in select_removable_entries(saved, config)] == going


def test_the_newest_are_always_kept() -> None:
    for saved in itertools.chain.from_iterable(
        itertools.combinations(range(1, 7), n) for n in range(1, 7)
    ):
        for keep in (1, 2, 3):
            config = CheckpointConfig(keep_latest_checkpoints=keep, keep_every=3, save_at=(2,))
            going = [
                ancestor.iteration
                for ancestor in select_removable_entries(make_lineage(*saved), config)
            ]
            assert set(saved[-keep:]).isdisjoint(going)
            assert all(iteration not in going for iteration in (2, 3, 6))


def test_a_run_keeps_what_it_is_told(tmp_path: Path) -> None:
    config = CheckpointConfig(
        save_interval=1, keep_latest_checkpoints=2, keep_every=4, save_at=(3,)
    )
    said: list[str] = []
    saver = Saver(tmp_path, config, say=said.append)
    for iteration in range(1, 10):
        assert saver.is_due(iteration - 1, iteration)
        saver.begin(
            CheckpointContents(iteration, None, {}, ""),
            [TensorShard("weight", "w", (4,), (0,), torch.ones(4), owner=True)],
        )
        saver.complete()
    assert list_saved_iterations(tmp_path) == [3, 4, 8, 9]
    assert {entry.name for entry in tmp_path.iterdir() if not entry.is_dir()} == {
        "course.json",
        LATEST,
        LATEST_ITERATION,
    }
    assert "removed by --keep-latest-checkpoints: global_step7" in said


def test_nothing_is_removed_for_a_checkpoint_that_the_disk_holds_wrongly(tmp_path: Path) -> None:
    """The bytes change between the write and the reading back: the save has failed, and the older ones stay."""
    config = CheckpointConfig(keep_latest_checkpoints=1)
    said: list[str] = []
    saver = Saver(tmp_path, config, say=said.append)
    shard = TensorShard("weight", "w", (4,), (0,), torch.ones(4), owner=True)
    saver.begin(CheckpointContents(1, None, {}, ""), [shard])
    saver.complete()
    saver.begin(CheckpointContents(2, None, {}, ""), [shard])
    assert saver._save is not None
    saver._save.work.wait()
    file = tmp_path / "global_step2.unfinished" / "rank_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 4
    file.write_bytes(raw)
    saver.complete()
    assert saver.saved_iteration == 1
    assert list_saved_iterations(tmp_path) == [1]
    assert len(said) == 1
    assert "rank_00000.safetensors is not what was written" in said[0]
    saver.begin(CheckpointContents(3, None, {}, ""), [shard])
    saver.complete()
    assert list_saved_iterations(tmp_path) == [3]


def applied(*entries: tuple[int, int | None]) -> list[LineageEntry]:
    return [
        LineageEntry(iteration, f"digest of {iteration}", False, steps)
        for iteration, steps in entries
    ]


@pytest.mark.parametrize(
    ("keep", "entries", "going"),
    [
        (
            2,
            [(2, 2), (4, 4), (6, 4), (8, 4), (10, 4)],
            [6, 8],
        ),  # the newest one stays: the pointers name it
        (1, [(2, 2), (4, 4), (6, 4)], [2]),
        (2, [(2, 2), (4, 4), (6, 4), (8, 5)], [2, 6]),
        (3, [(2, 0), (4, 0), (6, 0)], [4]),  # the first one has no other before it
        (2, [(2, None), (4, None), (6, None)], [2]),  # format 2
        (2, [(2, None), (4, None), (6, 0), (8, 0)], [6]),  # resumed from it, and every step dropped
        (2, [(2, None), (4, None), (6, 2), (8, 4)], [2, 4]),
    ],
)
def test_weights_that_did_not_change_count_once(
    keep: int, entries: list[tuple[int, int | None]], going: list[int]
) -> None:
    found = select_removable_entries(
        applied(*entries), CheckpointConfig(keep_latest_checkpoints=keep)
    )
    assert [ancestor.iteration for ancestor in found] == going


def test_what_is_not_there_does_not_count() -> None:
    entries = applied((2, 2), (4, 4), (6, 6), (8, 8))
    asked: list[int] = []

    def there(ancestor: LineageEntry) -> bool:
        asked.append(ancestor.iteration)
        return ancestor.iteration != 6

    found = select_removable_entries(entries, CheckpointConfig(keep_latest_checkpoints=2), there)
    assert [ancestor.iteration for ancestor in found] == [2, 6]
    assert asked == [8, 6, 4, 2]  # the one before tells whether it counts
    assert (
        select_removable_entries(
            entries[:3], CheckpointConfig(keep_latest_checkpoints=1), lambda ancestor: True
        )
        == entries[:2]
    )


class Steps:
    """Saves after each iteration, as a run does that applies some steps and drops the others."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.applied = root, 0
        self.saver = Saver(root, CheckpointConfig(keep_latest_checkpoints=keep))
        self.tensor = torch.ones(4)

    def save(self, iteration: int, *, applies: bool = True) -> list[int]:
        self.applied += applies
        chunks = [TensorShard("weight", "w", (4,), (0,), self.tensor, owner=True)]
        self.saver.begin(
            CheckpointContents(iteration, None, {"applied_steps": self.applied}, ""), chunks
        )
        self.saver.complete()
        return list_saved_iterations(self.root)


def test_dropped_steps_do_not_push_out_good_checkpoints(tmp_path: Path) -> None:
    steps = Steps(tmp_path, keep=2)
    assert [steps.save(iteration) for iteration in (1, 2, 3)][-1] == [2, 3]
    for iteration in (4, 5, 6):
        assert steps.save(iteration, applies=False) == [2, 3, iteration]
    assert steps.save(7) == [3, 7]
    assert steps.save(8) == [7, 8]
    steps.tensor[1] = math.nan
    with pytest.raises(TrainingError):
        steps.save(9)
    assert list_saved_iterations(tmp_path) == [7, 8]


def test_a_checkpoint_that_was_set_aside_or_removed_is_not_counted(tmp_path: Path) -> None:
    """Else the last good ones would be removed for folders that no run can start from."""
    steps = Steps(tmp_path, keep=3)
    assert [steps.save(iteration) for iteration in (1, 2, 3)][-1] == [1, 2, 3]
    set_aside(tmp_path, 3)
    (tmp_path / "global_step2" / "manifest.json").write_text("{")
    assert steps.save(4) == [1, 2, 4]
    assert steps.save(5) == [1, 2, 4, 5]
    assert steps.save(6) == [2, 4, 5, 6]  # what cannot be read is left alone


def test_a_checkpoint_of_format_2_is_read_and_counted(tmp_path: Path) -> None:
    steps = Steps(tmp_path, keep=2)
    for iteration in (1, 2):
        steps.save(iteration)
    for iteration in (1, 2):
        make_format_2(tmp_path / f"global_step{iteration}")
    old = open_checkpoint(tmp_path, 2)
    assert old.manifest.format == 2
    fresh = Steps(tmp_path, keep=2)
    first = LineageEntry(1, open_checkpoint(tmp_path, 1).manifest.digest, False)
    fresh.saver._lineage = (
        first,
        *read_lineage(old.manifest)[1:],
    )  # rewriting the first one changed its digest
    assert [ancestor.applied for ancestor in fresh.saver._lineage] == [None, None]
    assert fresh.save(3, applies=False) == [1, 2, 3]
    assert fresh.save(4) == [2, 4]
