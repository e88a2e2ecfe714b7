"""Mixtures, by the reference's published hashes."""

import numpy as np
import pytest
from corpora import golden, short_hash

from megatron.data.blend import blend, compute_samples_per_dataset, count_drawn_samples, normalise
from megatron.data.cache import IndexCache


@pytest.mark.parametrize(
    "case", golden("openwebtext-1000")["blend"], ids=lambda case: str(case["weights"])
)
def test_hashes_of_the_reference(tmp_path, case):
    which, sample = blend(normalise(case["weights"]), case["size"], IndexCache(tmp_path))
    assert (short_hash(which), short_hash(sample)) == (
        case["dataset_index"],
        case["dataset_sample_index"],
    )


def test_shares_follow_the_weights_and_the_beginning_does_not_depend_on_the_end(tmp_path):
    weights = normalise([3, 1, 6])
    short, _ = blend(weights, 100, IndexCache(tmp_path))
    long, sample = blend(weights, 1000, IndexCache(tmp_path))
    assert long[:100].tolist() == short.tolist()
    assert count_drawn_samples(long, 3) == [300, 100, 600]
    for dataset in range(3):
        assert sample[long == dataset].tolist() == list(range(int((long == dataset).sum())))


def test_samples_asked():
    assert compute_samples_per_dataset(1000, (0.3, 0.7)) == [302, 704]
    assert compute_samples_per_dataset(1000, (1.0,)) == [1000], "a data set alone is no mixture"


def test_many_data_sets(tmp_path):
    which, _ = blend(normalise([1.0] * 300), 900, IndexCache(tmp_path))
    assert which.dtype == np.int32
    assert count_drawn_samples(which, 300) == [3] * 300
