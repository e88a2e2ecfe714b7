"""The order of samples, compared with the published hashes of the reference."""

import numpy as np
import pytest
from data.corpora import HUNDRED, THOUSAND_IDX, golden, short_hash, write_numbered
from shared_data import shared_dir

from megatron.base.errors import DataError
from megatron.data import index_numpy
from megatron.data.cache import IndexCache
from megatron.data.gpt_dataset import GPTDataset, IndexShape, choose_signed_type
from megatron.data.indexed import IndexedDataset

ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")


def open_case(data, case, cache):
    return GPTDataset(
        data,
        documents=tuple(case["documents"]),
        seq_length=case["seq_length"],
        seed=case["seed"],
        num_samples=case["num_samples"],
        cache=IndexCache(cache),
    )


def open_documents(data, last, seq_length, num_samples, cache):
    """Open the index of the first `last` documents with seed 1."""
    return GPTDataset(
        data,
        documents=(0, last),
        seq_length=seq_length,
        seed=1,
        num_samples=num_samples,
        cache=IndexCache(cache),
    )


def check_index(dataset, case):
    assert dataset.shape.num_epochs == case["epochs"]
    assert dataset.shape.separate_last_epoch == case["separate_last_epoch"]
    for name in ARRAYS:
        array = getattr(dataset, name)
        assert [str(array.dtype), list(array.shape), short_hash(array)] == case[name], name


def check_tokens(dataset, case):
    found = [short_hash(dataset[i]) for i in (0, 1, case["num_samples"] - 1)]
    assert found == case["tokens_of_samples_0_1_last"]


@pytest.mark.parametrize(
    "case",
    golden("openwebtext-1000")["index"],
    ids=lambda case: f"{case['num_samples']}x{case['seq_length']}",
)
def test_index_has_the_hashes_of_the_reference(tmp_path, case):
    """The index depends on the sizes of the documents only, so the .bin may hold zeros."""
    (tmp_path / "x.idx").write_bytes(THOUSAND_IDX.read_bytes())
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(2 * 1_361_845)
    check_index(open_case(IndexedDataset(tmp_path / "x"), case, tmp_path), case)


@pytest.mark.parametrize(
    "case",
    golden("openwebtext-1000")["index"],
    ids=lambda case: f"{case['num_samples']}x{case['seq_length']}",
)
def test_samples_have_the_hashes_of_the_reference(tmp_path, case):
    folder = shared_dir("data", "openwebtext-1000")
    check_tokens(
        open_case(IndexedDataset(folder / "meg-gpt2-openwebtext_text_document"), case, tmp_path),
        case,
    )


@pytest.mark.parametrize("helpers", ["built", "numpy"])
@pytest.mark.parametrize(
    "case",
    golden("openwebtext-100")["index"],
    ids=lambda case: f"{case['num_samples']}x{case['seq_length']}",
)
def test_index_and_samples_of_hundred_documents(tmp_path, case, helpers, monkeypatch):
    if helpers == "numpy":
        monkeypatch.setattr("megatron.data.index_helpers.sample_index", index_numpy.sample_index)
        monkeypatch.setattr("megatron.data.index_helpers.gather_tokens", index_numpy.gather_tokens)
    dataset = open_case(IndexedDataset(HUNDRED), case, tmp_path)
    check_index(dataset, case)
    check_tokens(dataset, case)


def test_an_epoch_shows_every_token_once(tmp_path):
    data = IndexedDataset(write_numbered(tmp_path / "x", documents=20, size=33))
    dataset = open_documents(data, 20, seq_length=10, num_samples=50, cache=tmp_path)
    seen = np.concatenate([dataset[i][:-1] for i in range(len(dataset))])
    assert len(seen) == 650
    assert len(set(seen.tolist())) == 650
    for i in range(len(dataset)):
        tokens = dataset[i]
        for column in (0, 5, 10):
            document, offset = dataset.locate(i, column)
            assert data[document][offset] == tokens[column]


@pytest.mark.parametrize("tokens", [11, 12, 57, 100])
@pytest.mark.parametrize("num_samples", [1, 5, 9, 23])
def test_the_number_of_epochs_is_the_smallest_that_suffices(tokens, num_samples):
    shape = IndexShape.compute(tokens_per_epoch=tokens, seq_length=10, num_samples=num_samples)
    assert shape.num_samples == (shape.num_epochs * tokens - 1) // 10
    assert shape.num_samples >= num_samples
    assert shape.num_epochs == 1 or ((shape.num_epochs - 1) * tokens - 1) // 10 < num_samples


def test_wider_types_only_where_needed():
    assert choose_signed_type(2**31 - 1) is np.int32
    assert choose_signed_type(2**31) is np.int64


def test_a_corpus_too_small_for_one_sample_is_refused(tmp_path):
    data = IndexedDataset(write_numbered(tmp_path / "x", documents=4, size=25))
    open_documents(data, 4, seq_length=99, num_samples=5, cache=tmp_path)
    with pytest.raises(DataError, match="hold 100 tokens") as raised:
        open_documents(data, 4, seq_length=100, num_samples=5, cache=tmp_path)
    assert "--seq-length 100 needs 101" in str(raised.value)
