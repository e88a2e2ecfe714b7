"""Weighted mixtures of data sets, and the grammar of --datasets and --weights.

At each step one data set gives its next sample. It is the one whose share is furthest below its
weight.

Invariant: the first k samples of a mixture do not depend on how many follow.

Source: Megatron-LM's blendable data set. The indices are the same byte for byte.
"""

import math
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError
from megatron.config.data import DataConfig
from megatron.data import index_helpers
from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_numpy import check_range

SURPLUS = 1.005
"""Each data set of a mixture must provide this many times its share.

The rounding of shares may take a few samples more from a data set than its weight gives.
"""


def normalise(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their sum.

    NumPy adds them up, as in the reference. Another order of summation could change the last bit of
    a weight, and with it the mixture.
    """
    array = np.array(weights, dtype=np.float64)
    return tuple((array / np.sum(array)).tolist())


def compute_samples_per_dataset(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Return how many samples each data set must provide for a mixture of `num_samples`.

    A single data set provides all of them, without a surplus.
    """
    if len(weights) == 1:
        return [num_samples]
    return [math.ceil(num_samples * weight * SURPLUS) for weight in weights]


def blend(
    weights: Sequence[float], size: int, cache: IndexCache
) -> tuple[NDArray, NDArray[np.int64]]:
    """Return the indices of a mixture, built or from the cache.

    Args:
        weights: One for each data set. They add up to 1.
        size: Samples of the mixture.
        cache: Where the indices are stored.

    Returns:
        The data set of each sample [size], and the number of the sample in that data set [size].
    """

    def build(arrays: Arrays) -> None:
        index_helpers.blending_indices(
            np.array(weights, np.float64), arrays["dataset_index"], arrays["dataset_sample_index"]
        )

    # hex keeps every bit of a weight. Decimal digits could make two different mixtures share a key.
    key = {"weights": [weight.hex() for weight in weights], "size": size}
    # One byte for each sample suffices for up to 256 data sets.
    which: type = np.uint8 if len(weights) <= 256 else np.int32
    arrays = cache.open(
        "blend",
        key,
        {"dataset_index": (which, (size,)), "dataset_sample_index": (np.int64, (size,))},
        build,
    )
    return arrays["dataset_index"], arrays["dataset_sample_index"]


def count_drawn_samples(dataset_index: NDArray, num_datasets: int) -> list[int]:
    """Return how many samples each data set of a mixture gives.

    Args:
        dataset_index: The data set of each sample [size].
        num_datasets: Number of data sets.

    Raises:
        RuntimeError: the index names a data set that does not exist.
    """
    # In chunks, because the index is memory-mapped and bincount makes an int64 copy.
    counts = np.zeros(num_datasets, np.int64)
    for start in range(0, len(dataset_index), 1 << 24):
        named = dataset_index[start : start + (1 << 24)]
        check_range(named, num_datasets, "data set of a mixture")
        counts += np.bincount(named, minlength=num_datasets)
    return counts.tolist()


def parse_datasets(data: DataConfig) -> list[str]:
    """Return the names of the data sets. Without --datasets, --data-path itself is the only one.

    Raises:
        ConfigError: --data-path is not one folder, or a name is empty, named twice or leads out of
            the folder.
    """
    if len(data.data_path) != 1:
        raise ConfigError(
            f"--dataset-format {data.dataset_format} takes one folder as --data-path, and not "
            f"{len(data.data_path)} values. Name folders in it with --datasets and --weights."
        )
    if data.datasets is None:
        return ["."]
    names = [name.strip() for name in data.datasets.split(",")]
    for name in names:
        # State is stored under these names, so they must be the same on every machine.
        if not name or os.path.isabs(name) or ".." in name.split("/"):
            raise ConfigError(
                f"--datasets {data.datasets!r} has the entry {name!r}. Each entry must be the name "
                "of a folder below --data-path, as in --datasets web,code."
            )
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--datasets {data.datasets!r} has a name twice. Name it once, with a larger weight."
        )
    return names


def parse_shares(data: DataConfig) -> dict[str, float]:
    """Return the share of each data set in the tokens, by its name. They add up to 1.

    Raises:
        ConfigError: --datasets or --weights cannot be parsed.
    """
    names = parse_datasets(data)
    return dict(zip(names, _parse_weights(data, len(names)), strict=True))


def _parse_weights(data: DataConfig, count: int) -> list[float]:
    """Return the share of each data set. Without --weights all shares are equal.

    Raises:
        ConfigError: there is not one positive number for each data set.
    """
    if data.weights is None:
        return [1 / count] * count
    try:
        weights = [float(weight) for weight in data.weights.split(",")]
    except ValueError:
        weights = []
    if len(weights) != count or not all(w > 0 and math.isfinite(w) for w in weights):
        raise ConfigError(
            f"--weights {data.weights!r} must have one positive number for each of the {count} "
            "data sets, as in --weights 3,1,1. Leave out data that must not be used."
        )
    return list(normalise(weights))
