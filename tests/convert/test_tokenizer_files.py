"""Tokenizers of exported models: equal ids in transformers, chat templates, and special tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_corpus
from preprocess.test_preprocess import job, run
from process_pool import ProcessPool, pretrain, succeed
from sentencepiece_models import LLAMA, UNIGRAM, train_model
from tiny_corpus import GPT2
from tokenizers import AddedToken

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.extras.inference.commands import evaluate, generate
from megatron.extras.interop.commands import convert_checkpoint
from megatron.extras.interop.convert.tokenizer_files import AWKWARD, SpecialIds, write_tokenizer
from megatron.tokenizer.build import HFTokenizer, build_tokenizer

transformers = pytest.importorskip("transformers")
SIZES = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 2 --eval-iters 0 --normalization RMSNorm "
    "--ffn-hidden-size 32 --glu-activation swiglu --position-embedding-type rotary "
    "--no-add-bias-linear --untie-embeddings-and-output-weights --eod-mask-loss"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "Hello,  world!"}, {"role": "assistant", "content": "Hi 🙂"}]


def train_run(pool: ProcessPool, folder: Path, tokenizer: TokenizerConfig) -> Path:
    """Preprocess the reference texts, train on them, and return the folder of the run."""
    run(job(folder / "data", tokenizer=tokenizer))
    flags = (
        f"{SIZES} --data-path {folder}/data_text_document --save {folder}/run --tokenizer-type "
        f"{tokenizer.tokenizer_type} --tokenizer-model {tokenizer.tokenizer_name_or_path}"
    )
    succeed(pool.run(1, pretrain, flags.split()))
    return folder / "run"


def export(load: Path, out: Path, *flags: str) -> int:
    command = ["to-hf", "--load", str(load), "--out", str(out), "--no-compare-model", *flags]
    return convert_checkpoint.main(command)


def write_chat_tokenizer(folder: Path) -> TokenizerConfig:
    """Write a tokenizer with a chat template, added tokens and two ids that end a text."""
    backend = build_tokenizer(GPT2)
    assert isinstance(backend, HFTokenizer)
    backend.backend.add_special_tokens(
        [
            AddedToken("<|im_start|>", special=True, normalized=False),
            AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
        ]
    )
    backend.backend.add_tokens([AddedToken("<tool>", single_word=True)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend.backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    made.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE + "<tool>"}
    made.save_pretrained(folder)
    ids = {"bos_token_id": 5000, "eos_token_id": [5001, 4999], "pad_token_id": 4999}
    (folder / "generation_config.json").write_text(json.dumps({**ids, "temperature": 0.5}))
    return TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(folder))


def test_a_chat_tokenizer_is_kept_from_the_text_to_the_export(
    pool: ProcessPool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    load = train_run(pool, tmp_path, write_chat_tokenizer(source))
    assert export(load, tmp_path / "exported") == 0
    # An import has a copy of all of it, and its export does not need the first export.
    command = [
        "from-hf",
        "--model",
        str(tmp_path / "exported"),
        "--out",
        str(tmp_path / "imported"),
    ]
    assert convert_checkpoint.main(command) == 0
    shutil.rmtree(tmp_path / "exported", ignore_errors=True)
    assert export(tmp_path / "imported", tmp_path / "again") == 0
    expected = transformers.AutoTokenizer.from_pretrained(source)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    for options in ({}, {"add_generation_prompt": True}, {"chat_template": "tool_use"}):
        texts = [
            each.apply_chat_template(CHAT, tokenize=False, **options) for each in (expected, found)
        ]
        assert texts[0] == texts[1]
        ids = [each.apply_chat_template(CHAT, **options)["input_ids"] for each in (expected, found)]
        assert ids[0] == ids[1]
        assert 5001 in ids[0]
    for text in [*AWKWARD, *tiny_corpus.texts()[:20], "a <tool> b<|im_end|>  c"]:
        assert found(text).input_ids == expected(text).input_ids
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.added_tokens_decoder == expected.added_tokens_decoder
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "again")
    assert generation.eos_token_id == [5001, 4999]
    assert generation.bos_token_id == 5000
    assert generation.pad_token_id == 4999
    config = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert config.eos_token_id == [5001, 4999]


def test_a_run_with_sentencepiece_is_exported_continued_and_evaluated(
    pool: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentencepiece")
    model = tmp_path / "tokenizer.model"
    model.write_bytes(train_model(**LLAMA))
    config = TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_name_or_path=str(model)
    )
    load = train_run(pool, tmp_path, config)
    assert export(load, tmp_path / "exported") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ours = build_tokenizer(config)
    for text in [*tiny_corpus.texts(), *AWKWARD]:
        if "<s>" not in text:
            assert theirs(text).input_ids == ours.encode(text), text
            assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "exported")
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)
    capsys.readouterr()
    # The tokenizer may have moved. The prompt is streamed with its continuation.
    model.rename(tmp_path / "moved.model")
    moved = ["--load", str(load), "--tokenizer-model", str(tmp_path / "moved.model")]
    prompt = ["--prompt", " Two  blanks 漢字", "--max-new-tokens", "8"]
    assert generate.main([*moved, *prompt, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(" Two  blanks 漢字")
    (tmp_path / "held_out.txt").write_text(tiny_corpus.texts()[0])
    texts = ["--text-files", str(tmp_path / "held_out.txt"), "--device", "cpu"]
    assert evaluate.main([*moved, *texts]) == 0
    assert "bits per byte" in capsys.readouterr().out
    # Another tokenizer would give another meaning to the ids of the model.
    other = tmp_path / "other.model"
    other.write_bytes(train_model(**{**LLAMA, "user_defined_symbols": ["[OTHER]", "[ELSE]"]}))
    assert generate.main([*moved[:3], str(other), *prompt]) == 2
    flags = ("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(other))
    assert export(load, tmp_path / "wrong", *flags) == 2
    assert not (tmp_path / "wrong").exists()
    assert "not the one that the checkpoint was trained with" in capsys.readouterr().err
    flags = (*flags[:3], str(tmp_path / "moved.model"))
    assert export(load, tmp_path / "right", *flags) == 0
    assert (tmp_path / "right" / "tokenizer.json").exists()


def write_model(folder: Path, **settings: Any) -> TokenizerConfig:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(train_model(**settings))
    return TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_name_or_path=str(folder)
    )


@pytest.mark.parametrize(
    "settings",
    [
        UNIGRAM | {"byte_fallback": True},
        LLAMA | {"add_dummy_prefix": False},
        {"model_type": "bpe", "normalization_rule_name": "nfkc_cf", "pad_id": 3},
    ],
    ids=["unigram", "no dummy prefix", "case folding"],
)
def test_a_model_of_sentencepiece_is_converted(settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    messages: list[str] = []
    (tmp_path / "out").mkdir()
    config = write_model(tmp_path / "source", **settings)
    ids = write_tokenizer(tmp_path / "out", config, 1000, messages.append)
    assert ids == SpecialIds(1, 2, 3 if settings.get("pad_id") else None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = build_tokenizer(config)
    for text in [*AWKWARD, *tiny_corpus.texts()[:20]]:
        if "<s>" not in text:
            assert theirs(text).input_ids == ours.encode(text), text
    # What is known to differ is said.
    assert any("in fp32" in message for message in messages) == (
        settings["model_type"] == "unigram"
    )
    normalises = settings.get("normalization_rule_name") != "identity"
    assert any("combining mark" in message for message in messages) == normalises


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "word", "hard_vocab_limit": False}, "a model of words or characters"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "ids differ from those of"),
    ],
)
def test_an_inexact_tokenizer_is_not_written(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("sentencepiece")
    messages: list[str] = []
    (tmp_path / "out").mkdir()
    config = write_model(tmp_path / "source", **settings)
    write_tokenizer(tmp_path / "out", config, 1000, messages.append)
    assert message in messages[0]
    # `transformers` reads none of these.
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sentencepiece.model"]


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5000 ids, and the embedding has 4000 rows"):
        write_tokenizer(tmp_path, GPT2, 4000, print)
    (tmp_path / "source").mkdir()
    config = write_chat_tokenizer(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        write_tokenizer(tmp_path / "out", config, 6000, print)


def test_an_end_of_document_that_no_file_names_is_written(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(GPT2)
    assert isinstance(tokenizer, HFTokenizer)
    source = tmp_path / "renamed.json"
    tokenizer.backend.save(str(source))
    (tmp_path / "out").mkdir()
    config = TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(source))
    assert write_tokenizer(tmp_path / "out", config, 5000, print) == SpecialIds(eos=4999)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == "<|endoftext|>"
