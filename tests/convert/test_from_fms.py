"""Import of checkpoints that fms-fsdp and ibm-fms wrote themselves.

The files are in tests/fixtures/fms-fsdp, with the program that made them:

- step_5_ckp.tar.gz: the folder of fms-fsdp's Checkpointer, of ibm-fms 1.13.1 on two ranks of FSDP.
- step_5_ckp.pth: one file with all weights, in the names of ibm-fms 0.0.8, without fused matrices.
"""

import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.test_from_trainer import read_kind
from safetensors.torch import load_file

from megatron.checkpoint.load import Checkpoint, open_checkpoint
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.commands import convert_checkpoint
from megatron.extras.interop.convert.trainer_files import find_fms_parts

FIXTURES = Path(__file__).parents[1] / "fixtures" / "fms-fsdp"
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 32 --position-embedding-type rotary --normalization RMSNorm "
    "--glu-activation swiglu --no-add-bias-linear --untie-embeddings-and-output-weights "
    "--seq_length=16 --batch_size=2"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of fms-fsdp's Checkpointer."""
    with tarfile.open(FIXTURES / "step_5_ckp.tar.gz") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "step_5_ckp"


def run(source: Path, out: Path, *more: str, flags: str = MODEL) -> int:
    command = ["from-fms-fsdp", "--load", str(source), "--out", str(out), *more]
    return convert_checkpoint.main([*command, "--", *flags.split()])


def check_logits(checkpoint: Checkpoint, name: str) -> None:
    expected = load_file(FIXTURES / name)
    with torch.no_grad():
        logits = load_model(checkpoint).compute_logits(expected["tokens"])
    assert (logits - expected["logits"]).abs().max() < 1e-5


def test_a_folder_is_imported_with_its_states(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "imported") == 0
    assert "iteration 5, 20 samples, 320 tokens" in capsys.readouterr().out
    checkpoint = open_checkpoint(tmp_path / "imported", 5)
    check_logits(checkpoint, "step_5_ckp.tar.safetensors")
    assert checkpoint.optimizer == {"optimizer_step": 5}
    # Two ranks had a batch of 2.
    assert checkpoint.read_config().batch.global_batch_size == 4
    weights = read_kind(checkpoint, "weight")
    averages = read_kind(checkpoint, "exp_avg")
    squares = read_kind(checkpoint, "exp_avg_sq")
    assert len(averages) == len(squares) == len(weights) > 10
    for name, weight in weights.items():
        assert torch.equal(averages[name], 0.5 * weight + 1), name
        assert torch.equal(squares[name], weight.square()), name


def test_a_file_of_an_old_version_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (FIXTURES / "step_5_ckp.pth", tmp_path / "imported")
    assert run(*command) == 0
    assert "the optimizer's states are not imported" in capsys.readouterr().out
    checkpoint = open_checkpoint(tmp_path / "imported", 5)
    check_logits(checkpoint, "step_5_ckp.pth.safetensors")
    assert checkpoint.optimizer is None


def test_names_of_all_versions_mean_the_same() -> None:
    inside = ("attn.query.weight", "attn.key.weight", "attn.value.weight", "ff_sub_layer.wg.weight")
    oldest = find_fms_parts([f"layers.0.{name}" for name in inside])
    fused = find_fms_parts(
        [
            "base_model.layers.0.attn.in_proj.qkv_fused.weight",
            "base_model.layers.0.ff_sub_layer.wg1_fused.weight",
        ]
    )
    assert oldest.keys() == fused.keys() - {"layers.0.ff_sub_layer.w1.weight"}
    assert oldest["layers.0.attn.in_proj.qkv_fused.weight"].names == tuple(
        f"layers.0.{name}" for name in inside[:3]
    )


def test_damaged_folders_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "imported"
    assert run(folder, out, flags=f"{MODEL} --num-layers 3") == 2
    assert "layers.2.ln.weight is missing" in capsys.readouterr().err
    assert run(folder.parent, out) == 2
    assert ".metadata cannot be read" in capsys.readouterr().err
    (folder / "__0_0.distcp").unlink()
    assert run(folder, out) == 2
    assert "__0_0.distcp cannot be read" in capsys.readouterr().err
    (folder / "metadata.pth").unlink()
    assert run(folder, out) == 2
    assert "metadata.pth cannot be read" in capsys.readouterr().err
    state = torch.load(FIXTURES / "step_5_ckp.pth")
    del state["model_state"]["layers.1.attn.in_proj.key.weight"]
    torch.save(state, tmp_path / "part.pth")
    assert run(tmp_path / "part.pth", out) == 2
    assert "layers.1.attn.in_proj.key.weight is missing" in capsys.readouterr().err
    assert not list(tmp_path.glob("imported*"))


def test_chunks_that_overlap_leave_a_gap_that_is_found(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (entry,) = (
        entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model_state.") and name.endswith("layers.0.ff_ln.weight")
    )
    first, second = entry.chunks
    assert first.sizes == second.sizes
    entry.chunks = [first, first]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert run(folder, tmp_path / "imported", "--weights-only") == 2
    assert "numbers that are not finite" in capsys.readouterr().err


def test_a_wrong_description_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / ".metadata"
    original = path.read_bytes()
    path.write_bytes(pickle.dumps({"a": 1}))
    assert run(folder, tmp_path / "imported") == 2
    assert "does not describe a checkpoint" in capsys.readouterr().err
    wrong_places: dict[str, Any] = {"offset": "text", "length": 2**62, "relative_path": 5}
    for field, value in wrong_places.items():
        metadata = pickle.loads(original)
        for stored in metadata.storage_data.values():
            setattr(stored, field, value)
        path.write_bytes(pickle.dumps(metadata))
        assert run(folder, tmp_path / "imported") == 2
        assert "correctly" in capsys.readouterr().err, field
    wrong_tensors: dict[str, Any] = {"chunks": None, "properties": None, "size": "text"}
    for field, value in wrong_tensors.items():
        metadata = pickle.loads(original)
        for name, entry in metadata.state_dict_metadata.items():
            if name.startswith("model_state."):
                setattr(entry, field, value)
        path.write_bytes(pickle.dumps(metadata))
        assert run(folder, tmp_path / "imported", "--weights-only") == 2
        assert capsys.readouterr().err.startswith("error: "), field
    assert not list(tmp_path.glob("imported*"))
