"""Sources: the same samples on any number of ranks, with any number of threads, resumed or not."""

import json
import threading

import numpy as np
import pytest
import torch
from corpora import HUNDRED, write_numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.data.batches import compute_sample_positions
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.prefetch import Prefetcher
from megatron.data.source import (
    BatchSlice,
    build_sources,
    check_vocabulary,
    count_evaluation_samples,
)
from megatron.errors import ConfigError, DataError


@pytest.fixture
def build(tmp_path):
    """Build sources over the first 100 documents, caches in a temporary folder; threads end with the test."""
    opened = []

    def make(
        batch_slice=None,
        *,
        num_workers=0,
        train_samples=900,
        valid_samples=40,
        test_samples=0,
        seq_length=128,
        seed=1234,
        **data,
    ):
        data = {
            "data_path": (HUNDRED,),
            "split": "90,8,2",
            "data_cache_path": str(tmp_path / "cache"),
            **data,
        }
        config = DataConfig(num_workers=num_workers, valid_num_workers=num_workers, **data)
        sources = build_sources(
            config,
            seq_length=seq_length,
            seed=seed,
            train_samples=train_samples,
            valid_samples=valid_samples,
            test_samples=test_samples,
            batch_slice=batch_slice or BatchSlice(2),
        )
        opened.append(sources)
        return sources

    yield make
    for sources in opened:
        sources.close()


def rows(microbatches):
    """Samples as rows of tokens and the last label."""
    return torch.cat([torch.cat([m.tokens, m.labels[:, -1:]], 1) for m in microbatches]).numpy()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_positions_of_all_ranks_are_the_batch(consumed, mbs, dp, microbatches):
    batch = mbs * dp * microbatches
    ranks = [compute_sample_positions(consumed, batch, rank, dp, mbs) for rank in range(dp)]
    assert np.stack(ranks, 1).reshape(-1).tolist() == list(range(consumed, consumed + batch))
    assert ranks[0].shape == (microbatches, mbs)


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(AssertionError, match=r"batch size 6 is no multiple of .* = 4"):
        compute_sample_positions(0, 6, 0, 2, 2)


def test_microbatches_are_shifted_and_contiguous(build):
    train = build().train
    microbatches = train.read_batch(4)
    assert [m.tokens.shape for m in microbatches] == [(2, 128)] * 2
    for microbatch in microbatches:
        assert torch.equal(microbatch.tokens[:, 1:], microbatch.labels[:, :-1])
        assert microbatch.tokens.dtype == torch.int64
        assert microbatch.tokens.is_contiguous()
        assert microbatch.labels.is_contiguous()
        assert microbatch.loss_mask is None
    assert train.consumed_samples == 4


@pytest.mark.parametrize("dp", [2, 4])
def test_the_batch_is_the_same_on_any_number_of_ranks(build, dp):
    alone = build(BatchSlice(1)).train
    ranks = [build(BatchSlice(1, rank, dp)).train for rank in range(dp)]
    for batch in (8, 4, 8):
        parts = [source.read_batch(batch) for source in ranks]
        together = [microbatch for group in zip(*parts, strict=True) for microbatch in group]
        assert np.array_equal(rows(together), rows(alone.read_batch(batch)))


def test_a_resume_equals_the_uninterrupted_run(build):
    whole = build()
    expected = [rows(whole.train.read_batch(6)) for _ in range(6)]
    expected_valid = [rows(whole.valid["validation"].read_batch(4)) for _ in range(4)]
    first = build()
    for _ in range(3):
        first.train.read_batch(6)
    for _ in range(2):
        first.valid["validation"].read_batch(4)
    state = json.loads(json.dumps(first.state()))
    second = build()
    second.load(state)
    assert second.train.consumed_samples == 18
    assert all(np.array_equal(rows(second.train.read_batch(6)), batch) for batch in expected[3:])
    assert all(
        np.array_equal(rows(second.valid["validation"].read_batch(4)), batch)
        for batch in expected_valid[2:]
    )
    assert second.take_notes() == []


def test_advance_passes_over_samples(build):
    reading, passing = build().train, build().train
    reading.read_batch(10)
    passing.advance(10)
    assert np.array_equal(rows(reading.read_batch(4)), rows(passing.read_batch(4)))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_reading_ahead_changes_nothing(build, threads):
    """Also when guesses are wrong: another batch size, another length, a skip, a load."""

    def run(source):
        seen = []
        for batch, length in ((4, None), (4, None), (6, None), (6, 32), (6, 32), (6, None)):
            seen.append(rows(source.read_batch(batch, length)))
        source.advance(50)
        seen.append(rows(source.read_batch(6)))
        state = source.state()
        seen.append(rows(source.read_batch(6)))
        source.load(state)
        seen.append(rows(source.read_batch(6)))
        return seen

    inline, ahead = run(build(num_workers=0).train), run(build(num_workers=threads).train)
    assert all(np.array_equal(a, b) for a, b in zip(inline, ahead, strict=True))
    assert [batch.shape for batch in inline[2:4]] == [(6, 129), (6, 33)]


def test_a_load_forgets_what_was_read_ahead(build):
    """The other order's batch at the same position must not be handed out."""
    ahead, other = build(num_workers=2).train, build(seed=7).train
    ahead.read_batch(4)
    other.read_batch(4)
    state = other.state()
    ahead._requested = other._requested
    ahead.load(state)
    assert np.array_equal(rows(ahead.read_batch(4)), rows(other.read_batch(4)))


def test_reading_ahead_reads_ahead_and_no_request_twice():
    read = []

    def reader(request):
        read.append((request, threading.current_thread() is threading.main_thread()))
        return request * 10

    prefetcher = Prefetcher(reader, 2)
    assert prefetcher.take(1, [2, 3, 4]) == 10
    assert prefetcher.take(2, [3, 4]) == 20
    assert prefetcher.take(3, [4, 5]) == 30
    assert prefetcher.take(9, [10]) == 90
    prefetcher.close()
    assert sorted(request for request, _ in read if request in (1, 2, 3, 9)) == [1, 2, 3, 9]
    assert (2, False) in read
    assert (1, True) in read


def test_an_error_while_reading_ahead_is_raised_when_its_batch_is_taken():
    def reader(request):
        if request == 2:
            raise DataError("batch 2 is bad")
        return request

    prefetcher = Prefetcher(reader, 2)
    assert prefetcher.take(1, [2, 3]) == 1
    with pytest.raises(DataError, match="batch 2 is bad"):
        prefetcher.take(2, [3, 4])
    assert prefetcher.take(3) == 3
    prefetcher.close()


def test_curriculum_cuts_samples(build):
    full, cut = build().train, build().train
    assert np.array_equal(rows(full.read_batch(4))[:, :17], rows(cut.read_batch(4, seq_length=16)))
    with pytest.raises(AssertionError, match="sequence length 129 is not in 1 to 128"):
        cut.read_batch(4, seq_length=129)


def test_validation_wraps_around(build):
    valid = build().valid["validation"]
    end = valid.history.end
    first = rows(valid.read_batch(2))
    valid.advance(end - 3)
    across = rows(valid.read_batch(2))
    assert valid.consumed_samples == end + 1
    assert np.array_equal(across[1], first[0])
    assert np.array_equal(rows(valid.read_batch(2))[0], first[1])


def test_training_ends_with_its_samples(build):
    train = build(train_samples=900).train
    end = train.history.end
    train.advance(end - 2)
    train.read_batch(2)
    with pytest.raises(
        DataError, match=rf"2 samples at {end} reaches past the {end} training samples"
    ):
        train.read_batch(2)


def test_several_validation_sets_and_a_test_set(build, tmp_path):
    other = write_numbered(tmp_path / "other", documents=10, size=50)
    sources = build(
        data_path=(),
        seq_length=20,
        test_samples=4,
        train_weighted_split_paths=(f"train: 0.8 0:0.9 {HUNDRED}, 0.2 0:0.5 {other}",),
        valid_weighted_split_paths=(f"web: 1 0.9:1 {HUNDRED}", f"numbers: 1 0.5:1 {other}"),
        test_weighted_split_paths=(f"last: 1 0.9:1 {other}",),
    )
    assert list(sources.valid) == ["web", "numbers"]
    assert list(sources.test) == ["last"]
    assert rows(sources.valid["numbers"].read_batch(4)).min() >= 250
    assert rows(sources.test["last"].read_batch(2)).min() >= 450
    state = json.loads(json.dumps(sources.state()))
    sources.load(state)
    assert sources.valid["numbers"].consumed_samples == 4
    assert sources.valid["web"].consumed_samples == 0


def test_evaluation_samples():
    assert count_evaluation_samples(
        train_iters=1000, eval_interval=300, eval_iters=10, global_batch_size=8
    ) == (320, 80)


def test_nothing_is_opened_that_is_not_asked_for(build):
    sources = build(train_samples=0, valid_samples=0)
    assert (sources.train, sources.valid, sources.test) == (None, {}, {})


def test_no_data(build):
    with pytest.raises(ConfigError, match="no training data is given"):
        build(data_path=())
    with pytest.raises(DataError, match="leaves no document for training"):
        build(split="0,1,0")
    sources = build(split="1,0,0")
    assert sources.valid == {}
    assert "leaves no document" in sources.take_notes()[0]
    assert sources.take_notes() == []


def test_too_small_and_missing_data_stop_the_build(build):
    with pytest.raises(DataError, match="fewer than one sample"):
        build(seq_length=100_000_000)
    with pytest.raises(DataError, match="does not exist"):
        build(data_path=("/nowhere",))


def with_bad_token(tmp_path, document, padding, token=5000):
    with IndexedDatasetWriter(tmp_path / "bad", np.int32) as writer:
        for number in range(20):
            ids = np.full(padding, 7)
            if number == document:
                ids[3] = token
            writer.add_document(ids)
    return str(tmp_path / "bad")


def test_a_token_beyond_the_vocabulary_is_found_at_the_start(build, tmp_path):
    bad = with_bad_token(tmp_path, document=11, padding=200)
    with pytest.raises(
        DataError,
        match=r"bad: document 11 holds the token id 5000, but the vocabulary has 5000 entries",
    ):
        build(BatchSlice(2, vocab_size=5000), data_path=(bad,), split="1,0,0")
    build(BatchSlice(2, vocab_size=5001), data_path=(bad,), split="1,0,0")


@pytest.mark.parametrize("threads", [0, 2])
def test_a_token_beyond_the_vocabulary_is_found_when_read(build, tmp_path, monkeypatch, threads):
    monkeypatch.setattr("megatron.data.source._SCANNED_TOKENS", 100)
    bad = with_bad_token(tmp_path, document=11, padding=200)
    sources = build(
        BatchSlice(2, vocab_size=5000),
        data_path=(bad,),
        split="1,0,0",
        seq_length=50,
        train_samples=70,
        num_workers=threads,
    )
    with pytest.raises(DataError, match="document 11 holds the token id 5000"):
        sources.train.read_batch(68)


def test_a_negative_token_is_found_when_read(build, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.source._SCANNED_TOKENS", 100)
    bad = with_bad_token(tmp_path, document=11, padding=200, token=-1)
    sources = build(
        BatchSlice(2, vocab_size=5000),
        data_path=(bad,),
        split="1,0,0",
        seq_length=50,
        train_samples=70,
    )
    with pytest.raises(DataError, match="document 11 holds the token id -1"):
        sources.train.read_batch(68)


def test_a_negative_token(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_document([1, 2])
        writer.add_document([3, -1])
    with pytest.raises(DataError, match="document 1 holds the token id -1"):
        check_vocabulary(IndexedDataset(tmp_path / "x"), 10)
