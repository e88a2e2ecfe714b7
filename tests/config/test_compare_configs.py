"""The digest and the list of differences of two configurations agree with each other."""

from config.minimal import config_with
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.compare import compute_config_digest, list_config_differences


def test_equal_configurations_have_equal_digests():
    a = config_with(lr=1e-4, data_path=("a",))
    b = config_with(lr=1e-4, data_path=("a",))
    assert compute_config_digest(a) == compute_config_digest(b)
    assert len(compute_config_digest(a)) == 64
    assert list_config_differences(a, b) == []


def test_each_difference_is_named_with_both_values():
    a = config_with(lr=1e-4, save="x", fp16=True)
    b = config_with(lr=2e-4, data_path=("0.5", "d"), save="x")
    assert compute_config_digest(a) != compute_config_digest(b)
    assert list_config_differences(a, b) == [
        "optimizer.lr: 0.0001 and 0.0002",
        "precision.fp16: true and false",
        'data.data_path: [] and ["0.5", "d"]',
    ]


def test_local_rank_is_not_compared():
    a = config_with(local_rank=0)
    b = config_with(local_rank=1)
    assert compute_config_digest(a) == compute_config_digest(b)
    assert list_config_differences(a, b) == []


@settings(max_examples=50, deadline=None)
@given(st.floats(), st.floats(), st.integers(0, 1), st.integers(0, 1))
def test_digests_differ_exactly_if_fields_differ(x: float, y: float, m: int, n: int):
    a = config_with(lr=x, seed=m)
    b = config_with(lr=y, seed=n)
    assert (compute_config_digest(a) == compute_config_digest(b)) == (
        list_config_differences(a, b) == []
    )
