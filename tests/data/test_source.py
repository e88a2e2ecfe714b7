"""Sources of samples.

The samples do not depend on the number of ranks or threads, or on whether a run was resumed.
"""

import json
import threading

import numpy as np
import pytest
import torch
from data.corpora import HUNDRED, write_numbered
from data.source_requests import open_sources
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import DataConfig
from megatron.data.batches import compute_sample_positions
from megatron.data.build_sources import count_evaluation_samples
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.indexed_source import check_vocabulary
from megatron.data.position_source import Prefetcher
from megatron.data.source import BatchSlice


@pytest.fixture
def build(tmp_path):
    """Build sources of the first 100 documents, whose threads end with the test."""
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
        sources = open_sources(
            config,
            train_samples,
            seq_length=seq_length,
            seed=seed,
            valid_samples=valid_samples,
            test_samples=test_samples,
            batch_slice=batch_slice or BatchSlice(2),
        )
        opened.append(sources)
        return sources

    yield make
    for sources in opened:
        sources.close()


def join_rows(microbatches):
    """Return the samples of microbatches as rows of tokens and the last label."""
    return torch.cat([torch.cat([m.tokens, m.labels[:, -1:]], 1) for m in microbatches]).numpy()


def read_rows(source, batch_size, seq_length=None):
    """Return the samples of the next batch as rows."""
    return join_rows(source.read_batch(batch_size, seq_length))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_positions_of_all_ranks_are_the_batch(consumed, mbs, dp, microbatches):
    batch = mbs * dp * microbatches
    ranks = [
        compute_sample_positions(
            consumed=consumed,
            batch_size=batch,
            dp_rank=rank,
            dp_size=dp,
            micro_batch_size=mbs,
        )
        for rank in range(dp)
    ]
    assert np.stack(ranks, 1).reshape(-1).tolist() == list(range(consumed, consumed + batch))
    assert ranks[0].shape == (microbatches, mbs)


def test_a_batch_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(AssertionError, match=r"batch size 6 is no multiple of .* = 4"):
        compute_sample_positions(consumed=0, batch_size=6, dp_rank=0, dp_size=2, micro_batch_size=2)


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
        assert np.array_equal(join_rows(together), read_rows(alone, batch))


def test_a_resume_equals_the_uninterrupted_run(build):
    uninterrupted = build()
    expected = [read_rows(uninterrupted.train, 6) for _ in range(6)]
    expected_valid = [read_rows(uninterrupted.valid["validation"], 4) for _ in range(4)]
    first = build()
    for _ in range(3):
        first.train.read_batch(6)
    for _ in range(2):
        first.valid["validation"].read_batch(4)
    state = json.loads(json.dumps(first.state()))
    second = build()
    second.load(state)
    assert second.train.consumed_samples == 18
    for batch in expected[3:]:
        assert np.array_equal(read_rows(second.train, 6), batch)
    for batch in expected_valid[2:]:
        assert np.array_equal(read_rows(second.valid["validation"], 4), batch)
    assert second.take_notes() == []


def test_advance_skips_samples(build):
    reading = build().train
    skipping = build().train
    reading.read_batch(10)
    skipping.advance(10)
    assert np.array_equal(read_rows(reading, 4), read_rows(skipping, 4))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_reading_ahead_changes_nothing(build, threads):
    """Guesses are wrong after another batch size, another length, a skip or a load."""

    def run(source):
        seen = []
        for batch, length in ((4, None), (4, None), (6, None), (6, 32), (6, 32), (6, None)):
            seen.append(read_rows(source, batch, length))
        source.advance(50)
        seen.append(read_rows(source, 6))
        state = source.state()
        seen.append(read_rows(source, 6))
        source.load(state)
        seen.append(read_rows(source, 6))
        return seen

    inline = run(build(num_workers=0).train)
    ahead = run(build(num_workers=threads).train)
    assert all(np.array_equal(a, b) for a, b in zip(inline, ahead, strict=True))
    assert [batch.shape for batch in inline[2:4]] == [(6, 129), (6, 33)]


def test_a_load_discards_what_was_read_ahead(build):
    """The batch of the old order at the same position must not be returned."""
    other = build(seed=7).train
    other.read_batch(4)
    state = other.state()
    inline = build(num_workers=0).train
    inline.load(state)
    expected = read_rows(inline, 4)

    ahead = build(num_workers=2).train
    ahead.read_batch(4)
    ahead.load(state)
    assert np.array_equal(read_rows(ahead, 4), expected)

    unloaded = build().train
    unloaded.read_batch(4)
    assert not np.array_equal(read_rows(unloaded, 4), expected), "both orders are the same"


def test_guesses_are_read_in_threads_and_no_request_twice():
    read = []

    def reader(request):
        in_main_thread = threading.current_thread() is threading.main_thread()
        read.append((request, in_main_thread))
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


def test_a_shorter_sequence_length_truncates_samples(build):
    full = build().train
    short = build().train
    assert np.array_equal(read_rows(full, 4)[:, :17], read_rows(short, 4, seq_length=16))
    with pytest.raises(AssertionError, match="sequence length 129 is not in 1 to 128"):
        short.read_batch(4, seq_length=129)


def test_validation_wraps_around(build):
    valid = build().valid["validation"]
    end = valid.history.end
    first = read_rows(valid, 2)
    valid.advance(end - 3)
    across = read_rows(valid, 2)
    assert valid.consumed_samples == end + 1
    assert np.array_equal(across[1], first[0])
    assert np.array_equal(read_rows(valid, 2)[0], first[1])


def test_training_past_its_samples_is_an_error(build):
    train = build(train_samples=900).train
    end = train.history.end
    train.advance(end - 2)
    train.read_batch(2)
    with pytest.raises(DataError, match=f"reaches past the {end} training samples"):
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
    assert read_rows(sources.valid["numbers"], 4).min() >= 250
    assert read_rows(sources.test["last"], 2).min() >= 450
    state = json.loads(json.dumps(sources.state()))
    sources.load(state)
    assert sources.valid["numbers"].consumed_samples == 4
    assert sources.valid["web"].consumed_samples == 0


def test_evaluation_samples_are_counted():
    valid, test = count_evaluation_samples(
        train_iters=1000, eval_interval=300, eval_iters=10, global_batch_size=8
    )
    assert valid == 320
    assert test == 80


def test_data_are_opened_only_if_samples_are_requested(build):
    sources = build(train_samples=0, valid_samples=0)
    assert sources.train is None
    assert sources.valid == {}
    assert sources.test == {}
    sources = build(train_samples=0, valid_samples=1)
    assert list(sources.valid) == ["validation"]
    assert sources.test == {}


def test_missing_training_data_are_an_error_and_missing_validation_data_a_note(build):
    with pytest.raises(ConfigError, match="no training data is given"):
        build(data_path=())
    with pytest.raises(DataError, match="leaves no document for training"):
        build(split="0,1,0")
    sources = build(split="1,0,0", test_samples=8)
    assert sources.valid == {}
    # The test set is not asked for, so there is no note about it.
    notes = sources.take_notes()
    assert [note.partition(":")[0] for note in notes] == ["validation"]
    assert "leaves no document" in notes[0]
    assert sources.take_notes() == []
    # A share that is too small for a document is reported for the test set too.
    notes = build(split="1,0,0.0000001", test_samples=8).take_notes()
    assert [note.partition(":")[0] for note in notes] == ["validation", "test"]


def test_data_that_are_too_small_or_missing_are_refused(build):
    with pytest.raises(DataError, match="fewer than one sample"):
        build(seq_length=100_000_000)
    with pytest.raises(DataError, match="does not exist"):
        build(data_path=("/nowhere",))


def write_bad_token(tmp_path, document, padding, token=5000):
    """Write 20 documents of `padding` tokens, one of which holds `token`."""
    with IndexedDatasetWriter(tmp_path / "bad", np.int32) as writer:
        for number in range(20):
            ids = np.full(padding, 7)
            if number == document:
                ids[3] = token
            writer.add_document(ids)
    return str(tmp_path / "bad")


def test_a_token_beyond_the_vocabulary_is_found_at_the_start(build, tmp_path):
    bad = write_bad_token(tmp_path, document=11, padding=200)
    with pytest.raises(DataError, match="document 11 holds the token id 5000") as raised:
        build(BatchSlice(2, vocab_size=5000), data_path=(bad,), split="1,0,0")
    assert "the vocabulary has 5000 entries" in str(raised.value)
    build(BatchSlice(2, vocab_size=5001), data_path=(bad,), split="1,0,0")


@pytest.mark.parametrize("threads", [0, 2])
def test_a_token_beyond_the_vocabulary_is_found_when_read(build, tmp_path, monkeypatch, threads):
    monkeypatch.setattr("megatron.data.indexed_source._SCANNED_TOKENS", 100)
    bad = write_bad_token(tmp_path, document=11, padding=200)
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
    monkeypatch.setattr("megatron.data.indexed_source._SCANNED_TOKENS", 100)
    bad = write_bad_token(tmp_path, document=11, padding=200, token=-1)
    sources = build(
        BatchSlice(2, vocab_size=5000),
        data_path=(bad,),
        split="1,0,0",
        seq_length=50,
        train_samples=70,
    )
    with pytest.raises(DataError, match="document 11 holds the token id -1"):
        sources.train.read_batch(68)


def test_a_negative_token_is_found_at_the_start(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_document([1, 2])
        writer.add_document([3, -1])
    with pytest.raises(DataError, match="document 1 holds the token id -1"):
        check_vocabulary(IndexedDataset(tmp_path / "x"), 10)
