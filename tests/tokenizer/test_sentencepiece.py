"""SentencePiece tokenizers: their ids, their text, errors in their files, and the tools.

The ids are compared with those of the library.
"""

import builtins
import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocess.test_preprocess import job, run
from sentencepiece_models import LLAMA, UNIGRAM, train_model

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer_record import check_tokenizers_of_data
from megatron.extras.inference.generate.generation import IncrementalText
from megatron.extras.interop.convert.tokenizer_files import AWKWARD
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.preparation.commands import preprocess
from megatron.plan.rules.data import check_tokenizer_files
from megatron.tokenizer.build import build_tokenizer, list_special_token_ids
from megatron.tokenizer.sentencepiece_model import SentencePieceTokenizer
from megatron.tokenizer.vocabulary import (
    compute_padded_vocab_size,
    compute_tokenizer_digests,
    find_vocab_size,
)

sentencepiece = pytest.importorskip("sentencepiece")
# Blanks of all kinds, control characters, emoji, scripts without spaces, and names of symbols.
TEXTS = (
    *AWKWARD,
    "<|im_start|>user x<|im_start|>",
    " [PAD]",
    "<0x41>",
    "\u2581a\u2581\u2581",
    "</s>",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("models")
    (made / "llama.model").write_bytes(train_model(**LLAMA))
    (made / "unigram.model").write_bytes(train_model(**UNIGRAM))
    return made


def make_config(path: Path | str, **changes: Any) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_name_or_path=str(path), **changes
    )


def build(path: Path) -> SentencePieceTokenizer:
    tokenizer = build_tokenizer(make_config(path))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_ids_are_those_of_the_library(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build(folder / f"{name}.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.model"))
    texts = [*TEXTS, *tiny_corpus.texts()]
    expected = [reference.encode(text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == expected
    assert tokenizer.encode_batch(texts) == expected
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert tokenizer.encode_batch(texts) == expected
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch([]) == []
    # No text gives a control symbol.
    assert not {index for ids in expected for index in ids} & set(tokenizer.control_symbols)


def test_special_ids_are_those_of_the_model(folder: Path) -> None:
    tokenizer = build(folder / "llama.model")
    assert tokenizer.vocab_size == 1000
    assert tokenizer.control_symbols == {1: "<s>", 2: "</s>", 3: "<|call|>"}
    assert tokenizer.eod == 2
    assert list_special_token_ids(tokenizer) == (1, 2, 3)
    assert find_vocab_size(make_config(folder / "llama.model")) == (1000, None)
    assert compute_padded_vocab_size(1000, 128, 2) == 1024


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_a_text_is_decoded_as_it_was(folder: Path, text: str) -> None:
    # A space and the character that stands for it have the same pieces.
    assert build(folder / "llama.model").decode(
        build(folder / "llama.model").encode(text)
    ) == text.replace("\u2581", " ")


def test_control_symbols_are_part_of_the_text(folder: Path) -> None:
    tokenizer = build(folder / "llama.model")
    ids = [1, *tokenizer.encode("a text"), 3, *tokenizer.encode("more"), 2]
    assert tokenizer.decode(ids) == "<s>a text<|call|>more</s>"
    # A larger --vocab-size has ids that the tokenizer lacks.
    assert tokenizer.decode([1000, *tokenizer.encode("x"), 5000]) == "x"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_streamed_text_equals_the_decoded_ids(name: str, folder: Path) -> None:
    tokenizer = build(folder / f"{name}.model")
    generator = np.random.default_rng(0)
    for text in (*TEXTS[:20], tiny_corpus.texts()[0][:500]):
        prompt = tokenizer.encode("The beginning")
        following = [*tokenizer.encode(text), *generator.integers(4, 1000, 20).tolist()]
        stream = IncrementalText(tokenizer.decode, prompt)
        pieces = [stream.add(token) for token in following]
        streamed = "".join([*pieces, stream.finish()])
        assert "The beginning" + streamed == tokenizer.decode(prompt + following)


def test_half_a_surrogate_pair_is_refused(folder: Path) -> None:
    tokenizer = build(folder / "llama.model")
    with pytest.raises(DataError, match="half a surrogate pair at character 3"):
        tokenizer.encode("abc\ud800")
    with pytest.raises(DataError, match="half a surrogate pair"):
        tokenizer.encode_batch(["fine", "\udc80"])


def remove_normalisation(content: bytes) -> bytes:
    """Return a file that ends between two parts. The library reads it, and normalises nothing."""
    pb2: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    description = pb2.ModelProto.FromString(content)
    description.ClearField("normalizer_spec")
    short: bytes = description.SerializeToString()
    assert content.startswith(short)
    assert sentencepiece.SentencePieceProcessor(model_proto=short).get_piece_size() == 1000
    return short


def damage(content: bytes, how: str) -> bytes:
    """Return a file that is no SentencePiece model."""
    return {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "without its last byte": content[:-1],
        "without normalisation": remove_normalisation(content),
        "pickle": pickle.dumps({"pieces": []}),
        "torch file": b"PK\x03\x04" + bytes(100),
        "text": b"hello world\n" * 20,
        "zeros": bytes(1000),
        "endless number": b"\xff" * 1000,
        "json": b'{"version": "1.0"}',
        "tiktoken": b"IQ== 0\nIg== 1\n",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    }[how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "is empty"),
        ("truncated", "is truncated"),
        ("without its last byte", "truncated"),
        ("without normalisation", "is truncated"),
        ("pickle", "is a pickle, which is never loaded"),
        ("torch file", "is a pickle, which is never loaded"),
        ("text", "is not a SentencePiece model"),
        ("zeros", "is not a SentencePiece model"),
        ("endless number", "is not a SentencePiece model"),
        ("json", "--tokenizer-type PretrainedFromHF"),
        ("tiktoken", "is a file of tiktoken, which must be converted"),
        ("pointer", "git lfs pull"),
    ],
)
def test_a_damaged_file_is_refused(how: str, message: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(damage((folder / "unigram.model").read_bytes(), how))
    for read in (build_tokenizer, find_vocab_size):
        with pytest.raises(ConfigError, match=message) as refused:
            read(make_config(path))
        assert str(path) in str(refused.value)


def test_each_byte_that_is_cut_off_is_noticed(folder: Path, tmp_path: Path) -> None:
    content = (folder / "llama.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="tokenizer-model"):
            build_tokenizer(make_config(path))


def test_errors_name_the_flag(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "none.model").write_bytes(train_model(**LLAMA, eos_id=-1))
    (tmp_path / "empty").mkdir()
    cases = [
        (TokenizerConfig(tokenizer_type="SentencePieceTokenizer"), "needs --tokenizer-model FILE"),
        (make_config(tmp_path / "nowhere.model"), "nowhere.model does not exist"),
        (make_config(tmp_path / "empty"), "this folder has no tokenizer.model"),
        (make_config(tmp_path / "none.model"), "has no end-of-sentence piece"),
        (make_config(folder / "llama.model", vocab_size=900), "--vocab-size 900 is smaller"),
        (
            TokenizerConfig(
                tokenizer_type="PretrainedFromHF",
                tokenizer_name_or_path=str(folder / "llama.model"),
            ),
            "needs --tokenizer-type SentencePieceTokenizer",
        ),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError, match=message):
            build_tokenizer(config)
    assert (
        "does not exist"
        in next(check_tokenizer_files(make_config(tmp_path / "nowhere.model"))).text
    )
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install 'sentencepiece"):
        build_tokenizer(make_config(folder / "llama.model"))
    # Training on prepared data needs the size alone.
    stated = make_config(folder / "llama.model", vocab_size=1000)
    assert find_vocab_size(stated) == (1000, None)
    assert compute_tokenizer_digests(stated).keys() == {"tokenizer.model"}


@pytest.mark.parametrize(
    "name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
)
def test_types_of_megatron_are_this_tokenizer(name: str, folder: Path, tmp_path: Path) -> None:
    flags = ["--tokenizer-type", name, "--tokenizer-model", str(folder / "llama.model")]
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1"
    shape += " --seq-length 8"
    loaded = load_config([*flags, *shape.split()])
    assert loaded.config.tokenizer == make_config(folder / "llama.model")
    output = ["--input", str(tiny_corpus.JSONL), "--output-prefix", str(tmp_path / "made")]
    assert preprocess.main([*flags, *output, "--workers", "1", "--append-eod"]) == 0
    made = IndexedDataset(str(tmp_path / "made_text_document"))
    expected = build(folder / "llama.model").encode(tiny_corpus.texts()[0])
    assert made.get(0).tolist() == [*expected, 2]


def test_preprocessing_does_not_depend_on_workers(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder / "unigram.model")
    for workers in (1, 2):
        run(job(tmp_path / f"by{workers}", tokenizer=config, workers=workers))
    one, two = (tiny_corpus.data_files(tmp_path / f"by{n}_text_document") for n in (1, 2))
    assert one == two


def test_data_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    run(job(tmp_path / "made", tokenizer=make_config(folder / "llama.model")))
    prefix = str(tmp_path / "made_text_document")
    check_tokenizers_of_data(make_config(folder / "llama.model"), [prefix])
    with pytest.raises(ConfigError, match="made with another tokenizer"):
        check_tokenizers_of_data(make_config(folder / "unigram.model"), [prefix])
    with pytest.raises(ConfigError, match="made with another tokenizer"):
        check_tokenizers_of_data(tiny_corpus.GPT2, [prefix])
