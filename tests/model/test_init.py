"""Tests of the weight initialisation: the table in the docstring, the specs and the values."""

import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from model.builders import VOCAB, build, tiny_config

from megatron.model import init
from megatron.model.gpt import GPT
from megatron.model.init import draw_normal_slice, initialise
from megatron.model.layer_parts import list_layer_parameters
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.parameter_spec import Init, ParameterSpec

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "position_embedding_type": "rotary",
        "normalization": "RMSNorm",
        "glu_activation": "swiglu",
        "ffn_hidden_size": 80,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "apertus": {
        "position_embedding_type": "rotary",
        "normalization": "RMSNorm",
        "activation": "xielu",
        "qk_norm": "head",
        "untie_embeddings_and_output_weights": True,
    },
    "olmo": {
        "position_embedding_type": "rotary",
        "normalization": "RMSNorm",
        "norm_placement": "output",
        "qk_norm": "full",
        "num_query_groups": 2,
        "softmax_type": "learnable",
    },
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "deepseek": {"multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16},
    "hybrid": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "2",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "attention_output_gate": True,
    },
}
DISTRIBUTIONS = {
    Init.TABLE: "N(0, sigma)",
    Init.VECTOR: "N(0, sigma)",
    Init.NORMAL: "N(0, sigma)",
    Init.SCALED_NORMAL: "N(0, sigma / sqrt(2 layers))",
    Init.ONE: "1",
    Init.ZERO: "0",
    Init.XIELU_P: "log(exp(0.8) - 1)",
    Init.XIELU_N: "log(exp(0.3) - 1)",
    Init.CONVOLUTION: "U(-1, 1) / sqrt(kernel)",
    Init.DECAY_RATE: "log U(0.01, 16)",
    Init.TIME_STEP: "1 or log(exp(10^U(-3,-1))-1)",
}

CONSTANTS = {
    Init.ONE: 1.0,
    Init.TIME_STEP: 1.0,
    Init.ZERO: 0.0,
    Init.XIELU_P: math.log(math.exp(0.8) - 1),
    Init.XIELU_N: math.log(math.exp(0.3) - 1),
}


def read_table() -> dict[str, tuple[Init, str]]:
    """Return the table of `model/init.py`: pattern of names -> (kind, distribution)."""
    assert init.__doc__ is not None
    rows = [line for line in init.__doc__.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {pattern: (Init[kind], what) for pattern, kind, what in cells[1:]}


def collect_specs(shape_name: str) -> dict[str, ParameterSpec]:
    """Return the specs of a model, also of a tied output matrix on a stage of its own."""
    shape = ModelShape(tiny_config(**SHAPES[shape_name]), VOCAB, 128)
    specs: dict[str, ParameterSpec] = {}
    stages = (
        Stage(0, range(1), first=True, last=False),
        Stage(1, range(1, 2), first=False, last=True),
    )
    for stage in stages:
        with torch.device("meta"):
            model = GPT(shape, TensorParallel(), stage)
        specs |= {name: p.spec for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return specs


@pytest.mark.parametrize("shape", SHAPES)
def test_each_parameter_has_the_kind_of_its_row_in_the_table(shape: str) -> None:
    table = read_table()
    specs = collect_specs(shape)
    for name, spec in specs.items():
        rows = [kind for pattern, (kind, _) in table.items() if fnmatchcase(name, pattern)]
        if name.split(".")[2:3] == ["attention"] and len(rows) > 1:
            assert rows.pop() is Init.VECTOR
        assert rows == [spec.init], name
        # Both ends of a tied embedding must start from the same values.
        if spec.copy_of is not None:
            assert spec.init is specs[spec.copy_of].init


MIXTURE = {
    "num_experts": 4,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}


@pytest.mark.parametrize("changes", [*SHAPES.values(), MIXTURE])
def test_each_parameter_of_a_layer_is_that_of_its_rows(changes: dict[str, Any]) -> None:
    shape = ModelShape(tiny_config(**changes), VOCAB, 128)
    listed = list_layer_parameters(shape, shape.describe_layer(0))
    with torch.device("meta"):
        block = GPT(shape, TensorParallel()).get_blocks()[0]
    assert {name: p.spec for name, p in block.named_parameters()} == listed  # type: ignore[attr-defined]


def test_each_row_of_the_table_is_used_and_says_what_its_kind_is() -> None:
    names = {name for shape in SHAPES for name in collect_specs(shape)}
    table = read_table()
    assert {kind for kind, _ in table.values()} == set(Init)
    for pattern, (kind, distribution) in table.items():
        assert any(fnmatchcase(name, pattern) for name in names), pattern
        assert distribution == DISTRIBUTIONS[kind]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_have_the_distribution_of_the_kind(shape: str) -> None:
    """The deviations follow from --init-method-std here, not from the code."""
    config = tiny_config(**SHAPES[shape], init_method_std=0.03)
    output = 0.03 / math.sqrt(2 * config.num_layers)
    drawn = (Init.TABLE, Init.VECTOR, Init.NORMAL)
    deviations = dict.fromkeys(drawn, 0.03) | {Init.SCALED_NORMAL: output}
    specs = collect_specs(shape)
    for name, parameter in build(config).named_parameters():
        kind = specs[name].init
        real = parameter.detach()[: specs[name].shape[0]]
        if kind in deviations:
            normal = draw_normal_slice(7, name, specs[name].shape, (0, 0), tuple(real.shape))
            expected = torch.from_numpy(normal) * deviations[kind]
            torch.testing.assert_close(real, expected, rtol=1e-6, atol=0.0)
        elif kind == Init.CONVOLUTION:
            assert 0.45 < real.abs().max() <= 0.5
            assert abs(float(real.mean())) < 0.02
        elif kind == Init.DECAY_RATE:
            assert bool(((real.exp() > 0.01) & (real.exp() < 16)).all())
        else:
            assert torch.equal(real, torch.full_like(real, CONSTANTS[kind]))
        assert not parameter[specs[name].shape[0] :].any()


def test_the_name_does_not_decide_the_kind() -> None:
    """A new weight whose name looks like a norm, a bias or an output gets what its spec says."""
    shape = ModelShape(tiny_config(), VOCAB, 128)
    for name in ("some.norm.weight", "some.bias", "some.attention.out.weight", "some.gate"):
        for kind, value in ((Init.ZERO, 0.0), (Init.ONE, 1.0)):
            tensor = torch.full((4, 3), torch.nan)
            initialise(name, kind, tensor, (4, 3), (0, 0), shape, seed=7)
            assert torch.equal(tensor, torch.full((4, 3), value))
        for kind, deviation in (
            (Init.NORMAL, shape.init_std),
            (Init.SCALED_NORMAL, shape.output_init_std),
        ):
            initialise(name, kind, tensor, (4, 3), (0, 0), shape, seed=7)
            drawn = torch.from_numpy(draw_normal_slice(7, name, (4, 3), (0, 0), (4, 3)))
            assert torch.equal(tensor, drawn.mul_(deviation))


def test_a_spec_must_state_its_kind() -> None:
    with pytest.raises(TypeError, match="init"):
        ParameterSpec((4, 3))  # type: ignore[call-arg]
