"""Presets have the sizes, the values and the parts of the classes of `transformers`.

The published configurations are written here as the models' config.json has them. They are not
derived from the presets.
"""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from model.builders import tiny_config
from model.reference_models import FAMILIES

from megatron.config.presets import list_preset_names, read_preset
from megatron.console.preset_table import build_preset_shape
from megatron.extras.interop.convert.architectures import find_architecture
from megatron.extras.interop.convert.fields import normalise_model
from megatron.model.flops import count_active_parameters, count_parameters

GPT2: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
}
LLAMA2: dict[str, Any] = {
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA3: dict[str, Any] = LLAMA2 | {"vocab_size": 128256, "rope_theta": 500000.0}
OLMO: dict[str, Any] = LLAMA2 | {
    "vocab_size": 100352,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
OLMO3: dict[str, Any] = OLMO | {"sliding_window": 4096}
QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
# Without `layer_types`, every fourth layer has attention.
QWEN_NEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
OLMO_HYBRID: dict[str, Any] = {
    "vocab_size": 100352,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 30,
    "linear_num_value_heads": 30,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 192,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
# The released models have another rope_theta, because their context was extended.
APERTUS: dict[str, Any] = {
    "vocab_size": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMOLLM3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}


def describe(layers: int, width: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    """Return sizes as a config.json names them."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        **more,
    }


# The published files, without what training alone needs. V2 Lite and Moonlight have no latent
# vectors of queries, and one group.
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}
LITE: dict[str, Any] = LATENT | {
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": (
        "DeepseekV2",
        describe(27, 2048, 16, 10944, vocab_size=102400, rms_norm_eps=1e-6, **LITE)
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
        | {"topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        describe(61, 7168, 128, 18432, vocab_size=129280, rms_norm_eps=1e-6, **LATENT)
        | {"num_key_value_heads": 128, "q_lora_rank": 1536, "moe_intermediate_size": 2048}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "moonlight-16b-a3b": (
        "DeepseekV3",
        describe(27, 2048, 16, 11264, vocab_size=163840, rms_norm_eps=1e-5, **LITE)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
        | {"norm_topk_prob": True, "routed_scaling_factor": 2.446},
    ),
}
PYTHIA: dict[str, Any] = {"layer_norm_eps": 1e-5, "rotary_pct": 0.25, "tie_word_embeddings": False}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("GPT2", GPT2 | {"n_layer": 12, "n_embd": 768, "n_head": 12}),
    "gpt2-medium": ("GPT2", GPT2 | {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "gpt2-large": ("GPT2", GPT2 | {"n_layer": 36, "n_embd": 1280, "n_head": 20}),
    "gpt2-xl": ("GPT2", GPT2 | {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "tr1-13b": (
        "GPT2",
        {"vocab_size": 50432, "n_positions": 2048, "n_layer": 40, "n_embd": 5120, "n_head": 32},
    ),
    "tr11-176b": (
        "Bloom",
        {"vocab_size": 250880, "n_layer": 70, "hidden_size": 14336, "n_head": 112}
        | {"layer_norm_epsilon": 1e-5},
    ),
    "gpt-neox-20b": (
        "GPTNeoX",
        describe(44, 6144, 64, 24576, vocab_size=50432, layer_norm_eps=1e-5, rotary_pct=0.25),
    ),
    "pythia-14m": ("GPTNeoX", describe(6, 128, 4, 512, vocab_size=50304, **PYTHIA)),
    "pythia-31m": ("GPTNeoX", describe(6, 256, 8, 1024, vocab_size=50304, **PYTHIA)),
    "pythia-70m": ("GPTNeoX", describe(6, 512, 8, 2048, vocab_size=50304, **PYTHIA)),
    "pythia-160m": ("GPTNeoX", describe(12, 768, 12, 3072, vocab_size=50304, **PYTHIA)),
    "pythia-410m": ("GPTNeoX", describe(24, 1024, 16, 4096, vocab_size=50304, **PYTHIA)),
    "pythia-1b": ("GPTNeoX", describe(16, 2048, 8, 8192, vocab_size=50304, **PYTHIA)),
    "pythia-1.4b": ("GPTNeoX", describe(24, 2048, 16, 8192, vocab_size=50304, **PYTHIA)),
    "pythia-2.8b": ("GPTNeoX", describe(32, 2560, 32, 10240, vocab_size=50304, **PYTHIA)),
    "pythia-6.9b": ("GPTNeoX", describe(32, 4096, 32, 16384, vocab_size=50432, **PYTHIA)),
    "pythia-12b": ("GPTNeoX", describe(36, 5120, 40, 20480, vocab_size=50688, **PYTHIA)),
    "lauzhack-177m": (
        "Llama",
        describe(10, 1024, 16, 2730, vocab_size=50304, tie_word_embeddings=True),
    ),
    "llama2-1.4b": ("Llama", describe(24, 2048, 16, 6144, num_key_value_heads=4, **LLAMA2)),
    "llama2-7b": ("Llama", describe(32, 4096, 32, 11008, num_key_value_heads=32, **LLAMA2)),
    "llama2-13b": ("Llama", describe(40, 5120, 40, 13824, num_key_value_heads=40, **LLAMA2)),
    "llama2-34b": (
        "Llama",
        describe(48, 8192, 64, 22016, num_key_value_heads=8, **LLAMA2 | {"rope_theta": 1e6}),
    ),
    "llama2-70b": ("Llama", describe(80, 8192, 64, 28672, num_key_value_heads=8, **LLAMA2)),
    "llama3-194m-4k": ("Llama", describe(10, 1024, 8, 2816, num_key_value_heads=8, **LLAMA3)),
    "llama3-1.8b": ("Llama", describe(24, 2048, 16, 7168, num_key_value_heads=8, **LLAMA3)),
    "llama3-3.2b": ("Llama", describe(24, 3072, 24, 8192, num_key_value_heads=8, **LLAMA3)),
    "llama3-8b": ("Llama", describe(32, 4096, 32, 14336, num_key_value_heads=8, **LLAMA3)),
    "llama3-70b": ("Llama", describe(80, 8192, 64, 28672, num_key_value_heads=8, **LLAMA3)),
    "mistral-7b": (
        "Mistral",
        describe(32, 4096, 32, 14336, num_key_value_heads=8, **LLAMA2)
        | {"head_dim": 128, "sliding_window": 4096},
    ),
    "mixtral-8x7b": (
        "Mixtral",
        describe(32, 4096, 32, 14336, num_key_value_heads=8, **LLAMA2 | {"rope_theta": 1e6})
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "olmo2-7b": ("Olmo2", describe(32, 4096, 32, 11008, num_key_value_heads=32, **OLMO)),
    "olmo2-32b": ("Olmo2", describe(64, 5120, 40, 27648, num_key_value_heads=8, **OLMO)),
    "olmo3-7b": ("Olmo3", describe(32, 4096, 32, 11008, num_key_value_heads=32, **OLMO3)),
    "olmo3-32b": ("Olmo3", describe(64, 5120, 40, 27648, num_key_value_heads=8, **OLMO3)),
    "olmoe-1b-7b": (
        "Olmoe",
        describe(16, 2048, 16, 1024, num_key_value_heads=16, **LLAMA2 | {"vocab_size": 50304})
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        describe(48, 2048, 32, 6144, tie_word_embeddings=False, **QWEN3)
        | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"num_experts": 128, "num_experts_per_tok": 8},
    ),
    "gpt-oss-20b": ("GptOss", describe(24, 2880, 64, 2880, num_local_experts=32, **GPT_OSS)),
    "gpt-oss-120b": ("GptOss", describe(36, 2880, 64, 2880, num_local_experts=128, **GPT_OSS)),
    "qwen3-next-80b-a3b": ("Qwen3Next", describe(48, 2048, 16, 5120, **QWEN_NEXT)),
    "olmo-hybrid-7b": ("OlmoHybrid", describe(32, 3840, 30, 11008, **OLMO_HYBRID)),
    "smollm3-3b": ("SmolLM3", describe(36, 2048, 16, 11008, **SMOLLM3)),
    "apertus-8b": (
        "Apertus",
        describe(32, 4096, 32, 21504, **APERTUS),
    ),
    "apertus-70b": (
        "Apertus",
        describe(80, 8192, 64, 43008, **APERTUS),
    ),
    "qwen3-0.6b": ("Qwen3", describe(28, 1024, 16, 3072, tie_word_embeddings=True, **QWEN3)),
    "qwen3-1.7b": ("Qwen3", describe(28, 2048, 16, 6144, tie_word_embeddings=True, **QWEN3)),
    "qwen3-4b": ("Qwen3", describe(36, 2560, 32, 9728, tie_word_embeddings=True, **QWEN3)),
    "qwen3-8b": ("Qwen3", describe(36, 4096, 32, 12288, tie_word_embeddings=False, **QWEN3)),
    "qwen3-14b": ("Qwen3", describe(40, 5120, 40, 17408, tie_word_embeddings=False, **QWEN3)),
    "qwen3-32b": ("Qwen3", describe(64, 5120, 64, 25600, tie_word_embeddings=False, **QWEN3)),
    **DEEPSEEK,
}
"""Preset -> class of `transformers`, and the sizes as the model's config.json has them."""


def test_every_preset_with_a_class_of_transformers_is_compared():
    # tr8 is a GPT-2 with a norm after its embedding. `transformers` has no class for it.
    assert set(list_preset_names()) - set(PUBLISHED) == {"tr8-104b"}


def count_in_transformers(model: str, published: dict[str, Any]) -> int:
    """Return the parameters of a model of `transformers`, each counted once.

    All layers have the same parameters, unless some have no attention, or the first ones have no
    experts. Two models of few layers therefore give the total.
    """
    config_class = getattr(transformers, f"{model}Config")
    suffix = "LMHeadModel" if model == "GPT2" else "ForCausalLM"
    model_class = getattr(transformers, f"{model}{suffix}")
    depth_key = "n_layer" if "n_layer" in published else "num_hidden_layers"
    counts = []
    complete = published[depth_key]
    first = 1 + published.get("first_k_dense_replace", 0)
    depths = (first, first + 1)
    for depth in (complete,) if "linear_num_key_heads" in published else depths:
        ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        config = config_class(**published | ids | {depth_key: depth})
        with torch.device("meta"):
            built = model_class(config)
        counts.append(sum(parameter.numel() for parameter in built.parameters()))
    if len(counts) == 1:
        return int(counts[0])
    return int(counts[0] + (complete - first) * (counts[1] - counts[0]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_parameters_of_the_class_of_transformers(name: str):
    expected = count_in_transformers(*PUBLISHED[name])
    assert count_parameters(build_preset_shape(read_preset(name))) == expected


OUR_NAMES = {
    "n_layer": "num_layers",
    "num_hidden_layers": "num_layers",
    "n_embd": "hidden_size",
    "hidden_size": "hidden_size",
    "n_head": "num_attention_heads",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layernorm_epsilon",
    "layer_norm_eps": "layernorm_epsilon",
    "rms_norm_eps": "layernorm_epsilon",
    "rope_theta": "rotary_base",
    "rotary_pct": "rotary_percent",
    "sliding_window": "sliding_window",
    "initializer_range": "init_method_std",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "partial_rotary_factor": "rotary_percent",
}


@pytest.mark.parametrize("name", DEEPSEEK)
def test_a_preset_of_deepseek_is_what_an_import_reads(name: str) -> None:
    model, published = PUBLISHED[name]
    fields = getattr(transformers, f"{model}Config")(**published).to_dict()
    preset = build_preset_shape(read_preset(name)).config
    read = find_architecture(fields["model_type"]).read(fields, preset.seq_length)
    without: dict[str, Any] = {"init_method_std": 0.02, "hidden_dropout": 0, "attention_dropout": 0}
    expected, found = (
        normalise_model(dataclasses.replace(each, **without)) for each in (read, preset)
    )
    assert found == expected


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - DEEPSEEK.keys()))
def test_preset_has_the_values_of_the_published_configuration(name: str):
    _, published = PUBLISHED[name]
    shape = build_preset_shape(read_preset(name))
    for key, value in published.items():
        if key == "vocab_size":
            assert shape.padded_vocab_size == value
        elif key == "tie_word_embeddings":
            assert shape.config.untie_embeddings_and_output_weights is not value
        elif key == "norm_topk_prob":
            assert shape.config.moe_router_pre_softmax is not value
        else:
            assert getattr(shape.config, OUR_NAMES.get(key, key)) == value, key


OF_FAMILY = {
    "apertus": "apertus",
    "deepseek-v2": "deepseek-v2",
    "deepseek-v3": "deepseek-v3",
    "moonlight": "moonlight",
    "gpt": "gpt-neox",
    "gpt-oss": "gpt-oss",
    "gpt2": "gpt2",
    "lauzhack": "llama",
    "llama2": "llama",
    "llama3": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo": "olmo-hybrid",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "olmoe": "olmoe",
    "pythia": "gpt-neox",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3-moe",
    "qwen3-next": "qwen3-next",
    "smollm3": "smollm3",
    "tr1": "gpt2",
    "tr8": "gpt2",
    "tr11": "bloom",
}
"""First word of a preset -> the family whose logits equal those of `transformers`."""
OTHER_PARTS: dict[str, dict[str, Any]] = {
    # The Llama 3 family shows that this scaling is right.
    "apertus": {"rope_scaling": "llama3"},
    # That of V3 shows it.
    "deepseek-v2": {"rope_scaling": "yarn"},
    # Its config.json has gelu_fast, the tanh form.
    "gpt": {"bias_gelu_fusion": True},
    # Its training had the tanh form too, although its config.json has gelu.
    "pythia": {"bias_gelu_fusion": True},
    "tr8": {"embed_layernorm": True},
}


@pytest.mark.parametrize("name", list_preset_names())
def test_preset_has_the_parts_that_were_compared_with_transformers(name: str):
    word = "qwen3-moe" if name == "qwen3-30b-a3b" else name.split("-")[0]
    if name.startswith(("gpt-oss", "deepseek", "qwen3-next")):
        word = "-".join(name.split("-")[:2])
    family = tiny_config(**dict(FAMILIES[OF_FAMILY[word]].ours))
    model = build_preset_shape(read_preset(name)).config
    parts = (
        *("position_embedding_type", "rope_scaling", "normalization", "norm_placement"),
        *("norm_bias", "qk_norm", "glu_activation", "activation", "bias_gelu_fusion"),
        *("add_bias_linear", "add_qkv_bias", "parallel_residual", "embed_layernorm"),
        *("add_attention_bias", "add_mlp_bias", "attention_output_gate", "apply_layernorm_1p"),
        *("experimental_attention_variant", "linear_allow_neg_eigval", "linear_norm_placement"),
        *(
            "softmax_type",
            "full_attention_layers",
            "moe_router_pre_softmax",
            "moe_router_score_function",
        ),
    )
    expected = {part: getattr(family, part) for part in parts} | OTHER_PARTS.get(word, {})
    assert {part: getattr(model, part) for part in parts} == expected
    if word == "mixtral":
        # Its class has a window that may be turned off.
        model = dataclasses.replace(model, sliding_window=4096)
    for part in ("sliding_window", "no_rope_layers", "num_experts"):
        assert (getattr(model, part) is None) == (getattr(family, part) is None)


def test_a_complete_model_of_transformers_has_the_extrapolated_size():
    _, published = PUBLISHED["qwen3-0.6b"]
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**published))
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == count_in_transformers(*PUBLISHED["qwen3-0.6b"])


@pytest.mark.parametrize(
    ("name", "total"),
    [  # as the models' owners count them
        ("gpt2-124m", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("gpt-neox-20b", 20_554_567_680),
        ("pythia-70m", 70_426_624),
        ("pythia-160m", 162_322_944),
        ("pythia-410m", 405_334_016),
        ("pythia-1b", 1_011_781_632),
        ("pythia-1.4b", 1_414_647_808),
        ("pythia-2.8b", 2_775_208_960),
        ("pythia-6.9b", 6_857_302_016),
        ("pythia-12b", 11_846_072_320),
        ("llama2-7b", 6_738_415_616),
        ("llama3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("smollm3-3b", 3_075_098_624),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("olmo2-7b", 7_298_617_344),
        ("olmoe-1b-7b", 6_919_161_856),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("deepseek-v3", 671_026_404_352),
        ("deepseek-v2-lite", 15_706_484_224),
        ("moonlight-16b-a3b", 15_960_108_544),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("olmo-hybrid-7b", 7_430_870_688),
    ],
)
def test_preset_has_the_published_parameters(name: str, total: int):
    assert count_parameters(build_preset_shape(read_preset(name))) == total


@pytest.mark.parametrize(
    ("name", "active", "billions"),
    [  # Their owners count billions.
        ("olmoe-1b-7b", 1_282_017_280, 1.28),
        ("qwen3-30b-a3b", 3_353_032_704, 3.35),
        ("mixtral-8x7b", 12_879_925_248, 12.9),
        # Its owners count 3 billions, without embedding and output matrix.
        ("qwen3-next-80b-a3b", 3_874_929_408, 3.87),
        ("llama2-7b", 6_738_415_616, 6.74),
        ("deepseek-v3", 37_552_282_624, 37.55),
    ],
)
def test_preset_has_the_published_active_parameters(name: str, active: int, billions: float):
    found = count_active_parameters(build_preset_shape(read_preset(name)))
    assert found == active
    assert found / 1e9 == pytest.approx(billions, abs=0.04 if billions > 10 else 0.006)


@pytest.mark.parametrize(
    ("name", "active"), [("gpt-oss-20b", 3_608_307_264), ("gpt-oss-120b", 5_132_849_472)]
)
def test_gpt_oss_uses_the_published_parameters(name: str, active: int) -> None:
    """The published number has no embedding."""
    shape = build_preset_shape(read_preset(name))
    embedding = shape.padded_vocab_size * shape.config.hidden_size
    assert count_active_parameters(shape) - embedding == active
