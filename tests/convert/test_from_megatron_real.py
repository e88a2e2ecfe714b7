"""Import of checkpoints that DeepSpeed and Megatron core wrote themselves.

The files are in tests/fixtures/megatron, with the programs that made them:

- core-torch-dist: megatron-core 0.16.1, a model like Llama with Adam's moments.
- deepspeed-zero1: DeepSpeed 0.19.8, a pipeline like BigScience's GPT in bf16 with ZeRO 1, at 2
  stages x 2 tensor-parallel x 2 data-parallel ranks.
- deepspeed-universal: the same, converted by DeepSpeed's ds_to_universal.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from convert.megatron_writers import read_saved
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.load import open_checkpoint
from megatron.commands import convert_checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron"
CORE = {
    "embedding.word.weight": "embedding.word_embeddings.weight",
    "head.weight": "output_layer.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "input_norm.weight": "input_layernorm.weight",
    "attention.qkv.weight": "self_attention.linear_qkv.weight",
    "attention.out.weight": "self_attention.linear_proj.weight",
    "post_attention_norm.weight": "pre_mlp_layernorm.weight",
    "mlp.down.weight": "mlp.linear_fc2.weight",
}


def read_core_truth() -> Callable[[str, str], Tensor]:
    """Return a function that gives the model's own tensor for one of ours."""
    truth = load_file(FIXTURES / "core-torch-dist" / "truth.safetensors")

    def find(kind: str, ours: str) -> Tensor:
        prefix = f"{kind}/"
        if ours.startswith("blocks."):
            _, layer, ours = ours.split(".", 2)
            prefix += f"decoder.layers.{layer}."
        if ours in ("mlp.gate.weight", "mlp.up.weight"):
            gate, up = truth[f"{prefix}mlp.linear_fc1.weight"].chunk(2)
            return gate if "gate" in ours else up
        return truth[prefix + CORE[ours]]

    return find


DEEPSPEED = {
    "input_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def read_deepspeed_truth() -> Callable[[str, str], Tensor]:
    """Return a function that joins the tensors that DeepSpeed gave on each rank."""
    ranks = {
        (stage, rank): load_file(
            FIXTURES / "deepspeed-zero1" / f"truth_pp{stage}_tp{rank}.safetensors"
        )
        for stage in range(2)
        for rank in range(2)
    }

    def find(kind: str, ours: str) -> Tensor:
        stage = 0
        if ours == "embedding.word.weight":
            name = "tied_modules.embed.word_embeddings.weight"
        elif ours == "embedding.position":
            name = "tied_modules.embed.position_embeddings.weight"
        elif ours.startswith("head.norm."):
            stage = 1
            name = f"6.{ours.removeprefix('head.norm.')}"
        else:
            _, layer, inside = ours.split(".", 2)
            stage = int(layer)
            module, _, leaf = inside.rpartition(".")
            name = f"{stage + 3}.{DEEPSPEED[module]}.{leaf}"
        key = f"{'fp32' if kind == 'weight' else kind}/{name}"
        parts = [ranks[stage, rank][key] for rank in range(2)]
        if any(each in ours for each in ("word", "qkv", "mlp.up")):
            return torch.cat(parts)[:100] if "word" in ours else torch.cat(parts)
        if ours.endswith(("out.weight", "down.weight")):
            return torch.cat(parts, dim=1)
        return parts[0]

    return find


@pytest.mark.parametrize(
    ("fixture", "system", "truth", "steps"),
    [
        ("core-torch-dist", "megatron-lm", read_core_truth, 1),
        ("deepspeed-zero1", "megatron-deepspeed", read_deepspeed_truth, 7),
        ("deepspeed-universal", "megatron-deepspeed", read_deepspeed_truth, 7),
    ],
)
def test_tensors_are_those_of_the_other_program(
    fixture: str,
    system: str,
    truth: Callable[[], Callable[[str, str], Tensor]],
    steps: int,
    tmp_path: Path,
) -> None:
    out = tmp_path / "imported"
    command = [f"from-{system}", "--load", str(FIXTURES / fixture), "--out", str(out)]
    assert convert_checkpoint.main(command) == 0
    saved = read_saved(open_checkpoint(out, 5))
    assert saved.steps == steps
    assert {kind for kind, _ in saved.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
    find = truth()
    for (kind, ours), tensor in saved.tensors.items():
        assert torch.equal(tensor, find(kind, ours)), (kind, ours)
    assert saved.state["consumed_samples"] == 20
    assert saved.state["consumed_tokens"] == 320
