"""What a resume with a changed configuration does to the order: nothing consumed moves, nothing is lost or drawn twice."""

import json
import shutil

import numpy as np
import pytest
from corpora import write_numbered

from megatron.config.data import DataConfig
from megatron.data.segments import Segment
from megatron.data.source import BatchSlice, build_sources
from megatron.errors import DataError

SEQ = 10
DOCUMENTS, SIZE = 12, 25  # 300 tokens: 29 samples an epoch


@pytest.fixture
def corpus(tmp_path):
    """Two corpora whose tokens tell data set and place."""
    a = write_numbered(tmp_path / "a", DOCUMENTS, SIZE)
    b = write_numbered(tmp_path / "b", DOCUMENTS, SIZE, first=1_000_000)
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
        return build_sources(
            config,
            seq_length=seq_length,
            seed=seed,
            train_samples=samples,
            valid_samples=0,
            test_samples=0,
            batch_slice=BatchSlice(1),
        )

    return make


def draw(sources, count):
    """The first token of each of the next samples."""
    return [
        int(microbatch.tokens[0, 0])
        for microbatch in (sources.train.read_batch(1)[0] for _ in range(count))
    ]


def resumed(old, new):
    new.load(json.loads(json.dumps(old.state())))
    return new


def test_segments_survive_json(build, corpus):
    a, b = corpus
    segment = build("0.5", a, "0.5", b, samples=20).train.history.segments[0]
    assert Segment.from_json(json.loads(json.dumps(segment.to_json()))) == segment


def test_nothing_changed(build, corpus):
    a, b = corpus
    whole = draw(build("0.3", a, "0.7", b, samples=30), 30)
    old = build("0.3", a, "0.7", b, samples=30)
    draw(old, 11)
    new = resumed(old, build("0.3", a, "0.7", b, samples=30))
    assert draw(new, 19) == whole[11:]
    assert len(new.train.history.segments) == 1
    assert new.take_notes() == []


def test_more_samples_that_the_old_index_covers(build, corpus):
    """10 samples need one epoch, which covers 29."""
    whole = draw(build(corpus[0], samples=10), 29)
    old = build(corpus[0], samples=10)
    draw(old, 5)
    new = resumed(old, build(corpus[0], samples=25))
    assert draw(new, 20) == whole[5:25]
    assert len(new.train.history.segments) == 1
    assert "made for 10 samples, now 25 are asked for; it is kept for the 29" in new.take_notes()[0]


def test_more_samples_than_the_old_index_covers(build, corpus):
    whole = draw(build(corpus[0], samples=20), 29)
    old = build(corpus[0], samples=20)
    draw(old, 5)
    new = resumed(old, build(corpus[0], samples=50))
    after = draw(new, 45)
    assert after[:24] == whole[5:], "the old index is kept for what it covers"
    assert len(set(after[24:])) == 21, "and then a fresh one shows each sample once again"
    assert after[24:] != whole[:21], "in another order"
    assert [segment.start_sample for segment in new.train.history.segments] == [0, 29]
    again = resumed(new, build(corpus[0], samples=50))
    again.train._consumed = 5
    assert draw(again, 45) == after
    assert any("50 samples are asked for, 29 are covered" in note for note in new.take_notes())


def test_fewer_samples(build, corpus):
    whole = draw(build(corpus[0], samples=29), 29)
    old = build(corpus[0], samples=29)
    draw(old, 5)
    assert draw(resumed(old, build(corpus[0], samples=20)), 15) == whole[5:20]


def test_a_longer_mixture_goes_on_where_each_data_set_stood(build, corpus):
    a, b = corpus
    old = build("0.5", a, "0.5", b, samples=20)
    before = draw(old, 20)
    new = resumed(old, build("0.5", a, "0.5", b, samples=50))
    after = draw(new, 30)
    assert len(set(before + after)) == 50, "58 different samples are there; none is drawn twice"
    assert sum(token < 1_000_000 for token in after) == 15


def test_a_new_seed_reshuffles_what_is_not_consumed(build, corpus):
    whole = draw(build(corpus[0], samples=29), 29)
    old = build(corpus[0], samples=29)
    draw(old, 12)
    new = resumed(old, build(corpus[0], samples=29, seed=2))
    after = draw(new, 17)
    assert sorted(after) == sorted(whole[12:])
    assert after != whole[12:]
    assert [segment.start_sample for segment in new.train.history.segments] == [0, 12]
    expected = [whole[12:][i] for i in np.random.RandomState(2).permutation(17)]
    assert after == expected
    (note,) = new.take_notes()
    assert "--seed 1 has become 2; from sample 12 on" in note
    assert "goes on at its sample 12, shuffled again" in note


def test_only_what_training_will_see_is_reshuffled(build, corpus):
    """The old index covers 29, 20 are trained: a new seed shows the same 20 samples."""
    whole = draw(build(corpus[0], samples=20), 29)
    old = build(corpus[0], samples=20)
    draw(old, 12)
    assert sorted(draw(resumed(old, build(corpus[0], samples=20, seed=2)), 8)) == sorted(
        whole[12:20]
    )


def test_a_new_seed_twice_and_then_more_samples(build, corpus):
    old = build(corpus[0], samples=29)
    seen = draw(old, 5)
    old = resumed(old, build(corpus[0], samples=29, seed=2))
    seen += draw(old, 5)
    old = resumed(old, build(corpus[0], samples=29, seed=3))
    seen += draw(old, 5)
    new = resumed(old, build(corpus[0], samples=40, seed=3))
    seen += draw(new, 25)
    assert len(set(seen[:29])) == 29
    assert len(set(seen[29:])) == 11
    assert [segment.start_sample for segment in new.train.history.segments] == [0, 5, 10, 29]


def test_a_new_mixture_does_not_draw_consumed_samples_again(build, corpus):
    a, b = corpus
    alone = draw(build(a, samples=20), 29)
    old = build(a, samples=20)
    before = draw(old, 8)
    new = resumed(old, build("0.5", a, "0.5", b, samples=28))
    after = draw(new, 20)
    from_a = [token for token in after if token < 1_000_000]
    assert from_a == alone[8:18]
    assert len(set(before + after)) == 28
    (note,) = new.take_notes()
    assert f"{a} goes on at its sample 8, {b} begins" in note
    assert "the data or their weights have changed" in note


def test_a_data_set_that_left_and_comes_back_goes_on(build, corpus):
    a, b = corpus
    old = build("0.5", a, "0.5", b, samples=40)
    seen = draw(old, 10)
    old = resumed(old, build(b, samples=40))
    seen += draw(old, 10)
    new = resumed(old, build("0.5", a, "0.5", b, samples=40))
    seen += draw(new, 20)
    assert len(set(seen)) == 40
    assert "at its sample 5" in new.take_notes()[-1]


def test_a_data_set_that_runs_out_within_a_segment_goes_on_afresh(build, corpus):
    """22 of A's 29 samples are consumed and 15 more are wanted: the 7 that are left, then 8 of a fresh index."""
    a, b = corpus
    alone = draw(build(a, samples=22), 29)
    old = build(a, samples=22)
    draw(old, 22)
    new = resumed(old, build("0.5", a, "0.5", b, samples=52))
    from_a = [token for token in draw(new, 30) if token < 1_000_000]
    assert from_a[:7] == alone[22:]
    assert len(set(from_a[7:])) == 8
    assert from_a[7:] != alone[:8]
    assert f"{a} goes on at its sample 22, then from scratch with seed 2" in new.take_notes()[0]


def test_an_exhausted_data_set_begins_afresh(build, corpus):
    a, b = corpus
    old = build(a, samples=29)
    before = draw(old, 29)
    new = resumed(old, build("0.5", a, "0.5", b, samples=69))
    from_a = [token for token in draw(new, 40) if token < 1_000_000]
    assert len(from_a) == len(set(from_a)) == 20
    assert from_a != before[:20]
    assert "is exhausted and begins from scratch with seed 2" in new.take_notes()[0]


def test_other_documents_of_the_same_data_are_other_data(build, corpus):
    """Held-out documents must not be trained on: the old order, which had them, does not go on."""
    old = build(corpus[0], samples=20)
    draw(old, 5)
    new = resumed(old, build(corpus[0], samples=20, split="1,1,0"))
    assert max(draw(new, 15)) < DOCUMENTS * SIZE // 2
    assert "begins" in new.take_notes()[0]


def test_another_sequence_length(build, corpus):
    old = build(corpus[0], samples=20)
    draw(old, 5)
    new = resumed(old, build(corpus[0], samples=20, seq_length=5))
    assert new.train.read_batch(1)[0].tokens.shape == (1, 5)
    assert "--seq-length 10 has become 5" in new.take_notes()[0]
    assert [segment.start_sample for segment in new.train.history.segments] == [0, 5]


def test_a_change_before_the_first_sample_is_a_fresh_start(build, corpus):
    new = resumed(build(corpus[0], samples=20), build(corpus[0], samples=20, seed=7))
    assert draw(new, 20) == draw(build(corpus[0], samples=20, seed=7), 20)
    assert [segment.start_sample for segment in new.train.history.segments] == [0]


def test_a_change_at_the_same_sample_twice_leaves_no_empty_segment(build, corpus):
    old = build(corpus[0], samples=29)
    seen = draw(old, 5)
    middle = resumed(old, build(corpus[0], samples=29, seed=2))
    new = resumed(middle, build(corpus[0], samples=29, seed=3))
    assert [(s.start_sample, s.seed) for s in new.train.history.segments] == [(0, 1), (5, 3)]
    assert len(set(seen + draw(new, 24))) == 29


def test_data_may_move(build, corpus, tmp_path):
    a, _ = corpus
    whole = draw(build(a, samples=29), 29)
    old = build(a, samples=29)
    draw(old, 5)
    state = old.state()
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.move(a + suffix, tmp_path / "moved" / f"a{suffix}")
    new = build(str(tmp_path / "moved" / "a"), samples=29, cache=tmp_path / "another-cache")
    new.load(state)
    assert draw(new, 24) == whole[5:]


def test_data_that_changed_or_vanished_although_the_order_needs_it(build, corpus, tmp_path):
    a, b = corpus
    old = build(a, samples=29)
    draw(old, 5)
    state = old.state()
    write_numbered(tmp_path / "a", DOCUMENTS, SIZE, first=7)
    new = build("0.5", a, "0.5", b, samples=29)
    new.load(
        state
    )  # the old order is over: its samples lie behind, and the changed data set begins as another one
    assert any("begins" in note for note in new.take_notes())
    new.train.advance(-5)
    with pytest.raises(DataError, match=r"a has changed \(fingerprint .*bring the data back"):
        draw(new, 1)
    (tmp_path / "a.bin").unlink()
    gone = build(b, samples=29)
    gone.load(state)
    gone.train.advance(-5)
    with pytest.raises(DataError, match=r"a\.bin does not exist.*bring the data back"):
        draw(gone, 1)


def test_a_data_set_asked_for_too_little_is_followed_by_a_further_segment(
    build, corpus, monkeypatch
):
    """The shares of many data sets can need more than the surplus; then the order goes on instead of failing in mid-run."""
    monkeypatch.setattr("megatron.data.blend.SURPLUS", 0.5)
    a, b = corpus
    sources = build("0.5", a, "0.5", b, samples=100)
    assert len(draw(sources, 100)) == 100
    assert [segment.start_sample for segment in sources.train.history.segments] == [0, 58]
