"""Combinations of sample orders, compared with lists."""

from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.cache import IndexCache
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.order import (
    BlendedOrder,
    DatasetOrder,
    Order,
    OrderSlice,
    build_order,
    collect_seeds,
    locate,
    make_index_tree,
)


class Numbers:
    """A data set that has only a seed and a length."""

    def __init__(self, seed, length):
        self.seed = seed
        self.length = length

    def __len__(self):
        return self.length


def make_numbers(seed: int, length: int) -> GPTDataset:
    """Return a data set with the parts of GPTDataset that an order uses."""
    return cast(GPTDataset, Numbers(seed, length))


def list_order(order):
    """Return [(seed of the leaf, sample), ...] for all positions."""
    leaves, samples = order.look_up(np.arange(len(order), dtype=np.int64))
    return [
        (order.leaves[leaf].seed, int(sample)) for leaf, sample in zip(leaves, samples, strict=True)
    ]


def list_tree(tree):
    """Return what `list_order` must return for a tree, computed with lists."""
    if "index" in tree:
        return [(tree["index"]["seed"], i) for i in range(tree["index"]["num_samples"])]
    if "concat" in tree:
        return [place for branch in tree["concat"] for place in list_tree(branch)]
    of = list_tree(tree["of"])
    if "cut" in tree:
        return of[slice(*tree["cut"])]
    return [of[i] for i in np.random.RandomState(tree["permute"]).permutation(len(of))]


def slice_tree(draw, tree):
    stop = draw(st.integers(1, len(list_tree(tree))))
    return {"cut": [draw(st.integers(0, stop - 1)), stop], "of": tree}


trees = st.recursive(
    st.builds(make_index_tree, st.integers(0, 9), st.integers(1, 12)),
    lambda inner: st.one_of(
        st.composite(lambda draw: slice_tree(draw, draw(inner)))(),
        st.builds(lambda seed, of: {"permute": seed, "of": of}, st.integers(0, 9), inner),
        st.builds(lambda branches: {"concat": branches}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(tree=trees)
def test_an_order_equals_its_tree_in_lists(tmp_path_factory, tree):
    cache = IndexCache(tmp_path_factory.getbasetemp() / "orders")
    order = build_order(tree, make_numbers, cache)
    assert list_order(order) == list_tree(tree)
    assert collect_seeds(tree) >= {seed for seed, _ in list_tree(tree)}
    dataset, sample = locate(order, len(order) - 1)
    assert (cast(Numbers, dataset).seed, sample) == list_tree(tree)[-1]


def test_a_blend_draws_from_its_orders():
    slice_of_second = OrderSlice(DatasetOrder(make_numbers(2, 9)), 4, 9)
    orders: list[Order] = [DatasetOrder(make_numbers(1, 5)), slice_of_second]
    blended = BlendedOrder(orders, np.array([1, 0, 1, 1], np.uint8), np.array([0, 0, 1, 2]))
    assert list_order(blended) == [(2, 4), (1, 0), (2, 5), (2, 6)]


def test_a_blend_ends_before_the_first_sample_that_is_missing():
    which = np.array([0, 1, 0, 1, 0, 1], np.uint8)
    sample = np.array([0, 0, 1, 1, 2, 2])
    three = DatasetOrder(make_numbers(1, 3))
    one = DatasetOrder(make_numbers(2, 1))
    assert len(BlendedOrder([three, three], which, sample)) == 6
    assert len(BlendedOrder([three, one], which, sample)) == 3


def test_a_slice_past_the_end_is_refused():
    with pytest.raises(AssertionError, match=r"no positions \[2, 6\) in 5 samples"):
        OrderSlice(DatasetOrder(make_numbers(1, 5)), 2, 6)
