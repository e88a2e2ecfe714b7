"""The order of samples after a resume with a changed configuration.

Consumed samples keep their positions, and no other sample is lost or drawn twice.
"""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from data.corpora import write_numbered
from data.source_requests import open_sources

from megatron.base.errors import DataError
from megatron.base.json_record import restore
from megatron.config.data import DataConfig
from megatron.data.segments import Segment

# 300 tokens, which give 29 samples in each epoch.
SEQ = 10
DOCUMENTS = 12
SIZE = 25
# Tokens of the second corpus are not below this, so that each token shows its data set.
FIRST_OF_B = 1_000_000


@pytest.fixture
def corpus(tmp_path):
    """Two corpora whose tokens show the data set and the position in it."""
    a = write_numbered(tmp_path / "a", documents=DOCUMENTS, size=SIZE)
    b = write_numbered(tmp_path / "b", documents=DOCUMENTS, size=SIZE, first=FIRST_OF_B)
    return a, b


@pytest.fixture
def build(tmp_path):
    def make(*path, samples, seed=1, seq_length=SEQ, split="1,0,0", cache=None):
        config = DataConfig(
            data_path=path,
            split=split,
            data_cache_path=str(cache or tmp_path / "cache"),
            num_workers=0,
        )
        return open_sources(config, samples, seq_length=seq_length, seed=seed)

    return make


def draw(sources, count):
    """Return the first token of each of the next samples."""
    return [int(sources.train.read_batch(1)[0].tokens[0, 0]) for _ in range(count)]


def resume(old, new):
    """Load the state of `old` into `new`, by way of JSON."""
    new.load(json.loads(json.dumps(old.state())))
    return new


def list_starts(sources):
    """Return the first sample of each segment."""
    return [segment.start_sample for segment in sources.train.history.segments]


def test_a_segment_is_the_same_after_json(build, corpus):
    a, b = corpus
    segment = build("0.5", a, "0.5", b, samples=20).train.history.segments[0]
    assert restore(Segment, json.loads(json.dumps(asdict(segment)))) == segment


def test_an_unchanged_configuration_keeps_the_order(build, corpus):
    a, b = corpus
    expected = draw(build("0.3", a, "0.7", b, samples=30), 30)
    old = build("0.3", a, "0.7", b, samples=30)
    draw(old, 11)
    new = resume(old, build("0.3", a, "0.7", b, samples=30))
    assert draw(new, 19) == expected[11:]
    assert list_starts(new) == [0]
    assert new.take_notes() == []


def test_more_samples_within_the_old_index_keep_the_order(build, corpus):
    """10 samples need one epoch, which covers 29."""
    expected = draw(build(corpus[0], samples=10), 29)
    old = build(corpus[0], samples=10)
    draw(old, 5)
    new = resume(old, build(corpus[0], samples=25))
    assert draw(new, 20) == expected[5:25]
    assert list_starts(new) == [0]
    (note,) = new.take_notes()
    assert "made for 10 samples, now 25 are requested" in note
    assert "kept for the 29 samples" in note


def test_more_samples_than_the_old_index_covers_add_a_segment(build, corpus):
    expected = draw(build(corpus[0], samples=20), 29)
    old = build(corpus[0], samples=20)
    draw(old, 5)
    new = resume(old, build(corpus[0], samples=50))
    after = draw(new, 45)
    assert after[:24] == expected[5:], "the old index is kept for what it covers"
    assert len(set(after[24:])) == 21, "then a new index has each sample once"
    assert after[24:] != expected[:21], "the new index has another order"
    assert list_starts(new) == [0, 29]
    again = resume(new, build(corpus[0], samples=50))
    again.train.advance(5 - again.train.consumed_samples)
    assert draw(again, 45) == after
    assert any("50 samples are requested, 29 are covered" in note for note in new.take_notes())


def test_fewer_samples_keep_the_order(build, corpus):
    expected = draw(build(corpus[0], samples=29), 29)
    old = build(corpus[0], samples=29)
    draw(old, 5)
    assert draw(resume(old, build(corpus[0], samples=20)), 15) == expected[5:20]


def test_a_longer_mixture_continues_each_data_set_at_its_next_sample(build, corpus):
    a, b = corpus
    old = build("0.5", a, "0.5", b, samples=20)
    before = draw(old, 20)
    new = resume(old, build("0.5", a, "0.5", b, samples=50))
    after = draw(new, 30)
    assert len(set(before + after)) == 50, "a sample was drawn twice, and the data have 58"
    assert sum(token < FIRST_OF_B for token in after) == 15


def test_a_new_seed_shuffles_the_samples_that_are_not_consumed(build, corpus):
    expected = draw(build(corpus[0], samples=29), 29)
    old = build(corpus[0], samples=29)
    draw(old, 12)
    new = resume(old, build(corpus[0], samples=29, seed=2))
    after = draw(new, 17)
    assert after != expected[12:]
    assert after == [expected[12:][i] for i in np.random.RandomState(2).permutation(17)]
    assert list_starts(new) == [0, 12]
    (note,) = new.take_notes()
    assert "--seed changed from 1 to 2; from sample 12 on" in note
    assert "continues at its sample 12, shuffled again" in note


def test_a_new_seed_shuffles_only_samples_that_training_will_read(build, corpus):
    """The old index covers 29 samples, of which 20 are read. A new seed gives the same 20."""
    expected = draw(build(corpus[0], samples=20), 29)
    old = build(corpus[0], samples=20)
    draw(old, 12)
    new = resume(old, build(corpus[0], samples=20, seed=2))
    assert sorted(draw(new, 8)) == sorted(expected[12:20])


def test_two_new_seeds_and_then_more_samples_draw_no_sample_twice(build, corpus):
    old = build(corpus[0], samples=29)
    seen = draw(old, 5)
    old = resume(old, build(corpus[0], samples=29, seed=2))
    seen += draw(old, 5)
    old = resume(old, build(corpus[0], samples=29, seed=3))
    seen += draw(old, 5)
    new = resume(old, build(corpus[0], samples=40, seed=3))
    seen += draw(new, 25)
    assert len(set(seen[:29])) == 29
    assert len(set(seen[29:])) == 11
    assert list_starts(new) == [0, 5, 10, 29]


def test_a_new_mixture_does_not_draw_consumed_samples_again(build, corpus):
    a, b = corpus
    alone = draw(build(a, samples=20), 29)
    old = build(a, samples=20)
    before = draw(old, 8)
    new = resume(old, build("0.5", a, "0.5", b, samples=28))
    after = draw(new, 20)
    from_a = [token for token in after if token < FIRST_OF_B]
    assert from_a == alone[8:18]
    assert len(set(before + after)) == 28
    (note,) = new.take_notes()
    assert f"{a} continues at its sample 8, {b} starts at its first sample" in note
    assert "the data, their weights or --split have changed" in note


def test_a_data_set_that_was_removed_and_added_again_continues(build, corpus):
    a, b = corpus
    old = build("0.5", a, "0.5", b, samples=40)
    seen = draw(old, 10)
    old = resume(old, build(b, samples=40))
    seen += draw(old, 10)
    new = resume(old, build("0.5", a, "0.5", b, samples=40))
    seen += draw(new, 20)
    assert len(set(seen)) == 40
    assert "continues at its sample 5" in new.take_notes()[-1]


def test_a_data_set_that_is_exhausted_within_a_segment_starts_again(build, corpus):
    """22 of the 29 samples of A are consumed, and 15 more are needed.

    The 7 that are left come first, then 8 of a new index.
    """
    a, b = corpus
    alone = draw(build(a, samples=22), 29)
    old = build(a, samples=22)
    draw(old, 22)
    new = resume(old, build("0.5", a, "0.5", b, samples=52))
    from_a = [token for token in draw(new, 30) if token < FIRST_OF_B]
    assert from_a[:7] == alone[22:]
    assert len(set(from_a[7:])) == 8
    assert from_a[7:] != alone[:8]
    assert f"{a} continues at its sample 22, then starts again with seed 2" in new.take_notes()[0]


def test_an_exhausted_data_set_starts_again_with_another_seed(build, corpus):
    a, b = corpus
    old = build(a, samples=29)
    before = draw(old, 29)
    new = resume(old, build("0.5", a, "0.5", b, samples=69))
    from_a = [token for token in draw(new, 40) if token < FIRST_OF_B]
    assert len(from_a) == 20
    assert len(set(from_a)) == 20
    assert from_a != before[:20]
    assert "is exhausted and starts again with seed 2" in new.take_notes()[0]


def test_other_documents_of_the_same_data_are_other_data(build, corpus):
    """The old order has documents that are held out now, so it must not continue."""
    old = build(corpus[0], samples=20)
    draw(old, 5)
    new = resume(old, build(corpus[0], samples=20, split="1,1,0"))
    assert max(draw(new, 15)) < DOCUMENTS * SIZE // 2
    assert "starts at its first sample" in new.take_notes()[0]


def test_another_sequence_length_starts_a_segment(build, corpus):
    old = build(corpus[0], samples=20)
    draw(old, 5)
    new = resume(old, build(corpus[0], samples=20, seq_length=5))
    assert new.train.read_batch(1)[0].tokens.shape == (1, 5)
    assert "--seq-length changed from 10 to 5" in new.take_notes()[0]
    assert list_starts(new) == [0, 5]


def test_a_change_before_the_first_sample_equals_a_new_run(build, corpus):
    new = resume(build(corpus[0], samples=20), build(corpus[0], samples=20, seed=7))
    assert draw(new, 20) == draw(build(corpus[0], samples=20, seed=7), 20)
    assert list_starts(new) == [0]


def test_two_changes_at_the_same_sample_leave_no_empty_segment(build, corpus):
    old = build(corpus[0], samples=29)
    seen = draw(old, 5)
    middle = resume(old, build(corpus[0], samples=29, seed=2))
    new = resume(middle, build(corpus[0], samples=29, seed=3))
    assert list_starts(new) == [0, 5]
    assert [segment.seed for segment in new.train.history.segments] == [1, 3]
    assert len(set(seen + draw(new, 24))) == 29


def test_data_that_were_moved_are_found_by_content(build, corpus, tmp_path):
    a, _ = corpus
    expected = draw(build(a, samples=29), 29)
    old = build(a, samples=29)
    draw(old, 5)
    state = old.state()
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.move(a + suffix, tmp_path / "moved" / f"a{suffix}")
    new = build(str(tmp_path / "moved" / "a"), samples=29, cache=tmp_path / "another-cache")
    new.load(state)
    assert draw(new, 24) == expected[5:]


def test_data_that_changed_or_vanished_are_refused_when_they_are_read(build, corpus, tmp_path):
    a, b = corpus
    old = build(a, samples=29)
    draw(old, 5)
    state = old.state()
    write_numbered(tmp_path / "a", documents=DOCUMENTS, size=SIZE, first=7)
    new = build("0.5", a, "0.5", b, samples=29)
    # All samples of the old order are consumed. The changed data set counts as another one.
    new.load(state)
    assert any("starts at its first sample" in note for note in new.take_notes())
    new.train.advance(-5)
    with pytest.raises(DataError, match=r"a has changed \(fingerprint") as raised:
        draw(new, 1)
    assert "Restore these data" in str(raised.value)
    (tmp_path / "a.bin").unlink()
    gone = build(b, samples=29)
    gone.load(state)
    gone.train.advance(-5)
    with pytest.raises(DataError, match=r"a\.bin does not exist") as raised:
        draw(gone, 1)
    assert "Restore these data" in str(raised.value)


def test_a_mixture_that_ends_too_early_is_extended_by_a_segment(build, corpus, monkeypatch):
    """The shares of many data sets can need more than the surplus.

    The order then continues, instead of failing during the run.
    """
    monkeypatch.setattr("megatron.data.blend.SURPLUS", 0.5)
    a, b = corpus
    sources = build("0.5", a, "0.5", b, samples=100)
    assert len(draw(sources, 100)) == 100
    assert list_starts(sources) == [0, 58]
