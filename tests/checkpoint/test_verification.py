"""Test what `verify` finds if index, manifest and files of a checkpoint do not fit.

tests/convert/test_inspect_checkpoint.py tests the rest.
"""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_damage import resign
from saved_checkpoint import save_checkpoint

from megatron.base.errors import CheckpointError, DamagedError
from megatron.checkpoint.save import CheckpointContents
from megatron.extras.interop.inspection.verification import ensure_undisturbed, verify
from megatron.parallel.shard import Kind, TensorShard

TENSORS = "rank_00000.safetensors"


def save(root: Path) -> Path:
    """Save a 7 x 5 tensor in three shards and return the folder.

    The shards are rows 0-2, and columns 0-1 and 2-4 of rows 3-6.
    """
    shapes = {(0, 0): (3, 5), (3, 0): (4, 2), (3, 2): (4, 3)}
    shards = [
        TensorShard("weight", "a", (7, 5), offset, torch.randn(shape), owner=True)
        for offset, shape in shapes.items()
    ]
    return save_checkpoint(root, CheckpointContents(3, None, {}, ""), shards)


MATRIX = "blocks.0.mlp.up.weight"
TABLE = "embedding.word.weight"
BIAS = "blocks.0.mlp.router.balance"
STATES: dict[str, dict[str, tuple[Kind, ...]]] = {
    "adam": {MATRIX: ("exp_avg", "exp_avg_sq"), TABLE: ("exp_avg", "exp_avg_sq")},
    "ademamix": {
        MATRIX: ("exp_avg", "exp_avg_sq", "exp_avg_slow"),
        TABLE: ("exp_avg", "exp_avg_sq", "exp_avg_slow"),
    },
    "muon": {MATRIX: ("momentum",), TABLE: ("exp_avg", "exp_avg_sq")},
}


@pytest.mark.parametrize("optimizer", STATES)
def test_each_state_of_an_optimizer_must_be_there(optimizer: str, tmp_path: Path) -> None:
    tensors = [
        (kind, name) for name, kinds in STATES[optimizer].items() for kind in ("weight", *kinds)
    ]
    for number, missing in enumerate([None, *tensors]):
        shards = [
            TensorShard(kind, name, (4, 2), (0, 0), torch.ones(4, 2), owner=True)
            for kind, name in tensors
            if (kind, name) != missing
        ]
        # No optimizer updates it, so it has no states.
        shards.append(TensorShard("weight", BIAS, (4,), (0,), torch.ones(4), owner=True))
        config = f"optimizer:\n  optimizer: {optimizer}\n"
        contents = CheckpointContents(3, {"optimizer_step": 3}, {}, config)
        folder = save_checkpoint(tmp_path / str(number), contents, shards)
        damage = [d.what for d in verify(folder).damage]
        if missing is None:
            assert damage == []
        else:
            assert any("is not in the checkpoint" in what for what in damage), missing


def test_file_that_only_the_index_names(tmp_path: Path) -> None:
    folder = save(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["blocks"]["rank_00009.safetensors"] = ""
    resign(folder, index)
    (damage,) = verify(folder).damage
    assert damage.file == "index.json"
    assert "rank_00009.safetensors, which manifest.json does not name" in damage.what


def test_manifest_that_does_not_name_the_index(tmp_path: Path) -> None:
    folder = save(tmp_path)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    resign(folder, {}, files={name: facts for name, facts in files.items() if name != "index.json"})
    found = verify(folder)
    (damage,) = found.damage
    assert damage.file == "index.json"
    assert "manifest.json does not name it" in damage.what
    assert found.tensors == 0
    assert len(found.notes) == 2
    assert "without index.json" in found.notes[0]
    assert "not part of it: index.json" in found.notes[1]


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / TENSORS).unlink()
    (folder / TENSORS).mkdir()
    found = verify(folder).damage
    assert [damage.file for damage in found] == [TENSORS, TENSORS]
    assert f"{TENSORS} cannot be read" in found[0].what
    assert f"safetensors cannot open {TENSORS}" in found[1].what


def test_slices_that_overlap_in_two_dimensions(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert verify(folder).damage == ()
    index = json.loads((folder / "index.json").read_text())
    slices = {tuple(stored["offset"]): stored for stored in index["tensors"]["weight/a"]["boxes"]}
    slices[3, 2]["offset"] = [2, 1]
    resign(folder, index)
    covered = torch.zeros(7, 5)
    covered[:3] = 1
    covered[3:, :2] = 1
    covered[2:6, 1:4] += 1
    missing = int((covered == 0).sum())
    double = int((covered > 1).sum())
    what = verify(folder).damage[0].what
    assert what.startswith(f"{missing} of the 35 elements of weight/a are in no slice")
    assert f" {double} are in more than one" in what


def test_replaced_checkpoint_is_not_reported_as_damaged(tmp_path: Path) -> None:
    folder = save(tmp_path / "a")
    other = save(tmp_path / "b")
    with ensure_undisturbed(folder):
        verify(folder)
    with pytest.raises(DamagedError, match="real damage"), ensure_undisturbed(folder):
        raise DamagedError("real damage", TENSORS)

    def replace() -> None:
        folder.rename(tmp_path / "before")
        other.rename(folder)
        raise DamagedError("apparent damage", TENSORS)

    with pytest.raises(CheckpointError, match="Try again") as replaced, ensure_undisturbed(folder):
        replace()
    assert not isinstance(replaced.value, DamagedError)
    with pytest.raises(CheckpointError, match="Try again"), ensure_undisturbed(folder):
        folder.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="Try again"), ensure_undisturbed(folder):
        pass


def test_a_reader_that_has_succeeded_may_accept_that_a_checkpoint_is_removed(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path / "a")
    with ensure_undisturbed(folder, errors_only=True):
        folder.rename(tmp_path / "gone")
    with (
        pytest.raises(CheckpointError, match="Try again"),
        ensure_undisturbed(folder, errors_only=True),
    ):
        raise DamagedError("apparent damage", TENSORS)
