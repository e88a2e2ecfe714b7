"""The size of the vocabulary for planning, and its padding."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizers import folder_with, hf, slow_folder
from tiny_corpus import GPT2, VOCAB

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.config.presets import read_preset
from megatron.plan.rules.data import check_tokenizer_files
from megatron.tokenizer.vocabulary import compute_padded_vocab_size, find_vocab_size


def pad(size: int, divisor: int, tensor_parallel: int, pad_to: int | None = None) -> int:
    return compute_padded_vocab_size(
        size,
        make_divisible_by=divisor,
        tensor_model_parallel_size=tensor_parallel,
        pad_to=pad_to,
    )


def test_published_paddings() -> None:
    """GPT-2 at TP 1 and 8 (Megatron-LM's paper), tr1-13B at TP 2, and tr11 with its flag."""
    assert pad(50257, divisor=128, tensor_parallel=1) == 50304
    assert pad(50257, divisor=128, tensor_parallel=8) == 51200
    assert pad(50257, divisor=128, tensor_parallel=2) == 50432
    assert pad(250680, divisor=128, tensor_parallel=4, pad_to=250880) == 250880


@given(st.integers(1, 300_000), st.integers(1, 256), st.integers(1, 64))
def test_padding_is_the_smallest_that_divides(
    size: int, divisor: int, tensor_parallel: int
) -> None:
    padded = pad(size, divisor=divisor, tensor_parallel=tensor_parallel)
    assert padded % (divisor * tensor_parallel) == 0
    assert size <= padded < size + divisor * tensor_parallel


def test_wrong_sizes_for_padding_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not be smaller than the vocabulary, 101"):
        pad(101, divisor=128, tensor_parallel=1, pad_to=100)
    rule = "--pad-vocab-size-to 102 must be divisible by --tensor-model-parallel-size 4"
    with pytest.raises(ConfigError, match=rule) as raised:
        pad(101, divisor=2, tensor_parallel=4, pad_to=102)
    assert "Use 104" in str(raised.value)
    with pytest.raises(ConfigError, match="must both be at least 1"):
        pad(101, divisor=0, tensor_parallel=1)


@pytest.mark.parametrize(
    ("pad_to", "divisor", "tensor_parallel"),
    [(250_880, 128, 4), (5120, 128, 2), (50_304, 128, 2), (129, 1, 3)],
)
def test_a_size_to_pad_to_that_divides_is_used(
    pad_to: int, divisor: int, tensor_parallel: int
) -> None:
    """As in Megatron-DeepSpeed, 50,304 = 128 x 393 is valid at TP 2. 256 does not divide it."""
    size = pad_to - 1
    assert pad(size, divisor=divisor, tensor_parallel=tensor_parallel, pad_to=pad_to) == pad_to


@pytest.mark.parametrize(
    ("pad_to", "divisor", "tensor_parallel", "fitting"),
    [(1100, 128, 1, 1152), (1100, 128, 4, 1152), (130, 128, 3, 384), (50_257, 2, 1, 50_258)],
)
def test_a_size_to_pad_to_that_does_not_divide_is_refused(
    pad_to: int,
    divisor: int,
    tensor_parallel: int,
    fitting: int,
) -> None:
    rule = f"must be divisible by --make-vocab-size-divisible-by {divisor}"
    with pytest.raises(ConfigError, match=f"--pad-vocab-size-to {pad_to} {rule}") as raised:
        pad(100, divisor=divisor, tensor_parallel=tensor_parallel, pad_to=pad_to)
    assert f"Use {fitting}," in str(raised.value)
    assert pad(100, divisor=divisor, tensor_parallel=tensor_parallel, pad_to=fitting) == fitting


def test_size_for_planning_comes_from_flags_and_files(tmp_path: Path) -> None:
    assert find_vocab_size(GPT2) == (5000, None)
    assert find_vocab_size(TokenizerConfig(vocab_file=VOCAB, vocab_size=5120)) == (5120, None)
    size, warning = find_vocab_size(TokenizerConfig(vocab_file="gone.json", merge_file="gone.txt"))
    assert size == 50257
    assert warning is not None
    assert "--vocab-file gone.json does not exist" in warning
    assert "no --vocab-file was given" in (find_vocab_size(TokenizerConfig())[1] or "")
    assert find_vocab_size(hf(folder_with(tmp_path / "tok"))) == (5001, None)
    size, warning = find_vocab_size(hf("bigscience/tokenizer", pad_vocab_size_to=250880))
    assert size == 250880
    assert "upper bound" in (warning or "")


def test_size_for_planning_of_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert find_vocab_size(hf(slow_folder(tmp_path / "tok", eos_token="<unk>")))[0] >= 4


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("t5-small", 32100),
        ("google-t5/t5-small", 32100),
        ("gpt2", 50257),
        ("EleutherAI/pythia-70m-deduped", 50277),
        ("meta-llama/Llama-2-7b-hf", 32000),
        ("meta-llama/Llama-3.1-8B", 128256),
        ("meta-llama/Meta-Llama-3-70B", 128256),
        ("data/llama-7b/tokenizer.model", 32000),
        ("Qwen/Qwen2.5-7B", 151665),
        ("google/mt5-base", 250100),
        ("bigscience/tokenizer", 250680),
        ("mistralai/Mistral-7B-v0.3", 32768),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 32000),
        ("deepseek-ai/DeepSeek-R1", 128815),
        ("openai/gpt-oss-20b", 200019),
        ("google/gemma-2-9b", 256000),
        ("/m/Meta-Llama-3-8B/original/tokenizer.model", 128256),
        (f"/hub/models--Qwen--Qwen3-8B/snapshots/{'0a' * 20}/tokenizer.json", 151669),
    ],
)
def test_size_for_planning_of_a_published_tokenizer(name: str, size: int) -> None:
    found, warning = find_vocab_size(hf(name))
    assert found == size
    assert f"assuming its published vocabulary of {size}" in (warning or "")
    # A run needs the files, whatever the size.
    (error,) = check_tokenizer_files(hf(name))
    assert f"--tokenizer-name-or-path {name} does not exist" in error.text


def test_the_table_of_public_tokenizers_agrees_with_the_presets() -> None:
    names = {
        "qwen3-8b": "Qwen3-8B",
        "olmo2-7b": "OLMo-2-1124-7B",
        "olmoe-1b-7b": "OLMoE-1B-7B-0924",
    }
    names |= {
        "llama3-8b": "Llama-3-8B",
        "mistral-7b": "Mistral-7B-v0.1",
        "pythia-70m": "pythia-70m",
    }
    for preset, name in names.items():
        size = read_preset(preset).values["tokenizer.vocab_size"].value
        assert find_vocab_size(hf(name))[0] == size


@pytest.mark.parametrize(
    "name", ["llama-of-my-own", "data/tokenizer.model", "/runs/gpt2/own-tokenizer"]
)
def test_a_size_that_nobody_knows_is_not_assumed(name: str) -> None:
    with pytest.raises(ConfigError, match="so the size of the vocabulary is not known"):
        find_vocab_size(hf(name))
    # A run has one error about it, and not two.
    (error,) = check_tokenizer_files(hf(name))
    with pytest.raises(ConfigError, match=f"^{re.escape(error.text)}$"):
        find_vocab_size(hf(name))


def test_missing_file_of_sentencepiece_names_its_own_flag() -> None:
    absent = TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_name_or_path="a/tokenizer.model"
    )
    (error,) = check_tokenizer_files(absent)
    assert "the file --tokenizer-model a/tokenizer.model does not exist" in error.text


def test_a_wrong_size_for_planning_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 0 must be at least 1"):
        find_vocab_size(TokenizerConfig(vocab_size=0))
