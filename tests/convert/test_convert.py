"""Import and export of each family, and the mistakes that the comparison finds."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.builders import tiny_config
from model.reference_models import FAMILIES
from safetensors.torch import load_file, save_file

from megatron.base.errors import CheckpointError, ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert import architectures
from megatron.extras.interop.convert.architectures import (
    ARCHITECTURES,
    choose_architecture,
    find_architecture,
)
from megatron.extras.interop.convert.export import ExportOptions, export_checkpoint
from megatron.extras.interop.convert.fields import NOT_ARCHITECTURE
from megatron.extras.interop.convert.importing import import_model
from megatron.extras.interop.translators.compat_derived import describe_layers
from megatron.model.positions import make_scaled_rotary_table, scale_rotary_frequencies
from megatron.model.shape import ModelShape

transformers = pytest.importorskip("transformers")
ROPE_INIT_FUNCTIONS = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
FIELDS = {
    "attention_dropout": 0.15,
    "attn_pdrop": 0.15,
    "hidden_dropout": 0.25,
    "resid_pdrop": 0.25,
    "embd_pdrop": 0.25,
    "initializer_range": 0.03,
    "layer_norm_epsilon": 3e-6,
    "layer_norm_eps": 3e-6,
    "rms_norm_eps": 3e-6,
}
"""Fields that no class of `transformers` has by default with these values."""
WITHOUT_MEANING = {
    "_name_or_path",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    # None is 4 x n_embd, which the export spells out.
    "n_inner",
    # Other forms of a list of layers, which is compared.
    "max_window_layers",
    "no_rope_layer_interval",
    "mlp_only_layers",
    "decoder_sparse_step",
}
"""Fields of a model without a tokenizer that may differ after import and export."""


def save_theirs(family: str, folder: Path) -> Path:
    """Save a model of `transformers` with large weights."""
    FAMILIES[family].build().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.model_type)
def test_every_field_of_the_architecture_is_covered_once(
    architecture: architectures.Architecture,
) -> None:
    covered = [name for pair in architecture.pairs for name in pair.model_fields]
    assert len(covered) == len(set(covered))
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - set(covered) <= NOT_ARCHITECTURE


# transformers 5.24 writes convolutions of Olmo-Hybrid that do not fit it. `test_convert_hybrids.py`
# has a folder as it was published.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "olmo-hybrid"])
def test_an_imported_model_is_exported_with_equal_bytes(family: str, tmp_path: Path) -> None:
    source = save_theirs(family, tmp_path / "source")
    fields = vars(transformers.AutoConfig.from_pretrained(source))
    edit_config(source, **{name: value for name, value in FIELDS.items() if name in fields})
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
    # Fields that change only a training that follows are not in the comparison of both models.
    there, back = (
        transformers.AutoConfig.from_pretrained(folder).to_dict()
        for folder in (source, tmp_path / "back")
    )
    assert {name for name in there if there[name] != back[name]} <= WITHOUT_MEANING
    # The source has no tokenizer, so no default of the class is an id of ours.
    assert [back[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"beta_fast": 8, "beta_slow": 2},
        {"beta_fast": None, "beta_slow": 0},
        {"factor": 32.0, "original_max_position_embeddings": 256, "rope_theta": 500000.0},
        {"factor": 0.5},
        {"factor": None},
        {"attention_factor": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0.707},
        # Both limits are the first pair, and the ramp becomes a step.
        {"original_max_position_embeddings": 6},
        # Limits below the first pair, above the last one, and above the bound of `transformers`.
        {"original_max_position_embeddings": 4},
        {"original_max_position_embeddings": 10**6},
        {"original_max_position_embeddings": 10**9},
        # DeepSeek V3, Qwen2.5 with 128K, gpt-oss.
        {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1,
            "mscale_all_dim": 1,
        },
        {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
        {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}
        | {"truncate": False},
    ],
)
def test_yarn_has_the_frequencies_of_transformers(changes: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 2048} | changes
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=8192, rope_parameters=rope
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    model = find_architecture("llama").read(config.to_dict())
    plain = 1.0 / model.rotary_base ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(
        scale_rotary_frequencies(plain, model), expected, rtol=1e-6, atol=0.0
    )
    shape = ModelShape(model, 1, 1)
    assert shape.rope_attention_factor == pytest.approx(attention_factor, rel=1e-12)
    if "attention_factor" not in changes and "mscale" not in changes:
        # The default of our flag is that of the paper.
        default = ModelShape(dataclasses.replace(model, rope_attention_factor=None), 1, 1)
        assert default.rope_attention_factor == pytest.approx(attention_factor, rel=1e-12)
    cos, sin = make_scaled_rotary_table(3, shape, torch.device("cpu"))
    torch.testing.assert_close(
        cos[:, 0, 0, 0].square() + sin[:, 0, 0, 0].square(),
        torch.full((3, 32), attention_factor**2),
    )


def edit_config(source: Path, **fields: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def remove_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def add_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)


def cut_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(31)


def spoil_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def edit_header(source: Path, tensor: str, **fields: Any) -> None:
    """Change the header of the tensor file, and leave the numbers as they are."""
    path = source / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[tensor] |= fields
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def write_twice(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file(tensors, source / "a.safetensors")
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, source / "b.safetensors")
    names = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def make_link(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to(source / "config.json")


def make_pipe(source: Path) -> None:
    (source / "config.json").unlink()
    os.mkfifo(source / "config.json")


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config.json": (lambda s: (s / "config.json").unlink(), "config.json cannot be read"),
    "broken config.json": (lambda s: (s / "config.json").write_text("{"), "cannot be read"),
    "unknown architecture": (
        lambda s: edit_config(s, model_type="mamba"),
        "model_type mamba is not supported; supported are llama",
    ),
    "code of the authors": (
        lambda s: edit_config(s, auto_map={"AutoModel": "code.Model"}),
        "which is not run",
    ),
    "a rotation that is not known": (
        lambda s: edit_config(
            s, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "rope_type dynamic is not supported",
    ),
    "biases that the files lack": (
        lambda s: edit_config(s, attention_bias=True),
        "self_attn.q_proj.bias is missing",
    ),
    "another activation": (lambda s: edit_config(s, hidden_act="relu"), "hidden_act relu"),
    "a missing tensor": (
        lambda s: edit_tensors(s, remove_tensor),
        "model.layers.2.mlp.up_proj.weight is missing",
    ),
    "an extra tensor": (lambda s: edit_tensors(s, add_tensor), "q_proj.bias is not known"),
    "another shape": (lambda s: edit_tensors(s, cut_tensor), r"shape \(31,\), and must have"),
    "a number that is not finite": (lambda s: edit_tensors(s, spoil_tensor), "differ by nan"),
    "a file cut off": (
        lambda s: (s / "model.safetensors").write_bytes(
            (s / "model.safetensors").read_bytes()[:2000]
        ),
        "model.safetensors cannot be read",
    ),
    "whole numbers as weights": (
        lambda s: edit_header(s, "model.norm.weight", dtype="I32"),
        "model.norm.weight is I32, and must be F32",
    ),
    "a header with a wrong size": (
        lambda s: edit_header(s, "model.norm.weight", shape=[10**12], data_offsets=[0, 4 * 10**12]),
        "model.safetensors cannot be read",
    ),
    "a header with overlapping tensors": (
        lambda s: edit_header(s, "model.norm.weight", data_offsets=[0, 128]),
        "model.safetensors cannot be read",
    ),
    "a header longer than the file": (
        lambda s: (s / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}"),
        "model.safetensors cannot be read",
    ),
    "a tensor in two files": (
        write_twice,
        "lm_head.weight is in a.safetensors and in b.safetensors",
    ),
    "too many layers": (lambda s: edit_config(s, num_hidden_layers=10**9), "must be from 1 to"),
    "no layers": (lambda s: edit_config(s, num_hidden_layers=0), "must be from 1 to"),
    "a negative vocabulary": (lambda s: edit_config(s, vocab_size=-5), "must be at least 1"),
    "a negative length": (
        lambda s: edit_config(s, max_position_embeddings=-1),
        "sequence length -1 must be at least 1",
    ),
    "a huge vocabulary": (lambda s: edit_config(s, vocab_size=10**15), "and must have"),
    "a base that is no number": (
        lambda s: edit_config(s, rope_parameters={"rope_type": "default", "rope_theta": "x"}),
        "wrong kind",
    ),
    "a pipe instead of config.json": (make_pipe, "it is not a regular file"),
    "a link that leads elsewhere": (make_link, "model.safetensors cannot be read"),
    "an index with a number": (
        lambda s: (s / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": 3}})
        ),
        "names a file that is not text",
    ),
    "a missing file of the index": (
        lambda s: (s / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}})
        ),
        "which its index names",
    ),
    "a file outside of the folder": (
        lambda s: (s / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": "../model.safetensors"}})
        ),
        "is not in this folder",
    ),
    "pickle files": (
        lambda s: (s / "model.safetensors").rename(s / "pytorch_model.bin"),
        "pickle files",
    ),
    "more heads than the tensors have": (
        lambda s: edit_config(s, num_key_value_heads=4),
        "k_proj.weight has the shape",
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_theirs("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_a_bad_folder_is_refused(bad: str, llama: Path, tmp_path: Path) -> None:
    damage, message = BAD_FOLDERS[bad]
    source = shutil.copytree(llama, tmp_path / "source")
    damage(source)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_model(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_percent": 0.5}, "llama: --rotary-percent 0.5"),
        ({"embed_layernorm": True}, "llama: the class has --no-embed-layernorm"),
        ({"glu_activation": "geglu"}, "--glu-activation geglu"),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
    ],
)
def test_a_model_that_no_class_has_is_refused(changes: dict[str, Any], message: str) -> None:
    model = tiny_config(**{**FAMILIES["llama"].ours, **changes})
    with pytest.raises(ConfigError, match=message):
        choose_architecture(model)


def test_layers_are_described_shortly() -> None:
    assert describe_layers([], 8) is None
    assert describe_layers([3, 7], 8) == "3::4"
    assert describe_layers([0, 1, 2], 8) == "0,1,2"
    assert describe_layers([5], 8) == "5"
