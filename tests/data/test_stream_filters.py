"""Filters leave out exactly the documents that they should, and counts follow from the position."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from data.row_files import make_dirty_documents, write_dataset, write_rows
from data.test_stream_source import EOS, LENGTH, SHARDS, build, open_dataset, run
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.extras.samples.stream.filters import (
    DUPLICATE,
    KEPT,
    NGRAM,
    REPETITIVE,
    TOO_LONG,
    FilterReport,
    Filters,
    compute_ngram_repetition,
)
from megatron.extras.samples.stream.listing import list_dataset
from megatron.extras.samples.stream.reader import Cursor, ShardReader
from megatron.extras.samples.stream.streamed_dataset import Specials, StreamedDataset
from megatron.parallel.ranks import Ranks

ALL = Filters(max_document_tokens=60, max_ngram_repetition=0.3, drop_duplicates=True)
CHOICES = [
    Filters(),
    Filters(max_document_tokens=20),
    Filters(max_ngram_repetition=0.3),
    Filters(drop_duplicates=True),
    ALL,
]


def judge_plainly(filters: Filters, window: Sequence[Sequence[int]]) -> list[int]:
    """Return the outcome for each document, without arrays and hashes."""
    outcomes = []
    seen: list[Sequence[int]] = []
    for ids in window:
        limit = filters.max_ngram_repetition
        if filters.max_document_tokens is not None and len(ids) > filters.max_document_tokens:
            outcomes.append(TOO_LONG)
        elif limit is not None and find_share_plainly(ids) > limit:
            outcomes.append(REPETITIVE)
        elif filters.drop_duplicates and ids in seen:
            outcomes.append(DUPLICATE)
        else:
            outcomes.append(KEPT)
            seen.append(ids)
    return outcomes


def find_share_plainly(ids: Sequence[int]) -> float:
    grams = [tuple(ids[start : start + NGRAM]) for start in range(len(ids) - NGRAM + 1)]
    times = Counter(grams)
    covered = {
        start + offset
        for start, gram in enumerate(grams)
        if times[gram] > 1
        for offset in range(NGRAM)
    }
    return len(covered) / max(1, len(ids))


pieces = st.lists(st.integers(0, 2), max_size=14)
documents_with_repetitions = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(0, 2**62), max_size=30).map(lambda ids: ids + ids[3:]),
    st.tuples(pieces, st.integers(0, 6), pieces).map(lambda p: p[0] * p[1] + p[2] + p[0]),
)


@settings(deadline=None, max_examples=150)
@given(documents_with_repetitions)
def test_repetition_is_the_share_of_repeated_sequences(ids: list[int]):
    assert compute_ngram_repetition(np.array(ids, np.int64)) == find_share_plainly(ids)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(documents_with_repetitions, max_size=12).map(lambda window: window + window[::3]),
    st.sampled_from(CHOICES),
)
def test_first_filter_that_applies_counts(window: list[list[int]], filters: Filters):
    arrays = [np.array(ids, np.int64) for ids in window]
    assert filters.judge(arrays) == judge_plainly(filters, window)


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dirty")
    for number, (name, count) in enumerate({"web": 700, "code": 300}.items()):
        documents = make_dirty_documents(count, number, first=10_000 * (number + 1))
        write_dataset(folder / name, documents, group=130)
    return folder


MIXTURE = {"web": 3.0, "code": 1.0}


@settings(deadline=None, max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(1, 1, 0), (1, 3, 2), (2, 1, 0), (3, 2, 1)]),
            st.sampled_from([*CHOICES, ALL, ALL]),
            st.lists(st.sampled_from([6, 12, 24, -6, -30]), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_other_numbers_of_ranks_and_changed_filters(dirty: Path, launches: list):
    """Samples and counts are those of one rank that reads without threads.

    Each launch may have other filters. They apply from its first sample on.
    """
    expected: list = []
    batches: list = []
    reference = None
    state = None
    for (ranks, micro_batch, threads), filters, steps in launches:
        found, reference = run(dirty, steps, MIXTURE, reference, filters=filters)
        expected += found
        found, state = run(dirty, steps, MIXTURE, state, ranks, micro_batch, threads, filters)
        batches += found
    assert (batches, state) == (expected, reference)
    assert state is not None
    changes = sum(one != other for (_, one, _), (_, other, _) in itertools.pairwise(launches))
    assert len(state["stream"]["segments"]) == 1 + changes


def test_one_launch_or_many_give_the_same_counts(dirty: Path):
    whole, expected = run(dirty, [12] * 12, MIXTURE, filters=ALL)
    parts: list = []
    state = None
    for ranks, steps in ((1, [12] * 5), (3, [12] * 4), (2, [12] * 3)):
        found, state = run(dirty, steps, MIXTURE, state, ranks, filters=ALL)
        parts += found
    assert (parts, state) == (whole, expected)
    for record in expected["stream"]["datasets"]:
        totals = np.array(record["filter_counts"]).sum(0)
        assert totals.shape == (4, 2)
        assert totals.min() > 0


@pytest.mark.parametrize("strip", [(), (5, 6)])
@pytest.mark.parametrize("filters", CHOICES[1:])
def test_skipping_goes_where_reading_goes(dirty: Path, filters: Filters, strip: tuple[int, ...]):
    dataset = open_dataset(dirty, "web", Specials(bos=EOS, strip=strip), 2, filters)
    reader = ShardReader(dataset, 1, Cursor())
    cursors = [reader.cursor]
    samples = []
    while reader.cursor.epoch < 2:
        samples.append(reader.read_sample(LENGTH))
        cursors.append(reader.cursor)
    for number in (1, len(samples) // 3, len(samples) - 1):
        skipping = ShardReader(dataset, 1, Cursor())
        skipping.skip_tokens(number * LENGTH)
        assert skipping.cursor == cursors[number]
        assert np.array_equal(skipping.read_sample(LENGTH).tokens, samples[number].tokens)


def read_first_epoch(dataset: StreamedDataset) -> tuple[Counter, NDArray[np.int64]]:
    """Return the documents of the first epoch of a data set of one shard, and the counts."""
    reader = ShardReader(dataset, 0, Cursor())
    found: Counter = Counter()
    stream: list[int] = []
    while reader.cursor.epoch == 0:
        stream += reader.read_sample(1).tokens[:-1].tolist()
    counts = np.array(reader.cursor.filter_counts)
    if dataset.filters.active:
        # The cursor has passed over documents of the next epoch that are left out.
        piece = dataset.open_epoch(1).list_pieces(0)[0]
        for document in itertools.islice(dataset.read_documents(1, piece), reader.cursor.document):
            counts[document.outcome] -= (1, document.size)
    ends = [place for place, token in enumerate(stream) if token == EOS]
    begin = 0
    for end in ends:
        found[tuple(stream[begin:end])] += 1
        begin = end + 1
    return found, counts


@pytest.mark.parametrize("filters", CHOICES)
def test_an_epoch_has_the_documents_that_are_kept(tmp_path: Path, filters: Filters):
    """Row groups have less than 256 rows here, so each one is a window."""
    documents = make_dirty_documents(300, 3, first=10_000)
    write_rows(tmp_path / "web" / "a.parquet", "tokens", documents, group=110)
    found, counts = read_first_epoch(open_dataset(tmp_path, "web", Specials(eos=EOS), 1, filters))
    kept: Counter = Counter()
    expected = np.zeros((4, 2), np.int64)
    for begin in range(0, 300, 110):
        window = documents[begin : begin + 110]
        for ids, outcome in zip(window, judge_plainly(filters, window), strict=True):
            expected[outcome] += (1, len(ids))
            if outcome == KEPT:
                kept[tuple(ids)] += 1
    assert found == kept
    if filters.active:
        assert counts.tolist() == expected.tolist()
    else:
        assert counts.sum() == 0


def test_texts_and_tokens_give_the_same(tmp_path: Path):
    documents = make_dirty_documents(300, 4, first=10_000)
    texts = [" ".join(map(str, ids)) for ids in documents]
    write_rows(tmp_path / "texts" / "a.parquet", "text", texts)
    write_rows(tmp_path / "tokens" / "a.parquet", "tokens", documents)

    def encode(texts: list[str]) -> list[NDArray[np.int64]]:
        return [np.array(text.split(), np.int64) for text in texts]

    outcomes = []
    for folder, column in (("texts", "text"), ("tokens", "tokens")):
        listing = list_dataset(str(tmp_path / folder), "parquet", column, None)
        dataset = StreamedDataset(
            folder, listing, (0, 300), 7, 3, Specials(eos=EOS), encode, None, ALL
        )
        reader = ShardReader(dataset, 1, Cursor())
        samples = [reader.read_sample(LENGTH).tokens.tolist() for _ in range(80)]
        outcomes.append((samples, reader.cursor))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("changed", CHOICES[1:])
def test_filters_that_change_inside_a_document(dirty: Path, changed: Filters):
    """No token is repeated or missing, except the rest of a document that is left out now."""
    before = open_dataset(dirty, "web", Specials(eos=EOS), 1)
    after = open_dataset(dirty, "web", Specials(eos=EOS), 1, changed)
    first = ShardReader(before, 0, Cursor())
    for _ in range(40):
        first.read_sample(LENGTH)
        reader = ShardReader(after, 0, first.cursor)
        skipping = ShardReader(after, 0, first.cursor)
        sample = reader.read_sample(LENGTH)
        skipping.skip_tokens(LENGTH)
        assert skipping.cursor == reader.cursor
        assert sample.tokens[-1] == reader.read_sample(LENGTH).tokens[0]


def test_filters_that_leave_nothing(dirty: Path):
    dataset = open_dataset(dirty, "web", Specials(eos=EOS), 1, Filters(max_ngram_repetition=0.3))
    assert ShardReader(dataset, 0, Cursor()).read_sample(LENGTH)
    nothing = Filters(max_document_tokens=1, drop_duplicates=True)
    source = build(dirty, MIXTURE, Ranks(), filters=Filters(max_document_tokens=0))
    with pytest.raises(DataError, match="--max-document-tokens: ") as raised:
        source.read_batch(SHARDS)
    assert "logical shard" in str(raised.value)
    documents = [[5, 5, 5]] * 60 + [[]] * 40
    write_rows(dirty / "bad" / "a.parquet", "tokens", documents)
    bad = open_dataset(dirty, "bad", Specials(), 1, nothing)
    for act in (ShardReader.read_sample, ShardReader.skip_tokens):
        with pytest.raises(DataError, match=r"--max-document-tokens: 60.0%, --drop-dup.*: 39.0%"):
            act(ShardReader(bad, 0, Cursor()), 4)


def test_ids_beyond_the_vocabulary_are_found_in_documents_that_are_left_out(dirty: Path):
    listing = list_dataset(str(dirty / "web"), "parquet", "tokens", None)
    filters = Filters(max_document_tokens=60)
    dataset = StreamedDataset("web", listing, (0, 700), 7, 1, Specials(), None, 10_100, filters)
    with pytest.raises(DataError, match="10100 entries"):
        ShardReader(dataset, 0, Cursor()).read_sample(LENGTH)


def test_report_of_a_data_set():
    report = FilterReport("web", ((10, 1000), (5, 2500), (0, 0), (5, 500)))
    assert report.document_share == 0.5
    assert report.token_share == 0.75
    assert report.describe() == (
        "data set web: 50.0% of 20 documents and 75.0% of their tokens left out "
        "(--max-document-tokens: 25.0%, --drop-duplicates: 25.0%)"
    )
    assert report.to_json() == {
        "documents": 20,
        "tokens": 4000,
        "max_document_tokens_documents": 5,
        "max_document_tokens_tokens": 2500,
        "max_ngram_repetition_documents": 0,
        "max_ngram_repetition_tokens": 0,
        "drop_duplicates_documents": 5,
        "drop_duplicates_tokens": 500,
    }
    assert FilterReport("new", ((0, 0),) * 4).document_share == 0
