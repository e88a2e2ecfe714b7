"""What `verify` finds where index, manifest and files do not belong together; see test_inspect_checkpoint.py for the rest."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_damage import resign

from megatron.checkpoint.save import CheckpointContents, save_checkpoint
from megatron.checkpoint.verification import Damage, ensure_undisturbed, verify
from megatron.errors import CheckpointError, DamagedError
from megatron.parallel.shard import TensorShard

TENSORS = "rank_00000.safetensors"


def save(root: Path) -> Path:
    """7 x 5 elements, in rows 0-2, and the columns 0-1 and 2-4 of rows 3-6."""
    places = {(0, 0): (3, 5), (3, 0): (4, 2), (3, 2): (4, 3)}
    shards = [
        TensorShard("weight", "a", (7, 5), offset, torch.randn(shape), owner=True)
        for offset, shape in places.items()
    ]
    return save_checkpoint(root, CheckpointContents(3, None, {}, ""), shards)


def test_a_file_that_only_the_index_names(tmp_path: Path) -> None:
    folder = save(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["blocks"]["rank_00009.safetensors"] = ""
    resign(folder, index)
    stray = Damage(
        "index.json", "it has tensors in rank_00009.safetensors, which manifest.json does not name"
    )
    assert verify(folder).damage == (stray,)


def test_a_manifest_that_does_not_name_the_index(tmp_path: Path) -> None:
    folder = save(tmp_path)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    resign(folder, {}, files={name: facts for name, facts in files.items() if name != "index.json"})
    found = verify(folder)
    assert found.damage == (Damage("index.json", "manifest.json does not name it"),)
    assert found.tensors == 0
    assert [note.partition(":")[0] for note in found.notes][1:] == ["not part of it"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / TENSORS).unlink()
    (folder / TENSORS).mkdir()
    found = verify(folder).damage
    assert [each.file for each in found] == [TENSORS, TENSORS]
    assert found[0].what.startswith(f"{TENSORS} cannot be read: ")
    assert found[1].what.startswith(f"safetensors cannot open {TENSORS}: ")


def test_boxes_of_two_dimensions(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert verify(folder).damage == ()
    index = json.loads((folder / "index.json").read_text())
    boxes = {tuple(box["offset"]): box for box in index["tensors"]["weight/a"]["boxes"]}
    boxes[3, 2]["offset"] = [2, 1]
    resign(folder, index)
    covered = torch.zeros(7, 5)
    covered[:3], covered[3:, :2] = 1, 1
    covered[2:6, 1:4] += 1
    bare, double = int((covered == 0).sum()), int((covered > 1).sum())
    assert (
        verify(folder).damage[0].what
        == f"of weight/a's 35 elements {bare} are in no box, {double} in more than one"
    )


def test_what_is_replaced_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    folder, other = save(tmp_path / "a"), save(tmp_path / "b")
    with ensure_undisturbed(folder):
        verify(folder)
    with pytest.raises(DamagedError, match="of its own"), ensure_undisturbed(folder):
        raise DamagedError("of its own", TENSORS)

    def replace() -> None:
        folder.rename(tmp_path / "before")
        other.rename(folder)
        raise DamagedError("of what is gone", TENSORS)

    with pytest.raises(CheckpointError, match="Ask again") as replaced, ensure_undisturbed(folder):
        replace()
    assert not isinstance(replaced.value, DamagedError)
    with pytest.raises(CheckpointError, match="Ask again"), ensure_undisturbed(folder):
        folder.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="Ask again"), ensure_undisturbed(folder):
        pass
