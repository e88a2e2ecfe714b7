"""Tests of --preset and --list-presets: names, precedence, sources, and sizes."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from config.minimal import published_arguments

from megatron.commands import plan as plan_tool
from megatron.config.cli import LoadedConfig, dump_yaml, load_config, load_yaml
from megatron.config.fields import all_fields, find_missing
from megatron.config.presets import list_preset_names, read_preset
from megatron.errors import ConfigError
from megatron.model.flops import count_parameters
from megatron.plan import Plan, resolve
from megatron.preset_table import build_preset_shape, format_preset_table

BATCH = ["--micro-batch-size", "1", "--train-iters", "10", "--lr", "1e-3"]
CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
TOKENIZER = [
    *("--vocab-file", str(CORPUS / "gpt2-tiny-vocab.json")),
    *("--merge-file", str(CORPUS / "gpt2-tiny-merges.txt")),
]

NAMES = (
    "apertus-8b",
    "apertus-70b",
    "gpt-neox-20b",
    "gpt2-124m",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "lauzhack-177m",
    "llama2-1.4b",
    "llama2-7b",
    "llama2-13b",
    "llama2-34b",
    "llama2-70b",
    "llama3-1.8b",
    "llama3-3.2b",
    "llama3-8b",
    "llama3-70b",
    "llama3-194m-4k",
    "olmo2-7b",
    "olmo2-32b",
    "olmo3-7b",
    "olmo3-32b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "smollm3-3b",
    "tr1-13b",
    "tr8-104b",
    "tr11-176b",
)


def load(*flags: str) -> LoadedConfig:
    return load_config([*BATCH, *flags])


def plan(*flags: str, world_size: int = 1) -> Plan:
    loaded = load(*flags)
    return resolve(loaded.config, world_size, loaded.origin)


# Names and files


def test_every_promised_preset_is_there():
    assert sorted(list_preset_names()) == sorted(NAMES)


def test_names_are_ordered_by_their_numbers():
    names = [name for name in list_preset_names() if name.startswith("qwen3")]
    assert [name.removeprefix("qwen3-") for name in names] == [
        "0.6b",
        "1.7b",
        "4b",
        "8b",
        "14b",
        "32b",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_an_architecture_with_its_source(name: str):
    preset = read_preset(name)
    assert preset.sources
    assert all(source.startswith("https://") for source in preset.sources)
    assert {dotted.partition(".")[0] for dotted in preset.values} == {"model", "tokenizer"}
    # All sizes of the model are given, so that only a batch is missing for a plan.
    assert find_missing(preset.values) == find_missing(
        [dotted for dotted, field in all_fields().items() if field.group == "model"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_resolves_on_a_grid(name: str):
    heads = build_preset_shape(read_preset(name)).config.num_attention_heads
    if heads % 2:
        tensor = 5
        flags = []
    else:
        tensor = 2
        flags = ["--sequence-parallel"]
    found = plan(
        *("--preset", name, "--pipeline-model-parallel-size", "2"),
        *("--tensor-model-parallel-size", str(tensor), *flags),
        world_size=4 * tensor,
    )
    assert found.errors == ()
    assert all("--ffn-hidden-size" not in warning for warning in found.warnings)


# Precedence


def test_origin_of_the_values():
    loaded = load("--preset", "llama3-8b", "--num-layers", "2")
    assert loaded.config.model.hidden_size == 4096
    assert loaded.origin["model.hidden_size"] == "preset llama3-8b"
    assert loaded.origin["model.num_layers"] == "--num-layers"
    assert loaded.origin["model.kv_channels"] == "default"


def test_flag_replaces_the_file_and_the_file_replaces_the_preset(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: llama3-8b\nmodel: {num_layers: 4, seq_length: 128}\n")
    loaded = load("--config", str(file), "--seq-length", "64")
    model = loaded.config.model
    assert (model.seq_length, model.num_layers, model.hidden_size) == (64, 4, 4096)
    assert loaded.origin["model.num_layers"] == f"{file}:2"
    assert loaded.origin["model.hidden_size"] == "preset llama3-8b"


def test_flag_replaces_the_preset_of_the_file(tmp_path: Path):
    """None of the other preset's values remain."""
    file = tmp_path / "run.yaml"
    file.write_text("preset: apertus-8b\n")
    by_flag = load("--config", str(file), "--preset", "gpt2-124m")
    assert by_flag.config == load("--preset", "gpt2-124m").config
    assert load("--config", str(file)).config.model.activation == "xielu"


def test_the_last_of_two_presets_wins():
    twice = load("--preset", "apertus-8b", "--preset=gpt2-124m")
    assert twice.config == load("--preset", "gpt2-124m").config


@pytest.mark.parametrize("text", ["preset:\nmodel: {num_layers: 4}\n", "preset: ~\n"])
def test_an_empty_preset_is_none(text: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--hidden-size is required"):
        load("--config", str(file))


def test_a_boolean_and_an_optional_can_be_unset():
    flags = "--no-untie-embeddings-and-output-weights --num-query-groups None --vocab-size None"
    loaded = load("--preset", "qwen3-8b", *flags.split())
    assert not loaded.config.model.untie_embeddings_and_output_weights
    assert loaded.config.model.num_query_groups is None
    assert loaded.config.tokenizer.vocab_size is None


def test_the_dumped_configuration_has_the_values_and_no_preset():
    config = load("--preset", "olmo3-7b").config
    text = dump_yaml(config)
    assert not re.search(r"^preset:", text, re.M)
    assert "sliding_window: 4096" in text
    assert load_yaml(text) == config


def test_an_error_of_a_replaced_value_names_the_preset():
    (error,) = plan("--preset", "gpt2-124m", "--seq-length", "4096").errors
    assert "--max-position-embeddings 1024 (preset gpt2-124m)" in error


def test_flags_of_other_systems_bring_no_defaults_to_a_preset():
    loaded = load("--preset", "llama2-7b", "--report_interval=3", "--iterations", "9")
    assert loaded.config.model.seq_length == 4096
    assert loaded.config.optimizer.lr == 1e-3
    assert loaded.config.optimizer.min_lr == 0
    assert not any("the defaults of" in warning for warning in loaded.warnings)


def test_a_null_tokenizer_adds_no_id_to_the_preset():
    loaded = load("--preset", "olmo2-7b", "--tokenizer-type", "NullTokenizer")
    assert loaded.config.tokenizer.vocab_size == 100_278


@pytest.mark.parametrize("variant", ["llama3_8b", "llama3_8b_4k"])
def test_a_variant_of_fms_fsdp_is_a_preset_without_its_length(variant: str):
    loaded = load_config([f"--model_variant={variant}"])
    assert loaded.config.model.seq_length == 4096
    assert loaded.origin["model.seq_length"] == "fms-fsdp's default"
    assert loaded.origin["model.hidden_size"] == "--model_variant"
    same = load("--preset", "llama3-8b", "--seq-length", "4096").config
    assert loaded.config.model == same.model
    assert loaded.config.tokenizer == same.tokenizer


# Errors


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("llama3", ["llama3-8b", "llama3-70b"]),
        ("Llama2_7B", ["llama2-7b"]),
        ("qwen3-06b", ["qwen3-0.6b"]),
        ("bloom", []),
        ("gpt2-1.5b", ["gpt2-xl"]),
        ("tr11-176B-ml", ["tr11-176b"]),
        ("../presets/llama2-7b", ["llama2-7b"]),
    ],
)
def test_unknown_preset_lists_the_near_ones(typed: str, near: list[str]):
    with pytest.raises(ConfigError, match=f"--preset {re.escape(typed)} is unknown") as caught:
        load("--preset", typed)
    assert all(name in str(caught.value) for name in near)
    assert "--list-presets" in str(caught.value)


def test_unknown_preset_of_a_file_names_the_line(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  num_layers: 2\npreset: llama9\n")
    with pytest.raises(ConfigError, match=r"--preset llama9 \(.*run.yaml:3\) is unknown"):
        load("--config", str(file))


@pytest.mark.parametrize("value", ["[llama2-7b]", "{name: llama2-7b}"])
def test_a_preset_of_a_file_is_a_name(value: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(f"preset: {value}\n")
    with pytest.raises(ConfigError, match="preset must be the name of a preset"):
        load("--config", str(file))


def test_preset_without_a_name_is_an_error():
    with pytest.raises(ConfigError, match="--preset needs the name"):
        load("--preset")
    with pytest.raises(ConfigError, match="perhaps you meant --preset"):
        load("--presets", "llama2-7b")


# The tokenizer


def test_a_tokenizer_of_another_size_is_an_error():
    (error,) = plan("--preset", "llama2-7b", *TOKENIZER).errors
    assert "has 5000 ids, which is not --vocab-size 32000 (preset llama2-7b)" in error
    assert "--vocab-size 5000 to train" in error
    (error,) = plan("--preset", "qwen3-0.6b", *TOKENIZER).errors
    assert "--vocab-size 5000 --pad-vocab-size-to None" in error


def test_the_advice_about_the_tokenizer_works():
    advice = ["--vocab-size", "5000", "--pad-vocab-size-to", "None"]
    found = plan("--preset", "qwen3-0.6b", *TOKENIZER, *advice)
    assert found.errors == ()
    assert (found.vocab_size, found.padded_vocab_size) == (5000, 5120)


def test_a_size_by_hand_may_differ_from_the_tokenizer():
    assert plan("--preset", "llama2-7b", *TOKENIZER, "--vocab-size", "32000").errors == ()


def test_a_hugging_face_tokenizer_is_counted(tmp_path: Path):
    tokenizers = importlib.import_module("tokenizers")
    model = tokenizers.models.WordLevel({str(n): n for n in range(32000)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(model)
    flags = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(tmp_path)]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert plan("--preset", "llama2-7b", *flags).errors == ()
    tokenizer.add_tokens(["<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (error,) = plan("--preset", "llama2-7b", *flags).errors
    assert "has 32001 ids" in error


# The table


def test_table_has_the_size_and_source_of_every_preset():
    head, *lines = format_preset_table().splitlines()
    assert [line.split()[0] for line in lines] == list(list_preset_names())
    for column in ("parameters", "layers", "width", "heads", "context"):
        assert column in head
    (line,) = [line for line in lines if line.startswith("llama3-8b ")]
    assert line.split() == [
        *("llama3-8b", "8,030,261,248", "32", "4,096", "32", "8", "8,192", "128,256"),
        "https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json",
    ]


def test_plan_tool_lists_and_plans_presets(capsys: pytest.CaptureFixture[str]):
    assert plan_tool.main(["--list-presets"]) == 0
    assert capsys.readouterr().out == format_preset_table() + "\n"
    argv = ["--world-size", "8", "--preset", "llama2-7b", "--zero-stage", "3", *BATCH]
    assert plan_tool.main([*argv, "--json"]) == 0
    assert '"parameters": 6738415616' in capsys.readouterr().out


# Sizes


@pytest.mark.parametrize(
    ("name", "run"),
    [("tr1-13b", "tr1-13B"), ("tr8-104b", "tr8-104B"), ("tr11-176b", "tr11-176B-ml")],
)
def test_preset_of_a_published_run_is_its_model(name: str, run: str):
    """The argument list of the run and the preset give the same model, and its published size."""
    published = load_config(published_arguments(run)).config.model
    model = load("--preset", name).config.model
    # The argument lists have sizes that follow from others or have no effect.
    derived = {"ffn_hidden_size": 4 * published.hidden_size, "max_position_embeddings": None}
    for field in all_fields().values():
        if field.group == "model" and field.name not in derived:
            assert getattr(model, field.name) == getattr(published, field.name), field.name
    assert model.ffn_hidden_size == derived["ffn_hidden_size"]
    totals = {
        "tr1-13b": 12_854_282_240,
        "tr8-104b": 103_963_515_200,
        "tr11-176b": 176_247_271_424,
    }
    assert plan("--preset", name).parameters == totals[name]


GPT2: dict[str, Any] = {"vocab_size": 50257, "n_positions": 1024}
LLAMA2: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096}
LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
}
OLMO: dict[str, Any] = {"vocab_size": 100352, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
QWEN3: dict[str, Any] = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}


def describe(layers: int, width: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    """Return sizes as a config.json names them."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        **more,
    }


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
        {"vocab_size": 250880, "n_layer": 70, "hidden_size": 14336, "n_head": 112},
    ),
    "gpt-neox-20b": ("GPTNeoX", describe(44, 6144, 64, 24576, vocab_size=50432)),
    "lauzhack-177m": (
        "Llama",
        describe(10, 1024, 16, 2730, vocab_size=50304, tie_word_embeddings=True),
    ),
    "llama2-1.4b": ("Llama", describe(24, 2048, 16, 6144, num_key_value_heads=4, **LLAMA2)),
    "llama2-7b": ("Llama", describe(32, 4096, 32, 11008, num_key_value_heads=32, **LLAMA2)),
    "llama2-13b": ("Llama", describe(40, 5120, 40, 13824, num_key_value_heads=40, **LLAMA2)),
    "llama2-34b": ("Llama", describe(48, 8192, 64, 22016, num_key_value_heads=8, **LLAMA2)),
    "llama2-70b": ("Llama", describe(80, 8192, 64, 28672, num_key_value_heads=8, **LLAMA2)),
    "llama3-194m-4k": ("Llama", describe(10, 1024, 8, 2816, **LLAMA3)),
    "llama3-1.8b": ("Llama", describe(24, 2048, 16, 7168, **LLAMA3)),
    "llama3-3.2b": ("Llama", describe(24, 3072, 24, 8192, **LLAMA3)),
    "llama3-8b": ("Llama", describe(32, 4096, 32, 14336, **LLAMA3)),
    "llama3-70b": ("Llama", describe(80, 8192, 64, 28672, **LLAMA3)),
    "olmo2-7b": ("Olmo2", describe(32, 4096, 32, 11008, num_key_value_heads=32, **OLMO)),
    "olmo2-32b": ("Olmo2", describe(64, 5120, 40, 27648, num_key_value_heads=8, **OLMO)),
    "olmo3-7b": ("Olmo3", describe(32, 4096, 32, 11008, num_key_value_heads=32, **OLMO)),
    "olmo3-32b": ("Olmo3", describe(64, 5120, 40, 27648, num_key_value_heads=8, **OLMO)),
    "smollm3-3b": ("SmolLM3", describe(36, 2048, 16, 11008, num_key_value_heads=4)),
    "apertus-8b": (
        "Apertus",
        describe(32, 4096, 32, 21504, num_key_value_heads=8, vocab_size=131072),
    ),
    "apertus-70b": (
        "Apertus",
        describe(80, 8192, 64, 43008, num_key_value_heads=8, vocab_size=131072),
    ),
    "qwen3-0.6b": ("Qwen3", describe(28, 1024, 16, 3072, tie_word_embeddings=True, **QWEN3)),
    "qwen3-1.7b": ("Qwen3", describe(28, 2048, 16, 6144, tie_word_embeddings=True, **QWEN3)),
    "qwen3-4b": ("Qwen3", describe(36, 2560, 32, 9728, tie_word_embeddings=True, **QWEN3)),
    "qwen3-8b": ("Qwen3", describe(36, 4096, 32, 12288, tie_word_embeddings=False, **QWEN3)),
    "qwen3-14b": ("Qwen3", describe(40, 5120, 40, 17408, tie_word_embeddings=False, **QWEN3)),
    "qwen3-32b": ("Qwen3", describe(64, 5120, 64, 25600, tie_word_embeddings=False, **QWEN3)),
}
"""Preset -> class of `transformers`, and the sizes as the model's config.json has them."""


def test_every_preset_with_a_class_of_transformers_is_compared():
    # tr8 is a GPT-2 with a norm after its embedding. `transformers` has no class for it.
    assert set(NAMES) - set(PUBLISHED) == {"tr8-104b"}


def count_in_transformers(model: str, published: dict[str, Any]) -> int:
    """Return the parameters of a model of `transformers`, each counted once.

    All layers have the same parameters. Two models of few layers therefore give the total.
    """
    import torch
    import transformers

    config_class = getattr(transformers, f"{model}Config")
    suffix = "LMHeadModel" if model == "GPT2" else "ForCausalLM"
    model_class = getattr(transformers, f"{model}{suffix}")
    depth_key = "n_layer" if "n_layer" in published else "num_hidden_layers"
    counts = []
    for depth in (1, 2):
        ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        config = config_class(**published | ids | {depth_key: depth})
        with torch.device("meta"):
            built = model_class(config)
        counts.append(sum(parameter.numel() for parameter in built.parameters()))
    return int(counts[0] + (published[depth_key] - 1) * (counts[1] - counts[0]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_parameters_of_the_class_of_transformers(name: str):
    expected = count_in_transformers(*PUBLISHED[name])
    assert count_parameters(build_preset_shape(read_preset(name))) == expected
    assert plan("--preset", name).parameters == expected


def test_a_complete_model_of_transformers_has_the_extrapolated_size():
    import torch
    import transformers

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
        ("llama2-7b", 6_738_415_616),
        ("llama3-70b", 70_553_706_496),
        ("smollm3-3b", 3_075_098_624),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("olmo2-7b", 7_298_617_344),
    ],
)
def test_preset_has_the_published_parameters(name: str, total: int):
    assert count_parameters(build_preset_shape(read_preset(name))) == total
