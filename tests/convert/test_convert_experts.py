"""Folders of models with experts: both layouts of the files, and damaged ones."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.test_convert import edit_config, edit_tensors
from model.builders import tiny_config
from model.reference_models import FAMILIES
from safetensors.torch import load_file, save_file

from megatron.base.errors import CheckpointError, ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.extras.interop.convert import compare
from megatron.extras.interop.convert.architectures import choose_architecture
from megatron.extras.interop.convert.compare import HfModel
from megatron.extras.interop.convert.export import ExportOptions, export_checkpoint
from megatron.extras.interop.convert.importing import import_model

transformers = pytest.importorskip("transformers")
Tensors = dict[str, torch.Tensor]


def save_theirs(family: str, folder: Path, *, grouped: bool = False) -> Path:
    """Save a model of `transformers`. `grouped`: with the tensors that it has in memory."""
    model = FAMILIES[family].build()
    model.save_pretrained(folder)
    if grouped:
        tensors = {name: each.detach().clone() for name, each in model.named_parameters()}
        assert any(name.endswith("experts.gate_up_proj") for name in tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["olmoe", "qwen3-moe", "mixtral"])
def test_both_layouts_are_read_and_one_is_written(family: str, tmp_path: Path) -> None:
    single = save_theirs(family, tmp_path / "single")
    grouped = save_theirs(family, tmp_path / "grouped", grouped=True)
    assert load_file(single / "model.safetensors").keys() != (
        load_file(grouped / "model.safetensors").keys()
    )
    for folder in (single, grouped):
        import_model(folder, tmp_path / f"from-{folder.name}")
        checkpoint = open_checkpoint(tmp_path / f"from-{folder.name}", 0)
        out = tmp_path / f"to-{folder.name}"
        export_checkpoint(checkpoint, out, ExportOptions())
        written = load_file(out / "model.safetensors")
        expected = load_file(single / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_layers_may_have_different_layouts_and_16_bits(tmp_path: Path) -> None:
    single = load_file(save_theirs("olmoe", tmp_path / "mixed") / "model.safetensors")
    grouped = dict(FAMILIES["olmoe"].build().named_parameters())

    def is_of_last(name: str) -> bool:
        return name.startswith("model.layers.3.mlp.experts.")

    mixed = {name: each for name, each in single.items() if not is_of_last(name)}
    mixed |= {name: each.detach() for name, each in grouped.items() if is_of_last(name)}
    halves = {name: each.bfloat16() for name, each in mixed.items()}
    save_file(halves, tmp_path / "mixed/model.safetensors", metadata={"format": "pt"})
    import_model(tmp_path / "mixed", tmp_path / "ours")
    export_checkpoint(
        open_checkpoint(tmp_path / "ours", 0), tmp_path / "back", ExportOptions(dtype="bf16")
    )
    written = load_file(tmp_path / "back/model.safetensors")
    assert written.keys() == single.keys()
    assert all(torch.equal(written[name], single[name].bfloat16()) for name in single)


# ---- Damaged folders ----

EXPERT = "model.layers.2.mlp.experts.4"
WHOLE = "model.layers.2.mlp.experts.gate_up_proj"


def remove(*names: str) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return lambda folder: edit_tensors(folder, change)


def put(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(
        folder, lambda tensors: tensors.__setitem__(name, make(tensors).contiguous())
    )


def edit(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


def cut_a_shard(folder: Path) -> None:
    """Leave an index that names two files, and only the first of them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = dict.fromkeys(tensors, "a.safetensors") | {f"{EXPERT}.up_proj.weight": "b.safetensors"}
    del tensors[f"{EXPERT}.up_proj.weight"]
    save_file(tensors, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def renumber_experts(folder: Path) -> None:
    """Count from 1, as a converter may do."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            match = re.search(r"experts\.(\d+)", name)
            assert match is not None
            new = name.replace(match[0], f"experts.{int(match[1]) + 1}_")
            tensors[new] = tensors.pop(name)
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name.replace("_.", ".")] = tensors.pop(name)

    edit_tensors(folder, change)


BAD_FOLDERS: dict[str, tuple[bool, Callable[[Path], Any], str]] = {
    "an expert is missing": (
        False,
        remove(*(f"{EXPERT}.{part}_proj.weight" for part in ("gate", "up", "down"))),
        f"{EXPERT}.gate_proj.weight is missing",
    ),
    "one matrix of an expert is missing": (
        False,
        remove(f"{EXPERT}.down_proj.weight"),
        f"{EXPERT}.down_proj.weight is missing",
    ),
    "the router is missing": (
        False,
        remove("model.layers.1.mlp.gate.weight"),
        "model.layers.1.mlp.gate.weight is missing",
    ),
    "one expert more than config.json says": (
        False,
        put("model.layers.0.mlp.experts.6.up_proj.weight", lambda t: torch.ones(48, 32)),
        "experts.6.up_proj.weight is not known",
    ),
    "config.json has more experts": (False, edit(num_experts=7), "experts.6.gate_proj.weight is"),
    "config.json has fewer experts": (
        False,
        edit(num_experts=5),
        r"gate.weight has the shape \(6, 32\), and must have \(5, 32\)",
    ),
    "experts are counted from 1": (False, renumber_experts, "experts.0.gate_proj.weight is missi"),
    "an expert of another width": (
        False,
        put(f"{EXPERT}.up_proj.weight", lambda t: t[f"{EXPERT}.up_proj.weight"][:40]),
        rf"{EXPERT}.up_proj.weight has the shape \(40, 32\)",
    ),
    "a transposed expert": (
        False,
        put(f"{EXPERT}.up_proj.weight", lambda t: t[f"{EXPERT}.up_proj.weight"].t()),
        r"has the shape \(32, 48\), and must have \(48, 32\)",
    ),
    "an expert in both layouts": (
        True,
        put(f"{EXPERT}.up_proj.weight", lambda t: torch.ones(48, 32)),
        f"has {EXPERT}.up_proj.weight, and {WHOLE} with the same weights",
    ),
    "the tensor of all experts lacks one": (
        True,
        put(WHOLE, lambda t: t[WHOLE][:5]),
        "experts.5.gate_proj.weight is missing",
    ),
    "the tensor of all experts is transposed": (
        True,
        put(WHOLE, lambda t: t[WHOLE].transpose(1, 2)),
        r"gate_proj.weight has the shape \(16, 96\), and must have \(48, 32\)",
    ),
    "the tensor of all experts is flat": (
        True,
        put(WHOLE, lambda t: t[WHOLE].flatten(0, 1)),
        "experts.0.gate_proj.weight is missing",
    ),
    "more experts for a token than there are": (
        False,
        edit(num_experts_per_tok=9),
        "num_experts_per_tok 9 of 6 experts is not supported",
    ),
    "one expert": (False, edit(num_experts=1), "of 1 experts is not supported"),
    "the number of experts is a text": (False, edit(num_experts="many"), "field .num_experts."),
    "values that are limited": (
        False,
        edit(clip_qkv=8.0),
        "clip_qkv 8.0 is not supported here, only None",
    ),
    "a file is missing": (False, cut_a_shard, "has no b.safetensors, which its index names"),
    "weights of another rule for the weights": (
        False,
        edit(norm_topk_prob="yes"),
        "norm_topk_prob",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("olmoe")
    return {
        grouped: save_theirs("olmoe", root / str(grouped), grouped=grouped)
        for grouped in (False, True)
    }


@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_a_bad_folder_is_refused(bad: str, folders: dict[bool, Path], tmp_path: Path) -> None:
    grouped, damage, message = BAD_FOLDERS[bad]
    source = shutil.copytree(folders[grouped], tmp_path / "source")
    damage(source)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_model(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


# ---- What no class has ----

OTHER_MIXTURES: dict[str, tuple[dict[str, object], str]] = {
    "sigmoid": ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
    "groups": (
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        "--moe-router-(num-groups 2|group-topk 1) has no equivalent",
    ),
    "a shared expert": (
        {"moe_shared_expert_intermediate_size": 16},
        "--moe-shared-expert-intermediate-size 16 has no equivalent",
    ),
    "a factor": (
        {"moe_router_topk_scaling_factor": 2.5},
        "--moe-router-topk-scaling-factor 2.5 has no equivalent",
    ),
    "biases": ({"add_mlp_bias": True}, "--no-add-mlp-bias"),
    "gpt-oss": ({"glu_activation": "clamped_swiglu"}, "--glu-activation clamped_swiglu"),
}


@pytest.mark.parametrize("part", OTHER_MIXTURES)
def test_a_mixture_that_no_class_has_is_refused(part: str) -> None:
    changes, message = OTHER_MIXTURES[part]
    model = tiny_config(num_layers=4, **{**FAMILIES["qwen3-moe"].ours, **changes})
    with pytest.raises(ConfigError, match=message):
        choose_architecture(model)


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_dense_layers_between_those_with_experts_need_qwen3(family: str) -> None:
    model = tiny_config(num_layers=4, **{**FAMILIES[family].ours, "moe_layer_freq": "2"})
    with pytest.raises(ConfigError, match="all layers of the class have experts"):
        choose_architecture(model, family)


# ---- MXFP4 ----


def save_quantised(folder: Path) -> tuple[Path, Path]:
    """Save a gpt-oss with experts in MXFP4, and the same model with transformers' bf16 values."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_local_experts": 3, "num_experts_per_tok": 2, "vocab_size": 101}
    config = transformers.GptOssConfig(**sizes, pad_token_id=None, max_position_embeddings=64)
    model = transformers.GptOssForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "plain")
    shutil.copytree(folder / "plain", folder / "packed")
    plain = load_file(folder / "plain/model.safetensors")
    packed = dict(plain)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        number, inner, outer = packed.pop(name).shape
        blocks = torch.randint(
            0, 256, (number, outer, inner // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(118, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone()).contiguous()
    save_file(plain, folder / "plain/model.safetensors", metadata={"format": "pt"})
    save_file(packed, folder / "packed/model.safetensors", metadata={"format": "pt"})
    return folder / "plain", folder / "packed"


def test_mxfp4_is_imported_with_the_bits_of_transformers(tmp_path: Path) -> None:
    plain, packed = save_quantised(tmp_path)
    import_model(packed, tmp_path / "ours")
    export_checkpoint(
        open_checkpoint(tmp_path / "ours", 0), tmp_path / "back", ExportOptions(dtype="bf16")
    )
    written = load_file(tmp_path / "back/model.safetensors")
    expected = load_file(plain / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.mark.parametrize("end", ["_scales", "_blocks"])
def test_half_of_a_tensor_in_mxfp4_is_refused(end: str, tmp_path: Path) -> None:
    _, packed = save_quantised(tmp_path)
    whole = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(packed, lambda tensors: tensors.__delitem__(whole + end))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\.down"):
        import_model(packed, tmp_path / "ours")


def test_every_name_of_an_expert_is_another() -> None:
    for family in ("olmoe", "qwen3-moe", "mixtral"):
        architecture = choose_architecture(
            tiny_config(num_layers=4, seq_length=16, **FAMILIES[family].ours)
        )
        assert architecture.experts is not None
        names = [
            architecture.experts.name_matrix(prefix, number, part)
            for prefix, number, part in itertools.product(
                ("a.", "b."), range(3), ("gate", "up", "down")
            )
        ]
        assert len(set(names)) == len(names) == 18


TIES = [
    ("olmoe", 0, True),
    ("olmoe", 2, True),
    ("olmoe", 4, False),
    ("llama", 1, False),
]
"""Family, inputs that differ, and whether it is accepted."""

# ---- Two experts that are nearly equally good ----


@pytest.mark.parametrize(("family", "failures", "accepted"), TIES)
def test_a_tie_that_rounding_decides_is_no_mistake(
    family: str,
    failures: int,
    accepted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other inputs are tried. A difference for all of them, or without experts, is a mistake."""
    folder = save_theirs(family, tmp_path / "theirs")
    measure = compare._compare_logits
    attempts = []

    def differ(hf: HfModel, layers: int, attempt: int = 0) -> tuple[float, float, float]:
        attempts.append(attempt)
        found = measure(hf, layers, attempt)
        return (0.03, *found[1:]) if attempt < failures else found

    monkeypatch.setattr(compare, "_compare_logits", differ)
    if accepted:
        import_model(folder, tmp_path / "ours")
        assert attempts == list(range(failures + 1))
        return
    with pytest.raises(CheckpointError, match="the logits of the complete model"):
        import_model(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
