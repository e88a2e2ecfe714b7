"""Conversations of a reduced copy, and what the reference knows of them.

The conversations have the marks of the run's own ones. Two tokens of each say its number, so the
reference finds the conversations of a sample in its ids alone, and takes their bounds, positions
and masks from what was written. It does not read the marks in the samples of the copy.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import IndexedDataset
from megatron.extras.planner.verify.reduction import EOD, SEQUENCE

_BASE = 250
"""Numbers are written in this base."""
_SHORTEST = 4
"""Tokens of the shortest conversation: one before its number, two of it, and one that counts."""


def make_conversations(prefix: str, number: int, count: int) -> Iterator[NDArray[np.int64]]:
    """Yield beginnings of a run's conversations, with marks and with ids below `EOD`.

    Args:
        prefix: The run's conversations.
        number: Number of the data set of the copy. Both sets have different conversations.
        count: How many are made.
    """
    indexed = IndexedDataset(prefix)
    for index in range(count):
        wanted = _SHORTEST + (7 * index) % (SEQUENCE - _SHORTEST)
        stored = indexed[(2 * index + number) % len(indexed)].astype(np.int64)
        # A short conversation is repeated, and its first token never counts.
        stored = np.resize(stored, max(_SHORTEST, min(wanted, len(stored))))
        counted = stored >= 0
        # No token predicts the first one.
        counted[0] = False
        # A conversation without a token that counts would compare nothing.
        counted[-1] |= not counted.any()
        ids = np.maximum(stored, ~stored) % EOD
        ids[1:3] = divmod(2 * index + number, _BASE)
        yield np.where(counted, ids, ~ids)


class Conversations:
    """The conversations of a copy, by the tokens that say their numbers."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Read the data sets that hold conversations."""
        self._by_number: dict[tuple[int, ...], NDArray[np.int64]] = {}
        for prefix in prefixes:
            indexed = IndexedDataset(prefix)
            # A mixture has documents too.
            for number in range(len(indexed) * indexed.is_packed):
                stored = np.asarray(indexed[number], np.int64)
                self._by_number[tuple(np.maximum(stored, ~stored)[1:3].tolist())] = stored

    def find(self, sample: NDArray[np.int64]) -> tuple[list[int], NDArray[np.bool_]] | None:
        """Return where conversations and the padding of a sample begin, and which tokens count.

        None if the sample is not made of whole conversations, so it has documents.

        Args:
            sample: The ids of a sample, int64[s + 1].
        """
        starts = []
        counted = np.zeros(len(sample), bool)
        at = 0
        while at < len(sample):
            stored = self._by_number.get(tuple(sample[at + 1 : at + 3].tolist()))
            starts.append(at)
            if stored is None or not _begins_with(sample[at:], stored):
                # Only padding may be left. A sample of padding alone is none of conversations.
                if sample[at:].any() or len(starts) == 1:
                    return None
                return starts, counted
            counted[at : at + len(stored)] = stored >= 0
            at += len(stored)
        return starts, counted


def _begins_with(ids: NDArray[np.int64], stored: NDArray[np.int64]) -> bool:
    """Return whether ids begin with those of a conversation, which has marks."""
    return np.array_equal(ids[: len(stored)], np.maximum(stored, ~stored))
