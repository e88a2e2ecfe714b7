"""Tests of texts for which the library of a tokenizer panics.

The normalizer's regular expression gives up after too many tries. The library then raises a class
that is no Exception.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.base.errors import DataError
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.extras.preparation.preprocess.build_dataset import PreprocessJob, preprocess
from megatron.extras.preparation.preprocess.encoders import (
    REFERENCE,
    EncoderMismatchError,
    choose_encoder,
)
from megatron.extras.preparation.preprocess.inputs import InputBlock, Position
from megatron.extras.preparation.preprocess.workers import BlockEncoder, EncodingJob
from megatron.extras.samples.stream.streamed_dataset import StreamedDataset
from megatron.tokenizer.build import Tokenizer, build_tokenizer
from megatron.tokenizer.failures import TokenizerError
from megatron.tokenizer.sentencepiece_model import SentencePieceTokenizer

BAD = "a" * 60 + "c"
END = {"id": 2, "content": "<|endoftext|>", "special": True}
DESCRIPTION = {
    "version": "1.0",
    "added_tokens": [
        END | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    ],
    "normalizer": {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "x"},
    "model": {
        "type": "WordLevel",
        "vocab": {"b": 0, "[UNK]": 1, "<|endoftext|>": 2},
        "unk_token": "[UNK]",
    },
}


@pytest.fixture
def config(tmp_path: Path) -> TokenizerConfig:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(DESCRIPTION))
    return TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(folder))


@pytest.fixture
def tokenizer(config: TokenizerConfig) -> Tokenizer:
    return build_tokenizer(config)


def write_texts(folder: Path, *texts: str) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "other": "b"}) + "\n" for text in texts))
    return path


def test_an_error_names_the_tokenizer_and_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    expected = f"{tmp_path}/tokenizer/tokenizer.json fails for the text '{BAD}' .PanicException"
    with pytest.raises(TokenizerError, match=expected) as caught:
        tokenizer.encode_batch(["b", BAD, "b"])
    assert caught.value.text == BAD
    with pytest.raises(TokenizerError, match=expected):
        tokenizer.encode(BAD)
    # The library works after a panic.
    assert tokenizer.encode_batch(["b", "c"]) == [[0], [1]]


def test_the_document_is_a_bad_line(config: TokenizerConfig, tmp_path: Path) -> None:
    path = write_texts(tmp_path, "b", BAD, "c", BAD, "b")
    job = PreprocessJob(
        input=(str(path),),
        output_prefix=str(tmp_path / "out"),
        tokenizer=config,
        json_keys=("text", "other"),
        append_eod=True,
        workers=1,
        block_bytes=16,
    )
    with pytest.raises(DataError, match=f"{path}:2: the tokenizer .* fails for the text"):
        preprocess(job, log=lambda line: None, choose=lambda *_: REFERENCE)
    messages: list[str] = []
    skipping = PreprocessJob(**{**vars(job), "on_bad_line": "skip"})
    summary = preprocess(skipping, log=messages.append, choose=lambda *_: REFERENCE)
    assert summary.bad_lines == 2
    for key, expected in (("text", [[0, 2], [1, 2], [0, 2]]), ("other", [[0, 2]] * 3)):
        data = IndexedDataset(tmp_path / f"out_{key}_document")
        assert [data.get(number).tolist() for number in range(len(data))] == expected
    skipped = [line for line in messages if line.startswith("bad line skipped")]
    assert [line.split(":")[2] for line in skipped] == ["2", "4"]


def test_a_library_is_not_trusted_where_the_tokenizer_fails(
    config: TokenizerConfig, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fast:
        name = "fast"

        def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
            return np.ones(len(texts), np.int32), np.ones(len(texts), np.int64)

    encode = BlockEncoder(EncodingJob(config, REFERENCE, ("text",), False, "uint16"))
    monkeypatch.setattr(encode, "_encoder", Fast())
    line = json.dumps({"text": BAD}).encode() + b"\n"
    with pytest.raises(EncoderMismatchError, match="fails for the text"):
        encode(InputBlock("a.jsonl", 1, line, Position(0, len(line), 1), len(line)))
    # Nor can it be compared on a sample with such a text.
    lines: list[str] = []
    assert choose_encoder(tokenizer, [BAD], (), lines.append, lambda *_: Fast()) == REFERENCE
    assert any("fails for the text" in line for line in lines)


def test_an_error_of_sentencepiece_names_the_model() -> None:
    class Processor:
        def eos_id(self) -> int:
            return 1

        def get_piece_size(self) -> int:
            return 0

        def encode(self, texts: list[str], num_threads: int) -> list[list[int]]:
            raise RuntimeError("Internal: bad text")

    tokenizer = SentencePieceTokenizer(Processor(), b"", "a/tokenizer.model")
    with pytest.raises(
        TokenizerError, match=r"a/tokenizer\.model fails for the text 'b' \(Runtime"
    ):
        tokenizer.encode("b")


def test_streamed_data_names_the_file_and_the_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    dataset = StreamedDataset.__new__(StreamedDataset)
    dataset._encode = lambda texts: [np.array(ids) for ids in tokenizer.encode_batch(texts)]
    with pytest.raises(DataError, match=r"a\.jsonl: row 7 of a row group: the tokenizer"):
        dataset._make_documents(["b", np.zeros(1, np.int64), BAD], "a.jsonl", [3, 5, 7])
