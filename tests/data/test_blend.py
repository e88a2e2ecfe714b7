"""Mixtures of data sets, compared with the published hashes of the reference."""

import numpy as np
import pytest
from data.corpora import golden, short_hash

from megatron.base.errors import ConfigError
from megatron.config.data import DataConfig
from megatron.data.blend import (
    blend,
    compute_samples_per_dataset,
    count_drawn_samples,
    normalise,
    parse_shares,
)
from megatron.data.cache import IndexCache


@pytest.mark.parametrize(
    "case", golden("openwebtext-1000")["blend"], ids=lambda case: str(case["weights"])
)
def test_blend_has_the_hashes_of_the_reference(tmp_path, case):
    which, sample = blend(normalise(case["weights"]), case["size"], IndexCache(tmp_path))
    assert short_hash(which) == case["dataset_index"]
    assert short_hash(sample) == case["dataset_sample_index"]


def test_shares_follow_the_weights_and_a_longer_blend_begins_the_same(tmp_path):
    weights = normalise([3, 1, 6])
    short, _ = blend(weights, 100, IndexCache(tmp_path))
    long, sample = blend(weights, 1000, IndexCache(tmp_path))
    assert long[:100].tolist() == short.tolist()
    assert count_drawn_samples(long, 3) == [300, 100, 600]
    for dataset in range(3):
        assert sample[long == dataset].tolist() == list(range(int((long == dataset).sum())))


def test_samples_per_dataset_include_a_surplus():
    assert compute_samples_per_dataset(1000, (0.3, 0.7)) == [302, 704]
    assert compute_samples_per_dataset(1000, (1.0,)) == [1000], "a data set alone is no mixture"


def test_more_than_256_data_sets_use_int32(tmp_path):
    which, _ = blend(normalise([1.0] * 300), 900, IndexCache(tmp_path))
    assert which.dtype == np.int32
    assert count_drawn_samples(which, 300) == [3] * 300


def test_shares_of_named_data_sets_add_up_to_one():
    data = DataConfig(data_path=("root",), datasets="web, code,books", weights="3,1,4")
    assert parse_shares(data) == {"web": 0.375, "code": 0.125, "books": 0.5}
    assert parse_shares(DataConfig(data_path=("root",), datasets="a,b")) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_path": ("a", "b")}, "takes one folder as --data-path, and not 2 values"),
        ({"datasets": "a,"}, "has the entry ''. Each entry must be the name of a folder"),
        ({"datasets": "../a"}, "has the entry '../a'"),
        ({"datasets": "a,b", "weights": "1,x"}, "--weights '1,x' must have one positive number"),
        ({"datasets": "a,b", "weights": "1"}, "for each of the 2 data sets, as in --weights"),
        ({"datasets": "a,b", "weights": "1,0"}, "Leave out data that must not be used"),
        ({"datasets": "a,b", "weights": "1,inf"}, "must have one positive number"),
    ],
)
def test_shares_that_cannot_be_parsed_are_refused(fields, message):
    with pytest.raises(ConfigError) as refused:
        parse_shares(DataConfig(**{"data_path": ("root",), **fields}))
    assert message in str(refused.value)
