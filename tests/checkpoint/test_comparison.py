"""Test statistics and differences of tensors with NaN and infinities.

tests/convert/test_inspect_checkpoint.py tests the rest.
"""

import math

import pytest
import torch

from megatron.extras.interop.inspection.comparison import (
    compute_difference,
    compute_tensor_statistics,
    sort_by_parameter,
)

MANY = (1 << 20) + 5  # more elements than are processed at a time


def test_shared_infinities_hide_no_difference() -> None:
    a = torch.randn(MANY, generator=torch.Generator().manual_seed(0))
    a[3] = math.inf
    a[4] = -math.inf
    a[5] = math.nan
    b = a.clone()
    b[-1] += 2.0
    found = compute_difference("weight/a", a, b)
    assert not found.bit_equal
    assert found.different == 1
    assert found.max_absolute == pytest.approx(2.0, rel=1e-6)
    norm = max(float(x[x.isfinite()].double().norm()) for x in (a, b))
    assert found.relative == pytest.approx(2.0 / norm, rel=1e-6)
    assert compute_difference("weight/a", a, a.clone()).bit_equal


def test_infinity_in_one_tensor_gives_nan() -> None:
    a = torch.ones(MANY)
    b = a.clone()
    # They are in the first and the last piece. The last one must not replace the NaN by a number.
    b[0] = math.inf
    b[-1] = 3.0
    found = compute_difference("weight/a", a, b)
    assert found.different == 2
    assert math.isnan(found.max_absolute)
    assert math.isnan(found.relative)


def test_statistics_of_several_pieces() -> None:
    tensor = torch.zeros(MANY)
    tensor[1] = -3.0
    tensor[-1] = 4.0
    tensor[-2] = math.inf
    found = compute_tensor_statistics("exp_avg/blocks.0.qkv", tensor)
    assert found.name == "blocks.0.qkv"
    assert found.kind == "exp_avg"
    assert found.shape == (MANY,)
    assert found.norm == 5.0
    assert found.min == -3.0
    assert found.max == 4.0
    assert found.nan == 0
    assert found.inf == 1
    assert found.mean == pytest.approx(1.0 / (MANY - 1))


def test_parameters_are_sorted_by_layer_number() -> None:
    ordered = [
        "weight/blocks.2.a",
        "exp_avg/blocks.2.a",
        "exp_avg_sq/blocks.2.a",
        "weight/blocks.10.a",
        "weight/embedding.b",
    ]
    assert sort_by_parameter(reversed(ordered)) == ordered
    assert sort_by_parameter(sorted(ordered)) == ordered
