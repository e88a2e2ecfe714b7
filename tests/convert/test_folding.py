"""Tests that a model without a parametrization and with folded weights computes the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.export import fold_description, fold_rows
from megatron.model.gpt import GPT
from megatron.model.init import draw_normal_slice
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

SIZES = ModelConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    seq_length=16,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    parametrization="completep",
    base_width=20,
    base_depth=2,
    base_kv_channels=5,
)
ROTARY: dict[str, Any] = {"position_embedding_type": "rotary", "normalization": "RMSNorm"}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "parallel, biases, untied": {
        "parallel_residual": True,
        "untie_embeddings_and_output_weights": True,
    },
    "groups": {**ROTARY, "num_query_groups": 2, "glu_activation": "swiglu", "kv_channels": 10},
    "norms of heads": {**ROTARY, "num_query_groups": 2, "qk_norm": "head"},
    "norms after": {**ROTARY, "qk_norm": "full", "norm_placement": "output"},
    "mup": {"parametrization": "mup", "base_depth": None, "num_query_groups": 1},
    "norms centred at zero": {
        **ROTARY,
        "apply_layernorm_1p": True,
        "attention_output_gate": True,
        "qk_norm": "head",
    },
    "norms centred at zero after": {
        **ROTARY,
        "apply_layernorm_1p": True,
        "qk_norm": "full",
        "norm_placement": "output",
    },
    "experts": {
        **ROTARY,
        "num_experts": 4,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 8,
        "add_bias_linear": False,
    },
}


def build(config: ModelConfig) -> GPT:
    """Return the model with the same weights for every parametrization."""
    model = GPT(ModelShape(config, 50, 50), TensorParallel())
    for name, parameter in model.named_parameters():
        size = tuple(parameter.shape)
        drawn = draw_normal_slice(3, name, size, (0,) * len(size), size)
        parameter.data.copy_(torch.from_numpy(drawn) * 0.3 + (len(size) == 1))
    return model.eval()


@pytest.mark.parametrize("part", MODELS)
def test_folded_weights_compute_the_same(part: str) -> None:
    """The factors change the logits, and the folded weights have them."""
    config = replace(SIZES, **MODELS[part])
    ours = build(config)
    folded = build(fold_description(config))
    tokens = torch.arange(16).view(1, 16) * 3
    with torch.no_grad():
        expected = ours.compute_logits(tokens)
        unfolded = folded.compute_logits(tokens)
        for name, parameter in folded.named_parameters():
            # Two parts, as an export reads large tensors.
            middle = len(parameter) // 3
            parts = ((0, parameter[:middle]), (middle, parameter[middle:]))
            parameter.copy_(torch.cat([fold_rows(p, name, at, ours.shape) for at, p in parts]))
        found = folded.compute_logits(tokens)
    assert float((unfolded - expected).abs().max()) > 0.1
    assert torch.allclose(found, expected, atol=2e-5, rtol=2e-5)
