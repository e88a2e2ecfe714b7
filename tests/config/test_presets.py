"""Tests of --preset and --list-presets: names, precedence, sources, errors and the table."""

import importlib
import re
from pathlib import Path

import pytest
from config.minimal import published_arguments

from megatron.base.errors import ConfigError
from megatron.commands import plan as plan_tool
from megatron.config.compare import load_yaml
from megatron.config.fields import LoadedConfig, all_fields, find_missing
from megatron.config.presets import list_preset_names, read_preset
from megatron.config.yaml_file import dump_yaml
from megatron.console.preset_table import build_preset_shape, format_preset_table
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.run_plan import Plan
from megatron.tokenizer.vocabulary import find_published_size

BATCH = ["--micro-batch-size", "1", "--train-iters", "10", "--lr", "1e-3"]
CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
TOKENIZER = [
    *("--vocab-file", str(CORPUS / "gpt2-tiny-vocab.json")),
    *("--merge-file", str(CORPUS / "gpt2-tiny-merges.txt")),
]

NAMES = (
    "apertus-8b",
    "apertus-70b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "moonlight-16b-a3b",
    "gpt-neox-20b",
    "gpt-oss-120b",
    "gpt-oss-20b",
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
    "mistral-7b",
    "mixtral-8x7b",
    "olmo2-7b",
    "olmo2-32b",
    "olmo3-7b",
    "olmo3-32b",
    "olmoe-1b-7b",
    "olmo-hybrid-7b",
    "pythia-14m",
    "pythia-31m",
    "pythia-70m",
    "pythia-160m",
    "pythia-410m",
    "pythia-1b",
    "pythia-1.4b",
    "pythia-2.8b",
    "pythia-6.9b",
    "pythia-12b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-30b-a3b",
    "qwen3-32b",
    "qwen3-next-80b-a3b",
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
        "30b-a3b",
        "32b",
        "next-80b-a3b",
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


def test_none_unsets_the_preset_of_the_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: apertus-8b\n")
    with pytest.raises(ConfigError, match="--hidden-size is required"):
        load("--config", str(file), "--preset", "None")


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
    assert not any("are used for flags that are not given" in text for text in loaded.warnings)


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
        ("opt-175b", []),
        ("bloom", ["tr11-176b"]),
        ("hackathon", ["lauzhack-177m"]),
        ("Llama-2-7b-hf", ["llama2-7b"]),
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


@pytest.mark.parametrize("value", ["[llama2-7b]", "{name: llama2-7b}", "!!binary llama2-7b"])
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


def test_a_published_tokenizer_of_another_size_is_an_error():
    tokenizer = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path"]
    (error,) = plan("--preset", "llama2-7b", *tokenizer, "meta-llama/Meta-Llama-3-8B").errors
    assert "has 128256 ids, which is not --vocab-size 32000 (preset llama2-7b)" in error
    assert "not on this machine" in error
    assert plan("--preset", "llama2-7b", *tokenizer, "meta-llama/Llama-2-7b-hf").errors == ()


def test_presets_have_the_published_sizes_of_their_tokenizers():
    """Otherwise the plan of a preset refuses the preset's own tokenizer."""
    known = 0
    for name in list_preset_names():
        published = find_published_size(name)
        if published is not None:
            known += 1
            assert read_preset(name).values["tokenizer.vocab_size"].value == published[0], name
    assert known > 20


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
