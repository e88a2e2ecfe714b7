"""Folders of models with gated delta nets: each layout of their files, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from convert.test_convert_runs import TP2_PP2
from convert.test_trained_families import STEPS, check_export, train
from model.reference_models import FAMILIES
from process_pool import ProcessPool, pretrain, succeed
from safetensors.torch import load_file, save_file

from megatron.base.errors import CheckpointError, ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.convert import architectures
from megatron.extras.interop.convert.export import ExportOptions, export_checkpoint
from megatron.extras.interop.convert.importing import import_model
from megatron.observe.metrics import read_metrics

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


def enlarge_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a constant of Olmo-Hybrid with which the rounding of fp32 exceeds 1e-5."""
    norm = transformers.models.olmo_hybrid.modeling_olmo_hybrid.OlmoHybridRMSNormGated
    build = norm.__init__
    monkeypatch.setattr(norm, "__init__", lambda self, size, eps: build(self, size, eps=1e-2))
    monkeypatch.setitem(architectures._OLMO_LINEAR, "linear_norm_epsilon", 1e-2)
    family = FAMILIES["olmo-hybrid"]
    ours = {**family.ours, "linear_norm_epsilon": 1e-2}
    monkeypatch.setitem(FAMILIES, "olmo-hybrid", replace(family, ours=ours))


@pytest.mark.parametrize(
    "family", ["qwen3-next", pytest.param("olmo-hybrid", marks=pytest.mark.full)]
)
def test_a_trained_hybrid_is_exported_and_its_import_trains_at_another_layout(
    family: str,
    pool: ProcessPool,
    corpus: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run and a continuation of its import have TP 2 x PP 2."""
    if family == "olmo-hybrid":
        enlarge_epsilon(monkeypatch)
    train(pool, corpus, tmp_path, family, 2, 2)
    run, out, imported = tmp_path / "run", tmp_path / "exported", tmp_path / "imported"
    check_export(family, run, out)
    import_model(out, imported)
    back = dict(load_model(open_checkpoint(imported, 0)).named_parameters())
    for name, parameter in load_model(open_checkpoint(run, STEPS)).named_parameters():
        assert torch.equal(parameter, back[name]), name
    losses = []
    for ranks, layout in ((1, ""), (4, TP2_PP2)):
        again = tmp_path / f"again{ranks}"
        command = (
            f"--config {imported}/global_step0/config.yaml --load {imported} --finetune "
            f"--save {again} --data-path {corpus} --data-cache-path {again}/cache --train-iters 2 "
            f"--lr 1e-3 --eval-iters 0 --global-batch-size 4 --micro-batch-size 2 --seq-length 32 "
            f"--log-interval 1 {layout}"
        )
        succeed(pool.run(ranks, pretrain, command.split()))
        losses.append([each["lm_loss"] for each in read_metrics(again / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] < 8.5


MISTAKES = {
    "layer_types sliding_attention are not supported": {
        "layer_types": ["linear_attention", "sliding_attention"] * 2
    },
    "linear_num_value_heads 6 must be a multiple of linear_num_key_heads 4": {
        "linear_num_value_heads": 6
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_config_that_is_not_supported_is_refused(message: str, tmp_path: Path) -> None:
    save_theirs("qwen3-next", tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | MISTAKES[message]))
    with pytest.raises(ConfigError, match=message):
        import_model(tmp_path / "theirs", tmp_path / "ours")


def test_a_packed_tensor_of_a_wrong_size_is_named_by_its_parts(tmp_path: Path) -> None:
    _, published = save_theirs("qwen3-next", tmp_path / "theirs")
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    write(tmp_path / "theirs", published | {name: published[name][1:].clone()})
    with pytest.raises(CheckpointError, match=r"in_proj_ba\.beta\.weight has the shape \(15, 32\)"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
