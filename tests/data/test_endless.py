"""The order of training samples if their number is not known in advance (--train-time)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.corpora import write_numbered
from data.source_requests import open_sources
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.config.data import DataConfig
from megatron.data.indexed_source import IndexedSource
from megatron.data.phases import DataPhase, PlannedPhase
from megatron.data.source import Sources

SEQ_LENGTH = 10
DOCUMENTS = 12
SIZE = 25


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Return two corpora of 12 documents with 25 tokens each, all with ids of their own."""
    return [
        write_numbered(tmp_path / f"data_{number}", DOCUMENTS, SIZE, first=1000 * number)
        for number in range(2)
    ]


def build(tmp_path: Path, *data_path: str, seed: int = 7, **flags: Any) -> Sources:
    config = DataConfig(
        data_path=data_path,
        split="1",
        data_cache_path=str(tmp_path / "cache"),
        num_workers=2,
        valid_num_workers=0,
    )
    flags = {"train_samples": None, **flags}
    return open_sources(config, seq_length=SEQ_LENGTH, seed=seed, **flags)


def read(source: object, batches: int, batch_size: int = 4) -> list[tuple[int, ...]]:
    """Return the inputs of the samples of the next batches, extending the order as the loop does.

    The last label of a sample is the first token of another one, so it is left out.
    """
    assert isinstance(source, IndexedSource)
    rows: list[tuple[int, ...]] = []
    for _ in range(batches):
        if source.must_extend(batch_size):
            source.extend(batch_size)
        for microbatch in source.read_batch(batch_size):
            rows += [tuple(row) for row in microbatch.tokens.tolist()]
    return rows


def count_tokens(rows: list[tuple[int, ...]]) -> NDArray[np.int64]:
    found = Counter(token for row in rows for token in row)
    return np.array(sorted(found.values()))


def test_each_pass_reads_each_token_once(tmp_path: Path, corpora: list[str]) -> None:
    sources = build(tmp_path, corpora[0])
    assert isinstance(sources.train, IndexedSource)
    # 300 tokens make 29 samples. What is left of a pass does not fill one.
    assert sources.train.history.end == 29
    rows = read(sources.train, 29, batch_size=2)
    assert sources.train.history.end == 58
    for first in (0, 29):
        assert set(count_tokens(rows[first : first + 29])) == {1}
    assert rows[:29] != rows[29:]
    sources.close()


@pytest.mark.parametrize("stop", [1, 6, 7, 8, 14, 15, 16])
def test_a_resume_reads_the_same_samples_wherever_it_happens(
    tmp_path: Path, corpora: list[str], stop: int
) -> None:
    """A pass of the mixture ends after 58 samples, in the middle of the 15th batch."""
    mixture = ("3", corpora[0], "1", corpora[1])
    uninterrupted = build(tmp_path, *mixture)
    expected = read(uninterrupted.train, 40)
    first = build(tmp_path, *mixture)
    rows = read(first.train, stop)
    state = json.loads(json.dumps(first.state()))
    second = build(tmp_path, *mixture)
    second.load(state)
    rows += read(second.train, 40 - stop)
    assert rows == expected
    assert second.state() == uninterrupted.state()
    assert not [note for note in second.take_notes() if "made for" in note]
    for sources in (uninterrupted, first, second):
        sources.close()


def test_the_first_pass_is_that_of_a_run_with_as_many_samples(
    tmp_path: Path, corpora: list[str]
) -> None:
    endless = build(tmp_path, corpora[0])
    known = build(tmp_path, corpora[0], train_samples=29)
    assert read(endless.train, 7) == read(known.train, 7)
    with pytest.raises(DataError, match="reaches past the 29 training samples"):
        read(known.train, 1)
    endless.close()
    known.close()


def test_a_changed_seed_reads_the_rest_of_the_pass_first(
    tmp_path: Path, corpora: list[str]
) -> None:
    first = build(tmp_path, corpora[0])
    rows = read(first.train, 5)
    second = build(tmp_path, corpora[0], seed=8)
    second.load(first.state())
    assert isinstance(second.train, IndexedSource)
    # The 9 samples that were not read yet, and then another pass of 29.
    assert second.train.history.end == 29 + 29
    rows += read(second.train, 9, batch_size=1)
    assert set(count_tokens(rows)) == {1}
    first.close()
    second.close()


def test_a_run_with_a_known_number_of_samples_may_go_on_without_an_end(
    tmp_path: Path, corpora: list[str]
) -> None:
    known = build(tmp_path, corpora[0], train_samples=12)
    rows = read(known.train, 3)
    endless = build(tmp_path, corpora[0])
    endless.load(known.state())
    rows += read(endless.train, 17, batch_size=1)
    assert set(count_tokens(rows)) == {1}
    read(endless.train, 20)
    known.close()
    endless.close()


def test_the_last_phase_is_read_again_and_again(tmp_path: Path, corpora: list[str]) -> None:
    phases = [
        PlannedPhase(DataPhase("p.yaml:1", data_path=(corpora[0],)), 1, 0, started=True),
        PlannedPhase(DataPhase("p.yaml:2", data_path=(corpora[1],)), 4, 12, started=False),
    ]
    sources = build(tmp_path, corpora[0], phases=phases)
    rows = read(sources.train, 3)
    assert max(max(row) for row in rows) < 1000
    later = read(sources.train, 29, batch_size=2)
    assert min(min(row) for row in later) >= 1000
    assert set(count_tokens(later[:29])) == {1}
    sources.close()
