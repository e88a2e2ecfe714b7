"""The digest of a batch: the same for each layout, and another one for other samples."""

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.batches import (
    DIGESTS,
    compute_digest,
    compute_sample_positions,
    split_microbatches,
)

CONSUMED, BATCH, LENGTH = 24, 8, 5


def draw() -> NDArray[np.int64]:
    """Return 100 samples of few ids."""
    return np.random.RandomState(0).randint(0, 9, (100, LENGTH + 1)) % 3


def sum_digests(
    samples: NDArray[np.int64], dp_size: int = 1, micro_batch: int = 1, consumed: int = CONSUMED
) -> int:
    """Return the digest of the batch that the ranks read together."""
    total = 0
    for rank in range(dp_size):
        own = compute_sample_positions(consumed, BATCH, rank, dp_size, micro_batch)
        microbatches = split_microbatches(samples[own.ravel()], micro_batch)
        total += compute_digest(microbatches, consumed, rank, dp_size)
    return total % DIGESTS


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 4), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_the_layout_does_not_change_the_digest(dp_size: int, micro_batch: int) -> None:
    samples = draw()
    assert sum_digests(samples, dp_size, micro_batch) == sum_digests(samples)


@pytest.mark.parametrize("token", [0, LENGTH - 1, LENGTH])
def test_each_token_counts(token: int) -> None:
    samples = draw()
    changed = samples.copy()
    changed[CONSUMED + 3, token] += 1
    assert sum_digests(changed) != sum_digests(samples)


def test_samples_in_another_order_have_another_digest() -> None:
    samples = draw()
    swapped = samples.copy()
    swapped[[CONSUMED, CONSUMED + 1]] = samples[[CONSUMED + 1, CONSUMED]]
    assert sum_digests(swapped) != sum_digests(samples)
    # The same tokens under other numbers.
    moved = np.roll(samples, 1, axis=0)
    assert sum_digests(moved, consumed=CONSUMED + 1) != sum_digests(samples)
