"""The synthetic samples of --mock-data are a function of seed, set and position alone."""

import pytest
import torch
from data.source_requests import open_sources

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import DataConfig
from megatron.data.source import BatchSlice, Sources

VOCABULARY = 50
LENGTH = 16


def open_mock(*, seed: int = 1, rank: int = 0, ranks: int = 1, threads: int = 0) -> Sources:
    data = DataConfig(mock_data=True, num_workers=threads, valid_num_workers=threads)
    batch_slice = BatchSlice(2, rank, ranks, VOCABULARY)
    return open_sources(data, 40, seed=seed, valid_samples=8, batch_slice=batch_slice)


def read(sources: Sources, batches: int = 1) -> torch.Tensor:
    """Return the tokens of the next batches of 4 samples, one row for each sample."""
    assert sources.train is not None
    microbatches = [one for _ in range(batches) for one in sources.train.read_batch(4)]
    return torch.cat([one.tokens for one in microbatches])


def test_samples_count_upwards_within_the_vocabulary() -> None:
    sources = open_mock()
    assert sources.train is not None
    (first, _) = sources.train.read_batch(4)
    assert first.tokens.shape == (2, LENGTH)
    assert torch.equal(first.labels, (first.tokens + 1) % VOCABULARY)
    assert not torch.equal(first.tokens[0], first.tokens[1])


def test_seed_set_and_position_choose_the_tokens() -> None:
    tokens = read(open_mock(), 3)
    assert torch.equal(tokens, read(open_mock(threads=2), 3))
    assert not torch.equal(tokens, read(open_mock(seed=2), 3))
    valid = open_mock().valid["validation"].read_batch(4)
    assert not torch.equal(tokens[:2], valid[0].tokens)


def test_ranks_share_the_batch() -> None:
    alone = read(open_mock(), 2)
    shared = [read(open_mock(rank=rank, ranks=2), 2) for rank in range(2)]
    # Ranks take turns with microbatches of two samples.
    assert torch.equal(alone, torch.cat([*shared[0].split(2), *shared[1].split(2)])[_TURNS])


_TURNS = [0, 1, 4, 5, 2, 3, 6, 7]


def test_a_resume_continues_at_the_position() -> None:
    sources = open_mock()
    tokens = read(sources, 3)
    other = open_mock()
    read(other)
    state = other.state()
    resumed = open_mock()
    resumed.load(state)
    assert torch.equal(read(resumed, 2), tokens[4:])
    assert open_mock().test == {}


def test_real_and_synthetic_data_are_not_mixed_on_a_resume() -> None:
    sources = open_mock()
    state = sources.state()
    state["train"]["segments"] = [{"start_sample": 0}]
    with pytest.raises(DataError, match="trained on indexed data, and not on --mock-data"):
        sources.load(state)


def test_a_vocabulary_is_needed() -> None:
    with pytest.raises(ConfigError, match="no documents"):
        open_sources(DataConfig(mock_data=True), 4)
