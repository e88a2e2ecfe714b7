"""The choice of an encoding library.

A library is used only if it gives the tokenizer's own ids. At the first wrong id, also during a
run, it is no longer used and a warning is printed.
"""

import builtins
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_corpus
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocess.test_preprocess import JSONL, SMALL, job, write_lines
from tiny_corpus import GPT2, REFERENCE_PREFIX, data_files
from tokenizers import models, normalizers, pre_tokenizers

from megatron.extras.preparation.preprocess import encoders, workers
from megatron.extras.preparation.preprocess.build_dataset import preprocess
from megatron.extras.preparation.preprocess.encoders import (
    REFERENCE,
    Encoder,
    EncoderMismatchError,
    EncoderUnavailableError,
    choose_encoder,
    make_encoder,
    sample_texts,
)
from megatron.extras.preparation.preprocess.inputs import read_blocks
from megatron.tokenizer.build import HFTokenizer, Tokenizer, build_tokenizer

TINY = build_tokenizer(GPT2)


class WrongEncoder:
    """Gives the tokenizer's ids, except for texts with one word."""

    def __init__(self, name: str, word: str) -> None:
        self.name = name
        self._word = word

    def encode(self, texts: list[str]) -> tuple[Any, Any]:
        ids = [[7 if self._word in text else i for i in TINY.encode(text)] for text in texts]
        flat = np.array([i for some in ids for i in some], np.int64)
        return flat, np.array([len(some) for some in ids])


class FailingEncoder(WrongEncoder):
    """Fails at texts with one word."""

    def encode(self, texts: list[str]) -> tuple[Any, Any]:
        if any(self._word in text for text in texts):
            raise Panic("index out of bounds")
        return super().encode(texts)


class Panic(BaseException):
    """An error of a Rust library, which is not an Exception."""


@pytest.mark.parametrize("name", ["gigatoken", "tiktoken"])
def test_each_library_passes_on_awkward_texts(name: str) -> None:
    pytest.importorskip(name)
    messages: list[str] = []
    rejected = [other for other in encoders.CANDIDATES if other != name]
    assert choose_encoder(TINY, tiny_corpus.texts()[:20], rejected, messages.append) == name
    # tiktoken is the second candidate, so the rejection of the first one is reported before it.
    assert ("not used, it gave wrong ids earlier" in messages[0]) == (name == "tiktoken")
    assert "in use" in messages[-1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=50), max_size=5))
def test_libraries_agree_on_any_text(texts: list[str]) -> None:
    for name in (*encoders.CANDIDATES, REFERENCE):
        try:
            encoder = make_encoder(name, TINY)
        except EncoderUnavailableError:
            continue
        encoders.check_encoder(encoder, TINY, texts)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(WrongEncoder, "not with Zebra in it"), (FailingEncoder, "it failed: Panic: index out")],
)
def test_a_library_with_other_ids_is_not_used_and_the_reason_is_reported(
    kind: type[WrongEncoder], reason: str
) -> None:
    messages: list[str] = []
    sample = ["fine", "not with Zebra in it"]
    chosen = choose_encoder(TINY, sample, (), messages.append, lambda name, _: kind(name, "Zebra"))
    assert chosen == REFERENCE
    assert all("NOT USED" in line for line in messages[:2])
    assert reason in messages[0]
    assert "several times slower" in messages[2]


def test_a_wrong_number_of_tokens_is_a_mismatch() -> None:
    class Short(WrongEncoder):
        def encode(self, texts: list[str]) -> tuple[Any, Any]:
            ids = [TINY.encode(text)[:-1] for text in texts]
            return np.concatenate(ids), np.array([len(some) for some in ids])

    with pytest.raises(EncoderMismatchError, match="differ from the tokenizer's at token 1"):
        encoders.check_encoder(Short("short", ""), TINY, ["a b"])


@pytest.mark.parametrize("kind", [WrongEncoder, FailingEncoder])
@pytest.mark.parametrize("block_bytes", [SMALL, 200])
def test_a_library_that_gives_wrong_ids_during_a_run_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[WrongEncoder], block_bytes: int
) -> None:
    """The library passes the first check, and the checks during the run find the wrong ids.

    The output still has the tokenizer's ids, and a warning is printed.
    """

    def make(name: str, tokenizer: Tokenizer) -> Encoder:
        if name == "gigatoken":
            return kind(name, "e")
        return make_encoder(name, tokenizer)

    def choose(tokenizer: Tokenizer, sample: list[str], rejected: tuple[str, ...], log: Any) -> str:
        return REFERENCE if "gigatoken" in rejected else "gigatoken"

    monkeypatch.setattr(workers, "make_encoder", make)
    messages: list[str] = []
    given = job(tmp_path / "out", block_bytes=block_bytes)
    done = preprocess(given, log=messages.append, choose=choose)
    assert done.encoder == REFERENCE
    assert "WARNING: gigatoken cannot be trusted with this corpus" in messages[0]
    assert "STARTING OVER" in messages[0]
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


def test_the_beginning_of_a_long_text_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = write_lines(tmp_path / "in.jsonl", {"text": "word " * 20_000})
    monkeypatch.setattr(workers, "make_encoder", lambda name, _: WrongEncoder(name, "word"))
    encode = workers.BlockEncoder(make_encoding_job(encoder="gigatoken"))
    (block,) = read_blocks([str(long)], ["text"])
    with pytest.raises(EncoderMismatchError):
        encode(block)


def make_encoding_job(encoder: str) -> workers.EncodingJob:
    return workers.EncodingJob(
        tokenizer=GPT2, encoder=encoder, keys=("text",), append_eod=False, dtype="uint16"
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_text_bytes_do_not_depend_on_the_input_format(tmp_path: Path, suffix: str) -> None:
    """Only the texts count, in UTF-8. Other keys, escapes and bad rows do not."""
    rows = [{"text": "é" * 10, "other": "x" * 50}, {"text": "ab", "other": "y"}]
    path = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist([*rows, {"text": None, "other": "z"}]), path)
    else:
        write_lines(path, *rows, {"other": "z"})
    (block,) = read_blocks([str(path)], ["text"])
    assert workers.BlockEncoder(make_encoding_job(encoder=REFERENCE))(block).text_bytes == 22


def test_a_mismatch_can_be_sent_between_processes() -> None:
    error = pickle.loads(pickle.dumps(EncoderMismatchError("name", "reason")))
    assert error.name == "name"
    assert error.reason == "reason"


def test_a_failure_of_the_tokenizer_itself_is_raised() -> None:
    """No other encoder is left that could replace it."""
    with pytest.raises(Panic):
        encoders.run_encoder(FailingEncoder(REFERENCE, "a"), ["a"])


@pytest.mark.parametrize("name", encoders.CANDIDATES)
def test_libraries_refuse_a_tokenizer_of_another_class(name: str) -> None:
    class Own:
        vocab_size = 3
        eod = 0

    pytest.importorskip(name)
    with pytest.raises(EncoderUnavailableError, match="it needs a"):
        make_encoder(name, Own())  # type: ignore[arg-type]


def test_tiktoken_refuses_a_normalizer() -> None:
    pytest.importorskip("tiktoken")
    lower = build_tokenizer(GPT2)
    lower.backend.normalizer = normalizers.Lowercase()  # type: ignore[attr-defined]
    with pytest.raises(EncoderUnavailableError, match="byte-level BPE like GPT-2's"):
        make_encoder("tiktoken", lower)


def test_tiktoken_refuses_two_merges_that_give_the_same_token() -> None:
    pytest.importorskip("tiktoken")
    symbols = [*encoders.make_byte_symbols().values(), "ab", "bc", "abc"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={symbol: index for index, symbol in enumerate(symbols)},
            merges=[("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(EncoderUnavailableError, match="two merges of this vocabulary"):
        make_encoder("tiktoken", HFTokenizer(backend, eod=0))


def test_any_error_of_a_library_makes_it_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tokenizer: Tokenizer) -> Encoder:
        raise TypeError("unknown model")

    monkeypatch.setattr(encoders, "TiktokenEncoder", fail)
    with pytest.raises(EncoderUnavailableError, match="does not support this tokenizer"):
        make_encoder("tiktoken", TINY)


def test_libraries_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name in encoders.CANDIDATES:
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    messages: list[str] = []
    assert choose_encoder(TINY, [], (), messages.append) == REFERENCE
    for name, line in zip(encoders.CANDIDATES, messages, strict=False):
        assert f"pip install {name}" in line


class CountedGigatoken:
    """Takes the place of gigatoken's tokenizer class and counts how many are made."""

    def __init__(self, original: Any) -> None:
        self.made = 0
        self._original = original

    def from_json(self, description: str) -> Any:
        self.made += 1
        return self._original.from_json(description)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedGigatoken:
    gigatoken = pytest.importorskip("gigatoken")
    counted = CountedGigatoken(gigatoken.Tokenizer)
    monkeypatch.setattr(gigatoken, "Tokenizer", counted)
    return counted


def test_the_cache_of_gigatoken_is_dropped_when_the_process_has_grown(
    counted: CountedGigatoken,
) -> None:
    # The resident bytes at the start, before each call, and after the cache was dropped.
    resident = iter([0, 1 << 30, (1 << 30) + 1, 1 << 30])
    encoder = encoders.GigatokenEncoder(TINY, read_resident_bytes=lambda: next(resident))
    encoder.encode(["a"])
    assert counted.made == 1
    assert encoder.encode(["ab"])[0].tolist() == TINY.encode("ab")
    assert counted.made == 2


def test_the_cache_of_gigatoken_is_dropped_after_much_text_without_proc(
    counted: CountedGigatoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "_GIGATOKEN_TEXT_CHARS", 5)
    encoder = encoders.GigatokenEncoder(TINY, read_resident_bytes=lambda: None)
    encoder.encode(["a" * 10])
    assert counted.made == 1
    assert encoder.encode(["ab"])[0].tolist() == TINY.encode("ab")
    assert counted.made == 2


def test_samples_come_from_all_parts_of_the_inputs(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    first = write_lines(
        tmp_path / "a.jsonl", *[{"text": f"a{n} " + "x" * 200} for n in range(1000)]
    )
    second = write_lines(tmp_path / "b.jsonl", {"text": "the only one " * 3000})
    third = tmp_path / "c.parquet"
    parquet.write_table(
        pa.table({"text": [f"c{n} " * 200 for n in range(1000)]}),
        third,
        row_group_size=100,
        compression="none",
    )
    texts = sample_texts([str(first), str(second), str(third)], ["text"])
    numbers = [int(text.split()[0][1:]) for text in texts if text[0] == "a"]
    assert min(numbers) < 100
    assert max(numbers) > 900
    assert len({text.split()[0] for text in texts if text[0] == "c"}) > 5
    assert max(map(len, texts)) <= 16_000
    assert len(sample_texts([str(JSONL)], ["text"])) > 30


def test_samples_of_very_long_lines_are_truncated(tmp_path: Path) -> None:
    huge = write_lines(tmp_path / "huge.jsonl", {"text": "a" * (9 << 20)}, {"text": "b"})
    assert all(len(text) <= 16_000 for text in sample_texts([str(huge)], ["text"]))
