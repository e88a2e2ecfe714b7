"""Statistics and differences of tensors that hold what a diverged run leaves; see test_inspect_checkpoint.py for the rest."""

import math

import pytest
import torch

from megatron.checkpoint.comparison import (
    compute_difference,
    compute_tensor_statistics,
    sort_by_parameter,
)

MANY = (1 << 20) + 5  # more than is worked on at a time


def test_infinities_that_both_have_hide_no_difference() -> None:
    a = torch.randn(MANY, generator=torch.Generator().manual_seed(0))
    a[3], a[4], a[5] = math.inf, -math.inf, math.nan
    b = a.clone()
    b[-1] += 2.0
    found = compute_difference("weight/a", a, b)
    assert (found.bit_equal, found.different) == (False, 1)
    assert found.max_absolute == pytest.approx(2.0, rel=1e-6)
    norm = max(float(x[x.isfinite()].double().norm()) for x in (a, b))
    assert found.relative == pytest.approx(2.0 / norm, rel=1e-6)
    assert compute_difference("weight/a", a, a.clone()).bit_equal


def test_an_infinity_that_one_has_is_no_number() -> None:
    a = torch.ones(MANY)
    b = a.clone()
    b[0], b[-1] = math.inf, 3.0  # first and last piece: the later one must not bring a number back
    found = compute_difference("weight/a", a, b)
    assert found.different == 2
    assert math.isnan(found.max_absolute)
    assert math.isnan(found.relative)


def test_statistics_over_several_pieces() -> None:
    tensor = torch.zeros(MANY)
    tensor[1], tensor[-1], tensor[-2] = -3.0, 4.0, math.inf
    found = compute_tensor_statistics("exp_avg/blocks.0.qkv", tensor)
    assert (found.name, found.kind, found.shape) == ("blocks.0.qkv", "exp_avg", (MANY,))
    assert (found.norm, found.min, found.max, found.nan, found.inf) == (5.0, -3.0, 4.0, 0, 1)
    assert found.mean == pytest.approx(1.0 / (MANY - 1))


def test_order_of_parameters() -> None:
    ordered = [
        "weight/blocks.2.a",
        "exp_avg/blocks.2.a",
        "exp_avg_sq/blocks.2.a",
        "weight/blocks.10.a",
        "weight/embedding.b",
    ]
    assert sort_by_parameter(reversed(ordered)) == ordered
    assert sort_by_parameter(sorted(ordered)) == ordered
