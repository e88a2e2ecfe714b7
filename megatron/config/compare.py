"""Compares two configurations, to check that all ranks have the configuration of rank 0.

Invariant: fields that differ between ranks by their nature (`_PER_RANK`) are left out.
"""

import hashlib
import json

from megatron.config.fields import flatten
from megatron.config.tree import Config

_PER_RANK = {"parallel.local_rank"}


def compute_config_digest(config: Config) -> str:
    """Return the SHA-256 of all fields that must agree between ranks, as 64 hexadecimal digits."""
    values = {dotted: value for dotted, value in flatten(config).items() if dotted not in _PER_RANK}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def find_config_differences(a: Config, b: Config) -> list[tuple[str, str, str]]:
    """Return the dotted name, the value in `a` and the value in `b` of each field that differs.

    The values are JSON. The list is empty if the digests are equal.
    """
    left = flatten(a)
    right = flatten(b)
    # Compare as JSON, as the digest does. There nan equals itself, and 1 differs from 1.0.
    shown = [
        (dotted, json.dumps(left[dotted]), json.dumps(right[dotted]))
        for dotted in left
        if dotted not in _PER_RANK
    ]
    return [(dotted, x, y) for dotted, x, y in shown if x != y]


def list_config_differences(a: Config, b: Config) -> list[str]:
    """Return one line for each field that differs: its dotted name and both values.

    The value in `a` comes first. The list is empty if the digests are equal.
    """
    return [f"{dotted}: {x} and {y}" for dotted, x, y in find_config_differences(a, b)]
