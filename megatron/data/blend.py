"""Weighted mixtures: at each step the data set whose share lags most behind its weight gives its next sample.

Invariant: a mixture's first k samples do not depend on how many follow. Source: Megatron-LM's blendable data set, same bytes.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data import index_helpers
from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_numpy import check_range

SURPLUS = 1.005  # each data set of a mixture is asked for a little more than its share, as the rounding of shares may need


def normalise(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights that add up to 1; in NumPy's summation, as the reference has it."""
    array = np.array(weights, dtype=np.float64)
    return tuple((array / np.sum(array)).tolist())


def compute_samples_per_dataset(num_samples: int, weights: Sequence[float]) -> list[int]:
    """How many samples each data set is asked for, so that `num_samples` can be drawn; all of them from a data set alone."""
    if len(weights) == 1:
        return [num_samples]
    return [math.ceil(num_samples * weight * SURPLUS) for weight in weights]


def blend(
    weights: Sequence[float], size: int, cache: IndexCache
) -> tuple[NDArray, NDArray[np.int64]]:
    """(which data set, which of its samples) for each of `size` steps; weights add up to 1."""

    def build(arrays: Arrays) -> None:
        index_helpers.blending_indices(
            np.array(weights, np.float64), arrays["dataset_index"], arrays["dataset_sample_index"]
        )

    key = {"weights": [weight.hex() for weight in weights], "size": size}
    which: type = np.uint8 if len(weights) <= 256 else np.int32
    arrays = cache.open(
        "blend",
        key,
        {"dataset_index": (which, (size,)), "dataset_sample_index": (np.int64, (size,))},
        build,
    )
    return arrays["dataset_index"], arrays["dataset_sample_index"]


def count_drawn_samples(dataset_index: NDArray, num_datasets: int) -> list[int]:
    """How often each data set occurs. Raises RuntimeError where one is named that does not exist."""
    counts = np.zeros(num_datasets, np.int64)
    for start in range(0, len(dataset_index), 1 << 24):
        named = dataset_index[start : start + (1 << 24)]
        check_range(named, num_datasets, "data set of a mixture")
        counts += np.bincount(named, minlength=num_datasets)
    return counts.tolist()
