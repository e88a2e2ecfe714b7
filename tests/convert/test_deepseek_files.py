"""What only files of DeepSeek have: weights in FP8 with scales, and a bias that stays in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.test_convert import edit_config, save_theirs
from model.builders import tiny_config
from model.reference_models import FAMILIES
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.extras.interop.convert.export import ExportOptions, export_checkpoint
from megatron.extras.interop.convert.hf_files import HfTensors
from megatron.extras.interop.convert.importing import import_model
from megatron.extras.interop.convert.latent_fields import DeepseekExperts
from megatron.extras.interop.convert.packed import RowPart
from megatron.extras.interop.convert.quantised import list_scales, read_fp8

BALANCE = "model.layers.1.mlp.gate.e_score_correction_bias"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, and the scale of each block."""
    rows, columns = list_scales(tuple(weight.shape))
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = (slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1)))
            scales[row, column] = weight[block].abs().max() / 448
            quantised[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return quantised, scales


def test_blocks_at_the_end_are_smaller() -> None:
    weight = torch.randn(576, 300, generator=torch.Generator().manual_seed(1))
    # Blocks whose scales differ much.
    weight[512:, 256:] *= 100
    quantised, scales = quantise(weight)
    assert scales.shape == (5, 3)
    found = read_fp8(quantised, scales)
    assert found.dtype == torch.bfloat16
    for row, column in ((0, 0), (127, 128), (511, 255), (512, 256), (575, 299)):
        expected = quantised[row, column].float() * scales[row // 128, column // 128]
        assert found[row, column] == expected.to(torch.bfloat16)


def test_a_model_in_fp8_is_imported(tmp_path: Path) -> None:
    source = save_theirs("deepseek-v3", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    matrices = [name for name in tensors if "proj" in name]
    assert len(matrices) > 20
    expected = {}
    for name in matrices:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensors[name])
        expected[name] = read_fp8(tensors[name], tensors[f"{name}_scale_inv"])
    generator = torch.Generator().manual_seed(2)
    tensors[BALANCE] = 0.1 * torch.randn(tensors[BALANCE].shape, generator=generator)
    # The layer that predicts a second token.
    tensors["model.layers.61.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    # The fields of the published file that transformers writes in another way, or not at all.
    config |= {
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rope_theta": scaling.pop("rope_theta"),
        "rope_scaling": {"type": scaling.pop("rope_type"), **scaling},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    (source / "config.json").write_text(json.dumps(config))
    # The code that comes with the published files is not run.
    for file in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (source / file).write_text("raise SystemExit('the code was run')")
    lines: list[str] = []
    compared = import_model(source, tmp_path / "ours", log=lines.append)
    assert compared.same_argmax == 1
    assert any("predicts a second token" in line for line in lines)
    checkpoint = open_checkpoint(tmp_path / "ours", 0)
    export_checkpoint(checkpoint, tmp_path / "back", ExportOptions(dtype="bf16"))
    back = HfTensors(tmp_path / "back")
    for name, tensor in expected.items():
        assert torch.equal(back.read(name), tensor), name
    # Steps of 0.001 would be lost in 16 bits.
    assert back.read(BALANCE).dtype == torch.float32
    assert torch.equal(back.read(BALANCE), tensors[BALANCE])


def test_a_weight_in_fp8_needs_its_scales(tmp_path: Path) -> None:
    weight, scales = quantise(torch.randn(200, 100))
    save_file({"w": weight, "w_scale_inv": scales[:1]}, tmp_path / "model.safetensors")
    problem = HfTensors(tmp_path).describe_problem("w", (200, 100))
    assert problem is not None
    assert "w is F8_E4M3" in problem


def test_a_part_and_some_rows_of_a_weight_in_fp8_are_read(tmp_path: Path) -> None:
    weight, scales = quantise(torch.randn(200, 100))
    save_file({"w.weight": weight, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    whole = read_fp8(weight, scales)
    assert torch.equal(HfTensors(tmp_path).read("w.weight", (150, 170)), whole[150:170])
    part = RowPart(2, 100, slice(30, 40))
    found = HfTensors(tmp_path, lambda name, shape: {"part": part}).read("part")
    assert torch.equal(found, torch.cat((whole[30:40], whole[130:140])))


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    r"weight_block_size \[64, 64\] is not supported, only \[128, 128\]": (
        "deepseek-v3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
    ),
    r"which is not run": ("deepseek-v3", {"auto_map": {"AutoModel": "modeling_x.DeepseekV3Model"}}),
    "has no attribute": ("deepseek-v3", {"auto_map": ["x"]}),
    "head_dim 4 must be equal to qk_rope_head_dim 6": ("deepseek-v3", {"head_dim": 4}),
    "num_key_value_heads 2 must be equal to num_attention_heads 4": (
        "deepseek-v3",
        {"num_key_value_heads": 2},
    ),
    "num_experts_per_tok 9 must be from 1 to n_routed_experts 8": (
        "deepseek-v3",
        {"num_experts_per_tok": 9},
    ),
    "n_group 3 must divide n_routed_experts 8": ("deepseek-v3", {"n_group": 3}),
    "n_group 0 must divide": ("deepseek-v3", {"n_group": 0}),
    "topk_group 4 must be from 1 to n_group": ("deepseek-v2", {"topk_group": 4}),
    "topk_method noaux_tc is not supported": ("deepseek-v2", {"topk_method": "noaux_tc"}),
    "--kv-lora-rank -1, which must be at least 1": ("deepseek-v3", {"kv_lora_rank": -1}),
    "field of a wrong kind": ("deepseek-v3", {"v_head_dim": None}),
    "--moe-shared-expert-intermediate-size -1, which must be": (
        "qwen3-next",
        {"shared_expert_intermediate_size": -1},
    ),
    "decoder_sparse_step 0 must be at least 1": ("qwen3-next", {"decoder_sparse_step": 0}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_config_that_contradicts_itself_is_refused(message: str, tmp_path: Path) -> None:
    family, changed = MISTAKES[message]
    source = save_theirs(family, tmp_path / "source")
    edit_config(source, **changed)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_model(source, tmp_path / "ours")


def test_one_group_of_experts_is_none() -> None:
    """It allows all experts, whatever their scores add up to."""
    parts = dict(FAMILIES["moonlight"].ours) | {"num_layers": 4}
    one = {"moe_router_num_groups": 1, "moe_router_group_topk": 1}
    pair = DeepseekExperts("V3")
    assert pair.write(tiny_config(**parts | one)) == pair.write(tiny_config(**parts))
    several = {"moe_router_num_groups": 4, "moe_router_group_topk": 3}
    with pytest.raises(ConfigError, match="as its best 2 in the class"):
        pair.write(tiny_config(**parts | several))
