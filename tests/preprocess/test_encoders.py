"""The choice of a library: taken only with the tokenizer's own ids, dropped aloud at the first wrong one, even in mid-run."""

import builtins
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from test_preprocess import JSONL, SMALL, job, write_lines
from tiny_corpus import GPT2, REFERENCE_PREFIX, data_files

from megatron.preprocess import encoders, workers
from megatron.preprocess.encoders import (
    REFERENCE,
    Encoder,
    EncoderMismatchError,
    EncoderUnavailableError,
    choose_encoder,
    make_encoder,
)
from megatron.preprocess.pipeline import preprocess
from megatron.preprocess.sampling import sample_texts
from megatron.tokenizer import Tokenizer, build_tokenizer

TINY = build_tokenizer(GPT2)


class WrongEncoder:
    """The tokenizer's ids, but for one word."""

    def __init__(self, name: str, word: str) -> None:
        self.name, self._word = name, word

    def encode(self, texts: list[str]) -> tuple[Any, Any]:
        ids = [[7 if self._word in text else i for i in TINY.encode(text)] for text in texts]
        return np.array([i for some in ids for i in some], np.int64), np.array(
            [len(some) for some in ids]
        )


class FailingEncoder(WrongEncoder):
    def encode(self, texts: list[str]) -> tuple[Any, Any]:
        if any(self._word in text for text in texts):
            raise Panic("index out of bounds")
        return super().encode(texts)


class Panic(BaseException):
    """As pyo3's: not an Exception."""


@pytest.mark.parametrize("name", ["gigatoken", "tiktoken"])
def test_each_library_passes_on_awkward_texts(name: str) -> None:
    pytest.importorskip(name)
    said: list[str] = []
    rejected = [other for other in encoders.CANDIDATES if other != name]
    assert choose_encoder(TINY, tiny_corpus.texts()[:20], rejected, said.append) == name
    assert ("not used, it gave wrong ids earlier" in said[0]) == (name == "tiktoken")
    assert "in use" in said[-1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=50), max_size=5))
def test_libraries_agree_on_any_text(texts: list[str]) -> None:
    for name in (*encoders.CANDIDATES, REFERENCE):
        try:
            encoder = make_encoder(name, TINY)
        except EncoderUnavailableError:
            continue
        encoders.check_encoder(encoder, TINY, texts)


@pytest.mark.parametrize("kind", [WrongEncoder, FailingEncoder])
def test_a_library_with_other_ids_is_passed_over_aloud(kind: type[WrongEncoder]) -> None:
    said: list[str] = []
    sample = ["fine", "not with Zebra in it"]
    chosen = choose_encoder(TINY, sample, (), said.append, lambda name, _: kind(name, "Zebra"))
    assert chosen == REFERENCE
    assert all("NOT USED" in line for line in said[:2])
    assert (
        "it failed: Panic: index out" if kind is FailingEncoder else "not with Zebra in it"
    ) in said[0]
    assert "several times slower" in said[2]


def test_wrong_number_of_tokens_is_a_difference() -> None:
    class Short(WrongEncoder):
        def encode(self, texts: list[str]) -> tuple[Any, Any]:
            return np.concatenate([TINY.encode(text)[:-1] for text in texts]), np.array(
                [len(TINY.encode(text)) - 1 for text in texts]
            )

    with pytest.raises(
        EncoderMismatchError, match="its ids differ from the tokenizer's at token 1: "
    ):
        encoders.check_encoder(Short("short", ""), TINY, ["a b"])


@pytest.mark.parametrize("kind", [WrongEncoder, FailingEncoder])
@pytest.mark.parametrize("block_bytes", [SMALL, 200])
def test_a_library_that_goes_wrong_in_mid_run_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[WrongEncoder], block_bytes: int
) -> None:
    """It passes the first check; the spot checks find it out; the result is still the tokenizer's, and the run says so."""

    def make(name: str, tokenizer: Tokenizer) -> Encoder:
        return kind(name, "e") if name == "gigatoken" else make_encoder(name, tokenizer)

    def choose(tokenizer: Tokenizer, sample: list[str], rejected: tuple[str, ...], say: Any) -> str:
        return REFERENCE if "gigatoken" in rejected else "gigatoken"

    monkeypatch.setattr(workers, "make_encoder", make)
    said: list[str] = []
    done = preprocess(
        job(tmp_path / "out", block_bytes=block_bytes), say=said.append, choose=choose
    )
    assert done.encoder == REFERENCE
    assert "WARNING: gigatoken cannot be trusted with this corpus" in said[0]
    assert "STARTING OVER" in said[0]
    assert data_files(tmp_path / "out_text_document") == data_files(REFERENCE_PREFIX)


def test_long_texts_are_spot_checked_by_their_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = write_lines(tmp_path / "in.jsonl", {"text": "word " * 20_000})
    monkeypatch.setattr(workers, "make_encoder", lambda name, _: WrongEncoder(name, "word"))
    encode = workers.BlockEncoder(
        workers.EncodingJob(GPT2, "gigatoken", ("text",), False, "uint16")
    )
    from megatron.preprocess.inputs import read_blocks

    (block,) = read_blocks([str(long)], ["text"])
    with pytest.raises(EncoderMismatchError):
        encode(block)


def test_a_mismatch_travels_between_processes_and_the_tokenizer_itself_may_fail() -> None:
    error = pickle.loads(pickle.dumps(EncoderMismatchError("name", "reason")))
    assert (error.name, error.reason) == ("name", "reason")
    with pytest.raises(Panic):  # nothing is left to fall back to
        encoders.run_encoder(FailingEncoder(REFERENCE, "a"), ["a"])


def test_libraries_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        vocab_size, eod = 3, 0

    for name in encoders.CANDIDATES:
        pytest.importorskip(name)
        with pytest.raises(
            EncoderUnavailableError,
            match=r"it needs a (tokenizer.json|byte-level BPE like GPT-2's)",
        ):
            make_encoder(name, Own())  # type: ignore[arg-type]
    lower = build_tokenizer(GPT2)
    from tokenizers import normalizers

    lower.backend.normalizer = normalizers.Lowercase()  # type: ignore[attr-defined]
    with pytest.raises(EncoderUnavailableError, match="byte-level BPE like GPT-2's"):
        make_encoder("tiktoken", lower)
    merges = {
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5},
        "merges": [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]],
    }
    with pytest.raises(
        EncoderUnavailableError, match="two merges of this vocabulary give the same token"
    ):
        encoders._build_ranks(
            {
                **merges,
                "vocab": merges["vocab"] | dict.fromkeys(encoders.make_byte_symbols().values(), 6),
            }
        )
    monkeypatch.setattr(encoders, "TiktokenEncoder", None)
    with pytest.raises(EncoderUnavailableError, match="it does not take this tokenizer"):
        make_encoder("tiktoken", TINY)


def test_libraries_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name in encoders.CANDIDATES:
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    said: list[str] = []
    assert choose_encoder(TINY, [], (), said.append) == REFERENCE
    assert [
        f"pip install {name}" in line for name, line in zip(encoders.CANDIDATES, said, strict=False)
    ] == [True, True]


def test_the_cache_of_gigatoken_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    encoder = encoders.GigatokenEncoder(TINY)
    first = encoder._tokenizer
    encoder.encode(["a"])
    assert encoder._tokenizer is first
    monkeypatch.setattr(encoders, "_GIGATOKEN_CACHE_BYTES", -(1 << 40))
    encoder.encode(["a"])
    assert encoder._tokenizer is not first
    monkeypatch.setattr(encoders, "_read_resident_bytes", lambda: None)
    monkeypatch.setattr(encoders, "_GIGATOKEN_TEXT_CHARS", 5)
    encoder.encode(["a" * 10])
    second = encoder._tokenizer
    assert encoder.encode(["ab"])[0].tolist() == TINY.encode("ab")
    assert encoder._tokenizer is not second


def test_samples_come_from_all_over_the_inputs(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

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
    huge = write_lines(tmp_path / "huge.jsonl", {"text": "a" * (9 << 20)}, {"text": "b"})
    assert all(len(text) <= 16_000 for text in sample_texts([str(huge)], ["text"]))
