"""Tests of the record of the tokenizer beside a data set."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from preprocess.test_preprocess import job, run
from process_pool import ProcessPool
from tiny_corpus import GPT2, MERGES, VOCAB, data_files
from training.runs import Runner

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDatasetWriter
from megatron.data.tokenizer_record import (
    check_tokenizers_of_data,
    describe_tokenizer,
    get_record_path,
    read_record,
    write_record,
)
from megatron.extras.preparation.commands.merge_datasets import merge_datasets
from megatron.tokenizer.build import HFTokenizer, build_tokenizer


@pytest.fixture
def swapped(tmp_path: Path) -> TokenizerConfig:
    """Return a tokenizer of the same size in which two tokens have each other's id."""
    vocabulary = json.loads(Path(VOCAB).read_text())
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path = tmp_path / "swapped-vocab.json"
    path.write_text(json.dumps(vocabulary))
    return TokenizerConfig(vocab_file=str(path), merge_file=MERGES)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Return a data set that the tool has made."""
    run(job(tmp_path / "made"))
    return str(tmp_path / "made_text_document")


def write_data(prefix: Path, *documents: list[int]) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for ids in documents:
            writer.add_document(ids)
    return str(prefix)


def test_another_tokenizer_of_the_same_size_is_found(prefix: str, swapped: TokenizerConfig) -> None:
    check_tokenizers_of_data(GPT2, [prefix])
    with pytest.raises(ConfigError, match="made with another tokenizer") as failure:
        check_tokenizers_of_data(swapped, [prefix])
    message = str(failure.value)
    assert f"{prefix}: --vocab-file {Path(VOCAB).name}" in message
    assert "and swapped-vocab.json" in message
    assert "--merge-file" not in message
    # Without its files, a tokenizer cannot be compared.
    check_tokenizers_of_data(TokenizerConfig(vocab_size=5000), [prefix])


def test_another_format_of_a_tokenizer_is_compared_by_its_ids(
    prefix: str, swapped: TokenizerConfig, tmp_path: Path
) -> None:
    """The files of both formats have no common part, but the ids of the tokens are the same."""

    def convert(config: TokenizerConfig, name: str) -> TokenizerConfig:
        tokenizer = build_tokenizer(config)
        assert isinstance(tokenizer, HFTokenizer)
        folder = tmp_path / name
        folder.mkdir()
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        return TokenizerConfig(
            tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(folder)
        )

    check_tokenizers_of_data(convert(GPT2, "same"), [prefix])
    with pytest.raises(ConfigError, match="ids of all tokens"):
        check_tokenizers_of_data(convert(swapped, "other"), [prefix])


def test_a_copied_tokenizer_is_the_same(prefix: str, tmp_path: Path) -> None:
    shutil.copy(VOCAB, tmp_path / "vocab.json")
    copied = TokenizerConfig(vocab_file=str(tmp_path / "vocab.json"), merge_file=MERGES)
    check_tokenizers_of_data(copied, [prefix])


def test_data_without_a_record_are_accepted(prefix: str, swapped: TokenizerConfig) -> None:
    get_record_path(prefix).unlink()
    check_tokenizers_of_data(swapped, [prefix])


def test_the_record_of_replaced_data_does_not_count(
    prefix: str, swapped: TokenizerConfig, tmp_path: Path
) -> None:
    write_data(Path(prefix), [1, 2, 3])
    assert read_record(prefix) is None
    check_tokenizers_of_data(swapped, [prefix])
    Path(f"{prefix}.bin").unlink()
    assert read_record(prefix) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"bytes": [1]}', '{"tokenizer": {"a": 1}}', "[" * 9999]
)
def test_a_damaged_record_is_an_error(text: str, prefix: str) -> None:
    get_record_path(prefix).write_text(text)
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged; delete it"):
        read_record(prefix)


def test_the_record_is_replaced_with_the_data(
    tmp_path: Path, swapped: TokenizerConfig, prefix: str
) -> None:
    run(job(tmp_path / "made", tokenizer=swapped, overwrite=True))
    check_tokenizers_of_data(swapped, [prefix])
    with pytest.raises(ConfigError):
        check_tokenizers_of_data(GPT2, [prefix])


def test_a_merge_keeps_the_record_if_all_parts_agree(
    prefix: str, swapped: TokenizerConfig, tmp_path: Path
) -> None:
    merged = str(tmp_path / "merged")
    merge_datasets([prefix, prefix], merged)
    assert read_record(merged) == describe_tokenizer(GPT2)
    # A part of unknown origin makes the whole unknown.
    unknown = write_data(tmp_path / "unknown", [1, 2])
    merge_datasets([prefix, unknown], merged, overwrite=True)
    assert not get_record_path(merged).exists()
    before = data_files(merged)
    other = write_data(tmp_path / "other", [3, 4])
    write_record(other, describe_tokenizer(swapped))
    with pytest.raises(DataError, match="other was made with another tokenizer than"):
        merge_datasets([prefix, other], merged, overwrite=True)
    assert data_files(merged) == before


def test_training_refuses_the_data_of_another_tokenizer(
    prefix: str, swapped: TokenizerConfig, pool: ProcessPool, tmp_path: Path
) -> None:
    runner = Runner(pool, prefix, tmp_path / "run")
    flags = "--vocab-file {} --merge-file {} --exit-interval 1 --eval-iters 0"
    error = runner.error(flags.format(swapped.vocab_file, MERGES), ranks=2)
    assert error.startswith("ConfigError: the data were made with another tokenizer")
    assert not (runner.folder / "metrics.jsonl").exists()
    runner(flags.format(VOCAB, MERGES), ranks=2)
    assert list(runner.losses()) == [1]
