"""Build requests for data, in which a test names only what it is about."""

from typing import Any

from megatron.config.data import DataConfig
from megatron.data.build_sources import build_sources
from megatron.data.source import BatchSlice, SourceRequest, Sources


def make_request(data: DataConfig, train_samples: int | None, **more: Any) -> SourceRequest:
    """Return a request of one rank for training samples of 16 tokens, with the seed 1."""
    request = {
        "seq_length": 16,
        "seed": 1,
        "valid_samples": 0,
        "test_samples": 0,
        "batch_slice": BatchSlice(1),
    }
    return SourceRequest(data=data, train_samples=train_samples, **{**request, **more})


def open_sources(data: DataConfig, train_samples: int | None, **more: Any) -> Sources:
    """Build the sources of such a request, of the kind of data that the core has."""
    return build_sources(make_request(data, train_samples, **more))
