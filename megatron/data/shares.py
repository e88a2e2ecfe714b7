"""The grammar of --datasets and --weights, which mix data with --dataset-format."""

import math
import os

from megatron.base.errors import ConfigError
from megatron.config.data import DataConfig
from megatron.data.blend import normalise


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
