"""Parameters, FLOPs and memory equal published numbers and those of the built module."""

import dataclasses
import itertools
from fractions import Fraction
from typing import Any, get_args

import pytest
import torch

from megatron.config.model import ModelConfig, Normalization
from megatron.extras.planner.commands.plan_estimates import (
    PaperActivations,
)
from megatron.extras.planner.cost.memory import (
    estimate_parameter_memory,
)
from megatron.model import flops
from megatron.model.execution import Execution
from megatron.model.gpt import GPT
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

GPT2 = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32)
LLAMA = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=4096,
    ffn_hidden_size=11008,
    position_embedding_type="rotary",
    normalization="RMSNorm",
    glu_activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
TR11 = ModelConfig(
    num_layers=70,
    hidden_size=14336,
    num_attention_heads=112,
    seq_length=2048,
    position_embedding_type="alibi",
    embed_layernorm=True,
)


def shaped(model: ModelConfig, padded_vocab_size: int = 256) -> ModelShape:
    return ModelShape(model, padded_vocab_size, padded_vocab_size)


def test_parameters_of_published_models():
    assert flops.count_parameters(shaped(TR11, 250_880)) == 176_247_271_424
    assert flops.count_parameters(shaped(LLAMA, 32_000)) == 6_738_415_616  # Llama 2 7B
    small = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024)
    assert flops.count_parameters(shaped(small, 50_257)) == 124_439_808  # GPT-2
    grouped = dataclasses.replace(LLAMA, num_query_groups=8, ffn_hidden_size=14336)
    assert flops.count_parameters(shaped(grouped, 32_000)) == 7_241_732_096  # Mistral 7B
    wide_heads = dataclasses.replace(
        LLAMA,
        num_layers=28,
        hidden_size=3072,
        num_attention_heads=16,
        kv_channels=256,
        ffn_hidden_size=24576,
    )
    tied = dataclasses.replace(wide_heads, untie_embeddings_and_output_weights=False)
    assert flops.count_parameters(shaped(tied, 256_000)) == 8_537_680_896  # Gemma 7B


def test_parameters_of_gpt2_by_formula():
    n = GPT2.num_layers
    h = GPT2.hidden_size
    s = GPT2.seq_length
    v = 1024
    counted = flops.count_parameters(shaped(GPT2, v))
    assert counted == n * (12 * h**2 + 13 * h) + v * h + s * h + 2 * h
    table = dataclasses.replace(GPT2, max_position_embeddings=100)
    assert flops.count_parameters(shaped(table, v)) - counted == (100 - s) * h


def count_built_parameters(shape: ModelShape, tp: TensorParallel) -> int:
    """Count the parameters of the real module, which is built without memory."""
    with torch.device("meta"):
        model = GPT(shape, tp)
    return sum(parameter.numel() for parameter in model.parameters())


def test_counts_equal_those_of_the_built_model():
    switches: dict[str, list[Any]] = {
        "num_query_groups": [None, 2],
        "normalization": list(get_args(Normalization)),
        "glu_activation": [None, "geglu"],
        "add_bias_linear": [True, False],
        "untie_embeddings_and_output_weights": [True, False],
        "embed_layernorm": [True, False],
        "position_embedding_type": ["absolute", "rotary"],
    }
    for values in itertools.product(*switches.values()):
        model = dataclasses.replace(GPT2, **dict(zip(switches, values, strict=True)))
        assert flops.count_parameters(shaped(model)) == count_built_parameters(
            shaped(model), TensorParallel()
        )
        assert flops.count_stage_parameters(shaped(model), 2, (3,)) == (
            count_built_parameters(shaped(model), TensorParallel(size=2)),
        )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"glu_activation": "swiglu", "num_query_groups": 2},
        {"num_experts": 6, "moe_layer_freq": "2", "moe_ffn_hidden_size": 20},
        {
            "num_experts": 6,
            "glu_activation": "swiglu",
            "moe_shared_expert_intermediate_size": 24,
            "moe_shared_expert_gate": True,
            "add_bias_linear": False,
        },
        {
            "num_experts": 6,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": "2",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ],
)
def test_matrices_of_layers_are_those_that_muon_updates(more: dict[str, Any]) -> None:
    shape = shaped(dataclasses.replace(GPT2, **more))
    with torch.device("meta"):
        model = GPT(shape, TensorParallel())
    matrices = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and parameter.dim() == 2 and not name.endswith("_convolution")
    ]
    assert flops.count_matrix_parameters(shape) == sum(matrices)


HYBRID: dict[str, Any] = {
    "num_layers": 3,
    "norm_placement": "output",
    "num_query_groups": 2,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "3",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_norm_placement": "input",
}


@pytest.mark.parametrize("tensor", [1, 2])
def test_counts_of_a_hybrid_equal_those_of_the_built_model(tensor: int) -> None:
    shape = shaped(dataclasses.replace(GPT2, **HYBRID))
    built = count_built_parameters(shape, TensorParallel(size=tensor))
    counts = (3,), None, 1, (2,)
    assert flops.count_stage_parameters(shape, tensor, *counts) == (built,)


def test_flops_of_a_hybrid_by_formula() -> None:
    """The state of a head has 5 x 7 numbers, and a token uses each in three products."""
    shape = shaped(dataclasses.replace(GPT2, **HYBRID))
    h, s = shape.config.hidden_size, shape.config.seq_length
    # Queries, keys, values, gate, beta, alpha and the output projection.
    delta_net = h * (2 * 2 * 5 + 3 * 6 * 7 + 2 * 6)
    # Queries, gate, output projection, and two groups of keys and values.
    q = shape.config.num_attention_heads * shape.head_dim
    attention = h * (3 * q + 2 * 2 * shape.head_dim)
    expected = 2 * (2 * delta_net + attention + 3 * 8 * h * h) + 2 * 3 * 2 * 6 * 5 * 7 + 4 * s * q
    assert flops.count_forward_flops_per_token(shape)[0] == expected


def test_counts_of_each_part_equal_those_of_the_built_model():
    """The parts that are not in the product above, each alone and with what it depends on."""
    parts: list[dict[str, Any]] = [
        {"qk_norm": "head"},
        {"qk_norm": "head", "norm_bias": False},
        {"qk_norm": "head", "normalization": "RMSNorm", "num_query_groups": 2},
        {"qk_norm": "full", "normalization": "RMSNorm", "num_query_groups": 2},
        {"num_query_groups": 1},
        {"num_query_groups": 1, "add_bias_linear": False, "add_qkv_bias": True},
        {"num_query_groups": 1, "add_bias_linear": False, "add_attention_bias": True},
        {"glu_activation": "swiglu", "add_bias_linear": False, "add_mlp_bias": True},
        {"norm_placement": "output"},
        {"parallel_residual": True},
        {"norm_bias": False, "embed_layernorm": True},
        {"add_bias_linear": False, "add_qkv_bias": True, "num_query_groups": 2},
        {"activation": "squared_relu"},
        {"activation": "xielu"},
        {"sliding_window": 8, "full_attention_layers": "1"},
        {"position_embedding_type": "rotary", "no_rope_layers": "1", "rope_scaling": "llama3"},
    ]
    for changes in parts:
        shape = shaped(dataclasses.replace(GPT2, **changes))
        assert flops.count_parameters(shape) == count_built_parameters(shape, TensorParallel())
        assert flops.count_stage_parameters(shape, 2, (3,)) == (
            count_built_parameters(shape, TensorParallel(size=2)),
        )


def test_a_sliding_window_saves_flops_in_its_layers():
    full = flops.count_forward_flops_per_token(shaped(GPT2))[0]
    changes: dict[str, Any] = {"sliding_window": 8, "full_attention_layers": "1"}
    windowed = flops.count_forward_flops_per_token(shaped(dataclasses.replace(GPT2, **changes)))[0]
    # Scores and weighted sums of two layers: 2 x 2 x 64 for each key, of which there are 24 fewer.
    assert full - windowed == 2 * 4 * 64 * (32 - 8)
    # A shorter sequence fits into the window.
    shape = shaped(dataclasses.replace(GPT2, **changes))
    assert flops.count_forward_flops_per_token(shape, 8) == flops.count_forward_flops_per_token(
        shaped(GPT2), 8
    )


def test_counts_of_unusual_sizes_equal_those_of_the_built_model():
    model = dataclasses.replace(
        GPT2, ffn_hidden_size=72, kv_channels=24, max_position_embeddings=100, num_query_groups=4
    )
    shape = ModelShape(model, 1000, 1024)
    for size in (1, 4):
        assert flops.count_stage_parameters(shape, size, (3,)) == (
            count_built_parameters(shape, TensorParallel(size=size)),
        )


def test_stages_add_up_to_the_model_and_a_copy_of_the_embedding():
    total = flops.count_parameters(shaped(GPT2, 256))
    embedding = 256 * 64
    assert flops.count_stage_parameters(shaped(GPT2, 256), 1, (3,)) == (total,)
    assert sum(flops.count_stage_parameters(shaped(GPT2, 256), 1, (1, 2))) == total + embedding
    untied = dataclasses.replace(GPT2, untie_embeddings_and_output_weights=True)
    assert sum(flops.count_stage_parameters(shaped(untied, 256), 1, (1, 2))) == total + embedding


def test_tensor_parallel_ranks_shard_matrices_and_replicate_norms():
    h = 64
    # Row-parallel biases, norms, positions and the final norm are replicated.
    replicated = 3 * (2 * h + 4 * h) + 32 * h + 2 * h
    total = flops.count_parameters(shaped(GPT2, 256))
    assert flops.count_stage_parameters(shaped(GPT2, 256), 4, (3,)) == (
        (total - replicated) // 4 + replicated,
    )


def test_logged_tflops_of_tr11():
    work = flops.count_iteration_flops(shaped(TR11, 250_880), 2048, recompute=True)
    assert f"{work / 105.22 / 384 / 1e12:.2f}" == "149.02"
    assert f"{work / 215.82 / 192 / 1e12:.2f}" == "145.31"


@pytest.mark.parametrize(("recompute", "factor", "logits"), [(True, 96, 16), (False, 72, 12)])
def test_iteration_flops_of_gpt2_by_formula(recompute, factor, logits):
    n = 70
    h = 14336
    s = 2048
    v = 250_880
    batch = 512
    expected = factor * batch * s * n * h**2 * (1 + s / (6 * h) + v / (logits * n * h))
    assert flops.count_iteration_flops(
        shaped(TR11, v), batch, recompute=recompute
    ) == pytest.approx(expected, rel=1e-12)


def test_flops_of_a_llama_shape():
    linears = LLAMA.num_layers * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32_000
    attention = LLAMA.num_layers * 2 * 4096 * 4096
    assert flops.count_model_flops_per_token(shaped(LLAMA, 32_000)) == 6 * (linears + attention)
    # Key and value projections shrink to a quarter. The scores keep their size.
    grouped = dataclasses.replace(LLAMA, num_query_groups=8)
    saved = 6 * LLAMA.num_layers * 2 * 4096 * (4096 - 1024)
    full = flops.count_model_flops_per_token(shaped(LLAMA, 32_000))
    assert full - flops.count_model_flops_per_token(shaped(grouped, 32_000)) == saved


def test_hardware_flops_count_the_layers_again_but_not_the_logits():
    shape = shaped(GPT2, 256)
    layers, logits = flops.count_forward_flops_per_token(shape)
    assert flops.count_model_flops_per_token(shape) == 3 * (layers + logits)
    assert flops.count_hardware_flops_per_token(shape) == 3 * (layers + logits)
    recomputed = flops.count_hardware_flops_per_token(shape, recompute=True)
    assert recomputed == 4 * layers + 3 * logits
    third = flops.count_hardware_flops_per_token(shape, recompute=Fraction(1, 3))
    assert third == 3 * layers + layers // 3 + 3 * logits
    # A half of three layers is rounded to layers 1 and 3.
    half = flops.count_hardware_flops_per_token(shape, recompute=0.5)
    assert half == 3 * layers + 2 * layers // 3 + 3 * logits


def layers_of_fms_fsdp(share: float, count: int) -> list[int]:
    """Return the layers that fms-fsdp's loop chooses.

    Its threshold rises by 1 with each layer that it chooses.
    """
    chosen: list[int] = []
    for number in range(1, count + 1):
        if number * share >= len(chosen) + 0.5:
            chosen.append(number)
    return chosen


# fms-fsdp prints the first five in its source; the others were worked out by hand.
@pytest.mark.parametrize(
    ("share", "count", "recomputed"),
    [
        ("0", 6, []),
        ("1", 4, [1, 2, 3, 4]),
        ("1/2", 7, [1, 3, 5, 7]),
        ("1/3", 9, [2, 5, 8]),
        ("2/3", 6, [1, 3, 4, 6]),
        ("1/4", 12, [2, 6, 10]),
        ("1/5", 24, [3, 8, 13, 18, 23]),
        ("0.2", 7, [3]),
        ("1/6", 12, [3, 9]),
        ("3/4", 8, [1, 2, 4, 5, 6, 8]),
        ("1/10", 4, []),
    ],
)
def test_recomputed_layers_equal_those_of_fms_fsdp(share, count, recomputed):
    recomputes = Execution(recomputed_part=Fraction(share)).is_recomputed
    assert [layer + 1 for layer in range(count) if recomputes(layer)] == recomputed
    assert layers_of_fms_fsdp(float(Fraction(share)), count) == recomputed


def test_every_fraction_recomputes_the_layers_of_fms_fsdp():
    """The layers are the same even where rounding decides.

    For 7/10, exact arithmetic would choose layer 45, and fms-fsdp chooses layer 46.
    """
    shares = {Fraction(a, b) for b in range(1, 33) for a in range(b + 1)}
    shares |= {Fraction(f"{percent / 100:.2f}") for percent in range(101)}
    for share in shares:
        recomputes = Execution(recomputed_part=share).is_recomputed
        ours = [layer + 1 for layer in range(128) if recomputes(layer)]
        assert ours == layers_of_fms_fsdp(float(share), 128), share


@pytest.mark.parametrize("share", [Fraction(0), Fraction(1, 3), Fraction(2, 5), Fraction(1)])
def test_counted_recomputed_layers_equal_those_of_the_model(share):
    recomputes = Execution(recomputed_part=share).is_recomputed
    for start, stop in itertools.combinations(range(13), 2):
        layers = range(start, stop)
        assert flops.count_recomputed_layers(layers, share) == sum(map(recomputes, layers))


def test_shorter_sequences_cost_less_attention():
    full, half = (flops.count_model_flops_per_token(shaped(GPT2, 256), s) for s in (32, 16))
    assert full - half == 3 * 3 * 4 * 16 * 64
    assert flops.count_iteration_flops(shaped(GPT2, 256), 10, 16) == 160 * half


def test_a_parameter_takes_eighteen_bytes():
    memory = estimate_parameter_memory(104_000_000_000, half=True)
    # The notes of the 104B run have this number.
    assert memory.total == 1_872_000_000_000
    assert memory.master_weights == 104_000_000_000 * 4
    assert memory.working_weights == 104_000_000_000 * 2
    assert memory.optimizer_states == 104_000_000_000 * 8
    assert memory.gradients == 104_000_000_000 * 4
    assert estimate_parameter_memory(10, half=False).total == 160


@pytest.mark.parametrize(
    ("stage", "total"), [(0, 18_000), (1, 6_000 + 3_000), (2, 2_000 + 4_000), (3, 4_500)]
)
def test_zero_shards_more_with_each_stage(stage, total):
    memory = estimate_parameter_memory(1000, half=True, data_parallel_size=4, zero_stage=stage)
    assert memory.total == total


def test_zero_in_fp32_has_full_weights_and_the_shard_until_stage_3():
    totals = [
        estimate_parameter_memory(1000, half=False, data_parallel_size=4, zero_stage=z).total
        for z in range(4)
    ]
    assert totals == [16_000, 11_000, 8_000, 4_000]
    alone = estimate_parameter_memory(1000, half=False, data_parallel_size=1, zero_stage=1)
    assert alone.total == 16_000
    assert alone.working_weights == 0


def test_activations_of_gpt2_by_formula():
    s = 32
    b = 2
    h = 64
    a = 4
    for t in (1, 2, 4):
        plain = s * b * h * (10 + 24 / t)
        assert PaperActivations(shaped(GPT2), b, t).layer == plain
        sharded = PaperActivations(shaped(GPT2), b, t, sequence_parallel=True).layer
        assert sharded == s * b * h * 34 / t
        with_scores = PaperActivations(shaped(GPT2), b, t, scores_kept=True).layer
        assert with_scores == plain + 5 * a * s**2 * b / t
    assert PaperActivations(shaped(GPT2), b).layer_input == 2 * s * b * h
    sharded_input = PaperActivations(shaped(GPT2), b, 4, sequence_parallel=True).layer_input
    assert sharded_input == 2 * s * b * h // 4
    assert PaperActivations(shaped(GPT2), b, half=False).layer_input == 4 * s * b * h
    assert PaperActivations(shaped(GPT2, 256), b, 2).logits == 4 * s * b * 256 // 2


def test_activations_without_dropout_have_no_masks():
    bare = dataclasses.replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0)
    with_dropout = PaperActivations(shaped(GPT2), 1).layer
    without_dropout = PaperActivations(shaped(bare), 1).layer
    assert with_dropout - without_dropout == 32 * 2 * 64
    with_scores = PaperActivations(shaped(bare), 1, scores_kept=True).layer
    assert with_scores - without_dropout == 2 * 4 * 32**2


def test_a_stage_keeps_the_inputs_of_recomputed_layers():
    layer = PaperActivations(shaped(GPT2), 2, scores_kept=True).layer
    layer_input = PaperActivations(shaped(GPT2), 2).layer_input
    stage = PaperActivations(shaped(GPT2), 2, scores_kept=True)
    kept = stage.sum_layers(3)
    assert kept == 3 * layer
    recomputed = stage.sum_layers(3, recomputed=2)
    assert recomputed == layer + 2 * layer_input
