"""The inner loops of the data path, from the C++ extension if it was built, else from NumPy.

Both give the same bytes. `describe_implementation()` returns which one is in use, and the reason if
it is the slow one.

`shuffle_in_place` shuffles large arrays while other threads can run. `RandomState.shuffle` holds
Python's global interpreter lock from beginning to end. For 600 million samples this takes more than
a minute. During that time the heartbeat of the lease and the roll call would stop. Invariant: the
array and the state of the random generator are those after `RandomState.shuffle`, bit for bit.
"""

import math
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megatron.data import index_numpy


def _choose() -> tuple[ModuleType, str]:
    """Return the module with the loops, and a description of it."""
    try:
        from megatron.data import _index_helpers  # type: ignore[attr-defined]
    except ImportError as error:
        return (
            index_numpy,
            f"NumPy (slower: {error}; `pip install -e .` with a C++ compiler builds the fast one)",
        )
    # The first builds had no REVISION. An older build may lack the checks of ranges.
    found = getattr(_index_helpers, "REVISION", 1)
    if found != index_numpy.REVISION:
        return index_numpy, (
            f"NumPy (slower: the C++ build has revision {found}, this version needs "
            f"{index_numpy.REVISION}; `pip install -e .` builds it again)"
        )
    return _index_helpers, "C++"


_module, _implementation = _choose()

sample_index = _module.sample_index
blending_indices = _module.blending_indices
gather_tokens = _module.gather_tokens
# None without C++. `shuffle_in_place` then shuffles in blocks.
shuffle = getattr(_module, "shuffle", None)


def describe_implementation() -> str:
    """Return "C++" or "NumPy (slower: REASON)", for the table of choices printed at start."""
    return _implementation


DIRECT_ITEMS = 1 << 22
"""An array up to this size is shuffled in one call, which takes less than a second."""


def shuffle_in_place(array: NDArray, rng: np.random.RandomState) -> None:
    """Shuffle an array of one dimension as `rng.shuffle` does.

    Args:
        array: Contiguous items of 4 or 8 bytes.
        rng: The source of random numbers.
    """
    if shuffle is None:
        _shuffle_in_blocks(array, rng)
        return
    # The stream of random numbers itself. RandomState has no public name for it.
    generator = rng._bit_generator
    with generator.lock:
        shuffle(array.view(f"u{array.itemsize}"), generator.capsule)


def _shuffle_in_blocks(array: NDArray, rng: np.random.RandomState) -> None:
    """Shuffle with NumPy alone.

    `rng.shuffle` goes through the positions from the last one to the first. It swaps the item at
    position i with that at a random position j <= i. Here a block of such swaps is one call of
    NumPy if its positions are all different.
    """
    left = len(array)
    while left > DIRECT_ITEMS:
        # With this size, two of the positions are equal with a probability of about
        # 1.5 * size**2 / left, which is 2 %.
        size = max(1, math.isqrt(left) // 8)
        positions = np.arange(left - 1, left - 1 - size, -1)
        # This call draws the same numbers as `rng.shuffle`, one for each bound in turn. See
        # `random_interval` and `random_bounded_uint64` in NumPy.
        others = rng.randint(0, positions + 1, dtype=np.int64)
        _swap(array, positions, others)
        left -= size
    rng.shuffle(array[:left])


def _swap(array: NDArray, positions: NDArray[np.int64], others: NDArray[np.int64]) -> None:
    """Swap the items at positions[k] and others[k], for each k in order.

    Args:
        array: The items.
        positions: int64[size], descending without gaps.
        others: int64[size], with others[k] <= positions[k].
    """
    ordered = np.sort(others)
    disjoint = ordered[-1] < positions[-1] and bool(np.all(ordered[1:] != ordered[:-1]))
    if disjoint:
        moved = array[positions]
        array[positions] = array[others]
        array[others] = moved
        return
    # Some item is moved by several swaps, so they must be done in order.
    for position, other in zip(positions.tolist(), others.tolist(), strict=True):
        item = array[position]
        array[position] = array[other]
        array[other] = item
