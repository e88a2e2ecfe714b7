"""Logical shards divide each epoch exactly, and mixtures meet their weights."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.extras.samples.stream.shard_order import EpochOrder, ShardMixture, clip_groups

groups = st.lists(st.integers(0, 700), min_size=1, max_size=12).filter(lambda rows: sum(rows) > 0)


@settings(deadline=None, max_examples=60)
@given(groups, st.integers(1, 20), st.integers(0, 3), st.floats(0, 1), st.floats(0, 1))
def test_each_row_is_in_one_shard(rows: list, shards: int, epoch: int, low: float, high: float):
    total = sum(rows)
    first, last = sorted((round(low * total), round(high * total)))
    first_rows, counts = clip_groups(np.array(rows), (first, last))
    order = EpochOrder(first_rows, counts, 7, epoch, shards)
    begins = np.cumsum([0, *rows])
    seen = []
    sizes = []
    for shard in range(shards):
        pieces = order.list_pieces(shard)
        sizes.append(sum(piece.rows for piece in pieces))
        assert sizes[-1] == order.count_rows(shard)
        for piece in pieces:
            windows = piece.split_windows()
            assert windows[0][0] == piece.first_row
            assert windows[-1][1] == piece.first_row + piece.rows
            for begin, end in windows:
                assert 0 < end - begin <= 256
                shuffled = order.shuffle_window(piece.group, begin, end)
                seen += (begins[piece.group] + begin + shuffled).tolist()
    assert sorted(seen) == list(range(first, last))
    assert max(sizes) - min(sizes) <= 1


def test_epochs_and_seeds_have_other_orders():
    rows = np.full(50, 10)
    orders = [
        tuple(piece.group for piece in EpochOrder(rows * 0, rows, seed, epoch, 1).list_pieces(0))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    st.sampled_from([1, 3, 16, 100]),
    st.integers(0, 2**32 - 1),
)
def test_weights_are_met_in_each_round_and_each_shard(weights: list, shards: int, seed: int):
    shares = (np.array(weights) / sum(weights)).tolist()
    mixture = ShardMixture(shares, shards, seed)
    chosen = mixture.choose(np.arange(shards * 200)).reshape(200, shards)
    of_rounds = np.stack([(chosen == number).sum(1) for number in range(len(shares))], 1)
    assert np.abs(of_rounds - np.array(shares) * shards).max() <= 2
    of_shards = np.stack([(chosen == number).sum(0) for number in range(len(shares))], 1)
    # The discrepancy of the golden ratio's multiples grows with the logarithm of their number.
    assert np.abs(of_shards - np.array(shares) * 200).max() <= 4
