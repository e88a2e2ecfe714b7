"""Import and export of each family, and the mistakes that the comparison finds."""

import dataclasses
from pathlib import Path

import pytest
import torch
from model.reference_models import FAMILIES
from safetensors.torch import load_file

from megatron.checkpoint.load import open_checkpoint
from megatron.config.model import ModelConfig
from megatron.convert import architectures
from megatron.convert.architectures import (
    ARCHITECTURES,
)
from megatron.convert.export import ExportOptions, export_checkpoint
from megatron.convert.fields import NOT_ARCHITECTURE
from megatron.convert.importing import import_model

pytest.importorskip("transformers")


def save_theirs(family: str, folder: Path) -> Path:
    """Save a model of `transformers` with large weights."""
    FAMILIES[family].build().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.model_type)
def test_every_field_of_the_architecture_is_covered_once(
    architecture: architectures.Architecture,
) -> None:
    covered = [name for pair in architecture.pairs for name in pair.ours]
    assert len(covered) == len(set(covered))
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - set(covered) <= NOT_ARCHITECTURE


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_model_is_exported_with_equal_bytes(family: str, tmp_path: Path) -> None:
    source = save_theirs(family, tmp_path / "source")
    compared = import_model(source, tmp_path / "ours")
    assert compared.logits is not None
    assert compared.logits < 1e-4
    assert compared.same_argmax == 1
    checkpoint = open_checkpoint(tmp_path / "ours", 0)
    export_checkpoint(checkpoint, tmp_path / "back", ExportOptions(shard_bytes=20_000))
    before = load_file(source / "model.safetensors")
    after: dict[str, torch.Tensor] = {}
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        after |= load_file(file)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
        assert tensor.dtype == after[name].dtype
    assert not list(tmp_path.glob("*.unfinished"))
