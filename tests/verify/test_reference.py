"""The reference of one process: what its formulas must share with the run, and what they refuse."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from model.builders import tiny_config
from verify.mutation import ITERATIONS, MODEL

from megatron.base import exit_codes
from megatron.base.errors import ConfigError
from megatron.commands.verify import VerifyArguments, main, resolve_command
from megatron.config.model import TimeStep
from megatron.config.table import Absent
from megatron.extras.planner.verify.reference_layers import use_recurrence
from megatron.extras.planner.verify.reference_optimizer import FORMULAS
from megatron.extras.planner.verify.reference_parameters import (
    compute_initial_weight,
    decays,
    find_start,
)
from megatron.model.gpt import GPT
from megatron.model.init import initialise
from megatron.model.inputs import Inputs
from megatron.model.layer_parts import ACTIVATIONS, NORMS
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel
from megatron.parallel.parameter_spec import Init, ParameterSpec


@pytest.fixture
def shape() -> ModelShape:
    options = VerifyArguments(world_size=1)
    return resolve_command(options, f"{MODEL} {ITERATIONS}".split())[0].shape


@pytest.mark.parametrize(
    "changes",
    [
        *({"normalization": name} for name, _ in NORMS.list_rows()),
        *({"activation": name} for name, row in ACTIVATIONS.list_rows() if not row.gated),
        *({"glu_activation": name} for name, row in ACTIVATIONS.list_rows() if row.gated),
        {"qk_norm": "full", "normalization": "RMSNorm", "norm_placement": "output"},
        {"num_experts": 4, "moe_shared_expert_intermediate_size": 8, "embed_layernorm": True},
        {"untie_embeddings_and_output_weights": True, "moe_shared_expert_gate": True},
        {"softmax_type": "learnable"},
        {"attention_output_gate": True, "apply_layernorm_1p": True, "normalization": "RMSNorm"},
        {"multi_latent_attention": True, "q_lora_rank": 24},
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "2"},
    ],
    ids=str,
)
def test_the_reference_knows_each_parameter(changes: dict[str, Any], shape: ModelShape) -> None:
    """The run's specs and the rows of the reference are written apart, and say the same."""
    config = replace(shape.config, **({"qk_norm": "head"} | changes))
    with torch.device("meta"):
        model = GPT(replace(shape, config=config), TensorParallel())
    for name, parameter in model.named_parameters():
        spec: ParameterSpec = parameter.spec  # type: ignore[attr-defined]
        start = find_start(name)
        if start == "norm":
            centred = Init.ZERO if config.apply_layernorm_1p else Init.ONE
            assert (spec.init, spec.decays) == (centred, False), name
            continue
        drawn = {Init.NORMAL: "matrix", Init.SCALED_NORMAL: "output", Init.TABLE: "table"}
        drawn |= {Init.VECTOR: "vector", Init.CONVOLUTION: "kernel"}
        drawn |= {Init.DECAY_RATE: "rate", Init.TIME_STEP: "step"}
        assert decays(name) == spec.decays, name
        assert isinstance(start, float) == (spec.init not in drawn), name
        assert drawn.get(spec.init, start) == start, name


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention\.sinks cannot be verified: .* no row"):
        find_start("blocks.0.attention.sinks")


@pytest.mark.parametrize("rows", [96, 3072])
def test_large_matrices_are_drawn_in_the_blocks_of_the_run(rows: int, shape: ModelShape) -> None:
    """Eight experts of width 384 have more elements than a block."""
    name, size = "blocks.0.mlp.experts.up", (rows, 96)
    expected = torch.empty(size)
    initialise(name, Init.NORMAL, expected, size, (0, 0), shape, 7)
    assert torch.allclose(compute_initial_weight(name, size, shape, 7), expected, rtol=1e-6)


@pytest.mark.parametrize("step", ["one", "log-uniform"])
def test_decays_and_convolutions_start_with_the_values_of_the_run(
    step: TimeStep, shape: ModelShape
) -> None:
    config = replace(shape.config, linear_time_step=step, linear_conv_kernel_dim=4)
    shape = replace(shape, config=config)
    for leaf, kind, size in (
        ("query_convolution", Init.CONVOLUTION, (96, 4)),
        ("A_log", Init.DECAY_RATE, (1000,)),
        ("dt_bias", Init.TIME_STEP, (1000,)),
    ):
        name = f"blocks.0.attention.{leaf}"
        made = torch.empty(size)
        initialise(name, kind, made, size, (0,) * len(size), shape, 7)
        expected = compute_initial_weight(name, size, shape, 7)
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
        bounds = {"A_log": (0.01, 16.0), "dt_bias": (0.001, 0.1)}
        if leaf in bounds and (leaf, step) != ("dt_bias", "one"):
            low, high = bounds[leaf]
            real = made.exp() if leaf == "A_log" else torch.nn.functional.softplus(made)
            assert low * 0.999 <= real.min() < real.max() <= high * 1.001
            assert real.max() > 0.9 * high


def test_gated_delta_nets_token_by_token_equal_those_of_the_run() -> None:
    """The samples have a document of one token, and chunks that end within documents."""
    config = tiny_config(
        seq_length=96,
        position_embedding_type="rotary",
        normalization="RMSNorm",
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq="2",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    )
    torch.manual_seed(1)
    model = GPT(ModelShape(config, 100, 128), TensorParallel()).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    documents = ((0, 1, 40, 96), (0, 96))
    tokens = torch.randint(100, (2, 97))
    inputs = Inputs(tokens[:, :-1], tokens[:, 1:], documents=documents)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            expected = model(None, inputs)
            use_recurrence(model)
            found = model(None, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)


def test_an_optimizer_without_a_formula_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "cannot be verified: the reference has no formula of it"
    monkeypatch.setitem(cast(dict[str, Any], FORMULAS.rows), "muon", Absent(reason))
    command = f"--world-size 1 -- {MODEL} {ITERATIONS} --optimizer"
    assert main([*command.split(), "muon"]) == exit_codes.USER_ERROR
    assert f"--optimizer muon {reason}" in capsys.readouterr().err
