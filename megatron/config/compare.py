"""Are two configurations the same run? Used where ranks compare theirs with rank 0's.

Invariant: fields that differ between ranks by their nature (`_PER_RANK`) play no part.
"""

import hashlib
import json

from megatron.config.fields import flatten
from megatron.config.tree import Config

_PER_RANK = {"parallel.local_rank"}


def compute_config_digest(config: Config) -> str:
    """SHA-256 over all fields that must agree between ranks, as 64 hexadecimal digits."""
    values = {dotted: value for dotted, value in flatten(config).items() if dotted not in _PER_RANK}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def list_config_differences(a: Config, b: Config) -> list[str]:
    """One line for each field that differs: dotted name, value in `a`, value in `b`. Empty when the digests are equal."""
    left, right = flatten(a), flatten(b)
    # JSON, as in the digest: nan equals itself there, and 1 is not 1.0
    shown = {
        dotted: (json.dumps(left[dotted]), json.dumps(right[dotted]))
        for dotted in left
        if dotted not in _PER_RANK
    }
    return [f"{dotted}: {x} and {y}" for dotted, (x, y) in shown.items() if x != y]
