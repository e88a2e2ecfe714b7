"""Test which checkpoints retention removes, and that it removes nothing else."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoint_damage import make_format_2

from megatron.base.errors import TrainingError
from megatron.checkpoint.folder import LATEST, LATEST_ITERATION, list_saved_iterations, set_aside
from megatron.checkpoint.lineage import (
    Lineage,
    LineageEntry,
    read_lineage,
    select_removable_entries,
)
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.shard import TensorShard


def make_lineage(*saved: int, kept: tuple[int, ...] = ()) -> list[LineageEntry]:
    """Return a lineage of these iterations. Those in `kept` are kept permanently."""
    return [
        LineageEntry(iteration, f"digest of {iteration}", iteration in kept) for iteration in saved
    ]


def list_iterations(entries: Sequence[LineageEntry]) -> list[int]:
    """Return the iterations of lineage entries."""
    return [entry.iteration for entry in entries]


def make_shard(tensor: torch.Tensor) -> TensorShard:
    """Return the shard of a weight with four elements."""
    return TensorShard("weight", "w", (4,), (0,), tensor, owner=True)


def test_nothing_is_removed_by_default() -> None:
    assert select_removable_entries(make_lineage(1, 2, 3), CheckpointConfig()) == []


@pytest.mark.parametrize(
    ("config", "saved", "removed"),
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
        # One that is kept permanently also counts as one of the newest.
        (CheckpointConfig(keep_latest_checkpoints=2, keep_every=6), make_lineage(2, 4, 6), [2]),
        # Rolled back from 9 to 3, then saved at 7. The order is that of the lineage.
        (CheckpointConfig(keep_latest_checkpoints=2), make_lineage(3, 9, 7), [3]),
    ],
)
def test_flags_select_removable_checkpoints(
    config: CheckpointConfig, saved: list[LineageEntry], removed: list[int]
) -> None:
    assert list_iterations(select_removable_entries(saved, config)) == removed


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ((10, 20, 30, 40, 50), [10, 20, 50]),
        ((10, 20, 30, 40, 60), [20, 30, 60]),
        ((10, 20), [10, 20]),
        ((10,), [10]),
        ((10, 100), [10, 100]),
    ],
)
def test_checkpoints_for_a_rollback_are_kept(saved: tuple[int, ...], kept: list[int]) -> None:
    """One is 40 iterations old, and the next one will be."""
    lineage = make_lineage(*saved)
    config = CheckpointConfig(keep_latest_checkpoints=1)
    removed = select_removable_entries(lineage, config, rollback_distance=40)
    assert sorted(set(saved) - set(list_iterations(removed))) == kept


@pytest.mark.parametrize("interval", [1, 7, 10, 100])
def test_checkpoint_for_a_rollback_never_becomes_much_older(interval: int) -> None:
    config = CheckpointConfig(keep_latest_checkpoints=1)
    lineage: list[LineageEntry] = []
    for iteration in range(interval, 1000, interval):
        lineage += make_lineage(iteration)
        removed = select_removable_entries(lineage, config, rollback_distance=40)
        lineage = [entry for entry in lineage if entry not in removed]
        assert len(lineage) <= 3
        if iteration > 40 + interval:
            old = [at for at in list_iterations(lineage) if at <= iteration - 40]
            assert old
            assert old[-1] >= iteration - 2 * 40 - 2 * interval


def test_newest_checkpoints_are_always_kept() -> None:
    for saved in itertools.chain.from_iterable(
        itertools.combinations(range(1, 7), n) for n in range(1, 7)
    ):
        for keep in (1, 2, 3):
            config = CheckpointConfig(keep_latest_checkpoints=keep, keep_every=3, save_at=(2,))
            removed = list_iterations(select_removable_entries(make_lineage(*saved), config))
            assert set(saved[-keep:]).isdisjoint(removed)
            assert all(iteration not in removed for iteration in (2, 3, 6))


def test_saver_keeps_what_the_flags_request(tmp_path: Path) -> None:
    config = CheckpointConfig(
        save_interval=1, keep_latest_checkpoints=2, keep_every=4, save_at=(3,)
    )
    messages: list[str] = []
    saver = Saver(tmp_path, config, log=messages.append)
    for iteration in range(1, 10):
        assert saver.poll(iteration - 1, iteration, stage_is_done=True)
        saver.begin(CheckpointContents(iteration, None, {}, ""), [make_shard(torch.ones(4))])
        saver.complete()
    assert list_saved_iterations(tmp_path) == [3, 4, 8, 9]
    assert list_iterations(saver.lineage) == [3, 4, 8, 9]
    assert {entry.name for entry in tmp_path.iterdir() if not entry.is_dir()} == {
        "course.json",
        LATEST,
        LATEST_ITERATION,
    }
    assert "removed by --keep-latest-checkpoints: global_step7" in messages


def test_a_checkpoint_in_use_is_removed_later(tmp_path: Path) -> None:
    in_use = {1}
    config = CheckpointConfig(keep_latest_checkpoints=1)
    saver = Saver(tmp_path, config, in_use=lambda: in_use)
    for iteration in range(1, 4):
        saver.begin(CheckpointContents(iteration, None, {}, ""), [make_shard(torch.ones(4))])
        saver.complete()
    assert list_saved_iterations(tmp_path) == list_iterations(saver.lineage) == [1, 3]
    in_use.clear()
    saver.begin(CheckpointContents(4, None, {}, ""), [make_shard(torch.ones(4))])
    saver.complete()
    assert list_saved_iterations(tmp_path) == [4]


def test_nothing_is_removed_if_the_disk_holds_wrong_bytes(tmp_path: Path) -> None:
    """A save fails if the bytes on the disk change before they are read back."""
    config = CheckpointConfig(keep_latest_checkpoints=1)
    messages: list[str] = []
    saver = Saver(tmp_path, config, log=messages.append)
    shard = make_shard(torch.ones(4))
    saver.begin(CheckpointContents(1, None, {}, ""), [shard])
    saver.complete()
    saver.begin(CheckpointContents(2, None, {}, ""), [shard])
    # Without --async-save, the shards may change when their file is written.
    saver.wait_for_copy()
    file = tmp_path / "global_step2.unfinished" / "rank_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 4
    file.write_bytes(raw)
    saver.complete()
    assert saver.saved_iteration == 1
    assert list_saved_iterations(tmp_path) == [1]
    assert len(messages) == 1
    assert "rank_00000.safetensors is not what was written" in messages[0]
    saver.begin(CheckpointContents(3, None, {}, ""), [shard])
    saver.complete()
    assert list_saved_iterations(tmp_path) == [3]


def make_applied_lineage(*entries: tuple[int, int | None]) -> list[LineageEntry]:
    """Return a lineage of (iteration, number of applied steps)."""
    return [
        LineageEntry(iteration, f"digest of {iteration}", False, steps)
        for iteration, steps in entries
    ]


@pytest.mark.parametrize(
    ("keep", "entries", "removed"),
    [
        # The newest one stays, because the pointers name it.
        (2, [(2, 2), (4, 4), (6, 4), (8, 4), (10, 4)], [6, 8]),
        (1, [(2, 2), (4, 4), (6, 4)], [2]),
        (2, [(2, 2), (4, 4), (6, 4), (8, 5)], [2, 6]),
        # No checkpoint precedes the first one.
        (3, [(2, 0), (4, 0), (6, 0)], [4]),
        # Format 2 has no number of applied steps.
        (2, [(2, None), (4, None), (6, None)], [2]),
        # Resumed from format 2, and every step was dropped.
        (2, [(2, None), (4, None), (6, 0), (8, 0)], [6]),
        (2, [(2, None), (4, None), (6, 2), (8, 4)], [2, 4]),
    ],
)
def test_unchanged_weights_count_once(
    keep: int, entries: list[tuple[int, int | None]], removed: list[int]
) -> None:
    found = select_removable_entries(
        make_applied_lineage(*entries), CheckpointConfig(keep_latest_checkpoints=keep)
    )
    assert list_iterations(found) == removed


def test_missing_checkpoints_do_not_count() -> None:
    entries = make_applied_lineage((2, 2), (4, 4), (6, 6), (8, 8))
    asked: list[int] = []

    def is_on_disk(entry: LineageEntry) -> bool:
        asked.append(entry.iteration)
        return entry.iteration != 6

    found = select_removable_entries(
        entries, CheckpointConfig(keep_latest_checkpoints=2), is_on_disk
    )
    assert list_iterations(found) == [2, 6]
    # Whether a checkpoint counts depends on the one before it, so 2 is also read.
    assert asked == [8, 6, 4, 2]
    found = select_removable_entries(entries[:3], CheckpointConfig(keep_latest_checkpoints=1))
    assert found == entries[:2]


class StepSaver:
    """A run that saves after each iteration, and applies only some of its steps."""

    def __init__(self, root: Path, keep: int, lineage: Lineage = ()) -> None:
        self.root = root
        self.applied = 0
        config = CheckpointConfig(keep_latest_checkpoints=keep)
        self.saver = Saver(root, config, lineage=lineage)
        self.tensor = torch.ones(4)

    def save(self, iteration: int, *, applies: bool = True) -> list[int]:
        """Save an iteration, and return the iterations of all checkpoints."""
        self.applied += applies
        self.saver.begin(
            CheckpointContents(iteration, None, {"applied_steps": self.applied}, ""),
            [make_shard(self.tensor)],
        )
        self.saver.complete()
        return list_saved_iterations(self.root)


def test_dropped_steps_do_not_push_out_good_checkpoints(tmp_path: Path) -> None:
    run = StepSaver(tmp_path, keep=2)
    for iteration in (1, 2, 3):
        run.save(iteration)
    assert list_saved_iterations(tmp_path) == [2, 3]
    for iteration in (4, 5, 6):
        assert run.save(iteration, applies=False) == [2, 3, iteration]
    assert run.save(7) == [3, 7]
    assert run.save(8) == [7, 8]
    run.tensor[1] = math.nan
    with pytest.raises(TrainingError):
        run.save(9)
    assert list_saved_iterations(tmp_path) == [7, 8]


def test_damaged_checkpoints_are_not_counted(tmp_path: Path) -> None:
    """A checkpoint that was renamed as damaged, or has no valid manifest, does not count."""
    run = StepSaver(tmp_path, keep=3)
    for iteration in (1, 2, 3):
        run.save(iteration)
    assert list_saved_iterations(tmp_path) == [1, 2, 3]
    set_aside(tmp_path, 3)
    (tmp_path / "global_step2" / "manifest.json").write_text("{")
    assert run.save(4) == [1, 2, 4]
    assert run.save(5) == [1, 2, 4, 5]
    # The folder without a valid manifest is not removed.
    assert run.save(6) == [2, 4, 5, 6]


def test_checkpoint_of_format_2_is_read_and_counted(tmp_path: Path) -> None:
    run = StepSaver(tmp_path, keep=2)
    for iteration in (1, 2):
        run.save(iteration)
    for iteration in (1, 2):
        make_format_2(tmp_path / f"global_step{iteration}")
    old = open_checkpoint(tmp_path, 2)
    assert old.manifest.format == 2
    # Rewriting the first manifest has changed its digest, so its entry is made again.
    first = LineageEntry(1, open_checkpoint(tmp_path, 1).manifest.digest, False)
    resumed = StepSaver(tmp_path, keep=2, lineage=(first, *read_lineage(old.manifest)[1:]))
    assert [entry.applied for entry in resumed.saver.lineage] == [None, None]
    assert resumed.save(3, applies=False) == [1, 2, 3]
    assert resumed.save(4) == [2, 4]
