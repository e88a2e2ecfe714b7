"""Folders of models with gated delta nets: each layout of their files, and what is refused."""

from pathlib import Path

import pytest
import torch
from model.reference_models import FAMILIES
from safetensors.torch import load_file, save_file

from megatron.checkpoint.load import open_checkpoint
from megatron.extras.interop.convert.export import ExportOptions, export_checkpoint
from megatron.extras.interop.convert.importing import import_model

transformers = pytest.importorskip("transformers")
Tensors = dict[str, torch.Tensor]


def publish(family: str, tensors: Tensors, folder: Path) -> Tensors:
    """Return what published files have, from a model in memory and the folder that it saved."""
    if family != "olmo-hybrid":
        return load_file(folder / "model.safetensors")
    found: Tensors = {}
    for name, tensor in tensors.items():
        layer = name.split("linear_attn")[0]
        if name.endswith("conv1d.weight"):
            # transformers 5.24 saves three parts of equal sizes, which are not those of the model.
            for part, rows in zip("qkv", tensor.split([64, 64, 40]), strict=True):
                found[f"{layer}linear_attn.{part}_conv1d.weight"] = rows.contiguous()
        elif ".0." in name or ".2." in name:
            changed = name.replace("input_layernorm", "attention_layer_norm")
            changed = changed.replace("post_attention_layernorm", "feedforward_layer_norm")
            found[changed] = tensor
        else:
            found[name] = tensor
    return found


def save_theirs(family: str, folder: Path) -> tuple[Tensors, Tensors]:
    """Save a model of `transformers`. Return its tensors in memory, and those of its files."""
    model = FAMILIES[family].build()
    model.save_pretrained(folder)
    tensors = {name: each.detach().clone() for name, each in model.named_parameters()}
    return tensors, publish(family, tensors, folder)


def write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["qwen3-next", "olmo-hybrid"])
def test_both_layouts_are_read_and_the_published_one_is_written(
    family: str, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    in_memory, published = save_theirs(family, folder)
    assert in_memory.keys() != published.keys()
    for number, tensors in enumerate((in_memory, published)):
        write(folder, tensors)
        import_model(folder, tmp_path / f"ours{number}")
        out = tmp_path / f"back{number}"
        export_checkpoint(open_checkpoint(tmp_path / f"ours{number}", 0), out, ExportOptions())
        written = load_file(out / "model.safetensors")
        assert written.keys() == published.keys()
        for name, tensor in published.items():
            assert torch.equal(written[name], tensor), name


def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    _, published = save_theirs("qwen3-next", folder)
    more = {"mtp.fc.weight": torch.ones(2, 3), "mtp.layers.0.mlp.gate.weight": torch.ones(2, 3)}
    write(folder, published | more)
    lines: list[str] = []
    import_model(folder, tmp_path / "ours", log=lines.append, compare_complete=False)
    assert any("2 tensors are left out" in line for line in lines)
