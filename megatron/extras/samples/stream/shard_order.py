"""The order of a streamed data set: which rows a logical shard reads, and in which order.

In each epoch, the row groups are shuffled and laid end to end. Logical shard i of n receives the
rows from i/n to (i + 1)/n of this sequence, so every row belongs to exactly one shard. Inside a row
group, each window of 256 rows is shuffled.

Invariant: the order is a function of (row groups, range of rows, seed, epoch, number of shards).
Ranks, threads and the position do not influence it.

Source: logical shards as in fms-fsdp (https://github.com/foundation-model-stack/fms-fsdp).
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW_ROWS = 256
"""Rows that are shuffled together. A shard keeps one window in memory."""


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Neighbouring rows of one row group that belong to one shard."""

    group: int
    """Number of the row group in the listing."""
    first_row: int
    """The first row, counted within the row group."""
    rows: int

    def split_windows(self) -> list[tuple[int, int]]:
        """Return the rows [first, last) of each window, counted within the row group.

        Windows begin at multiples of 256, so the rows that are shuffled together do not depend on
        the number of shards, except at the ends of the piece.
        """
        last = self.first_row + self.rows
        inner = range((self.first_row // WINDOW_ROWS + 1) * WINDOW_ROWS, last, WINDOW_ROWS)
        return list(itertools.pairwise([self.first_row, *inner, last]))


class EpochOrder:
    """The order of one data set in one epoch."""

    def __init__(
        self,
        first_rows: NDArray[np.int64],
        rows: NDArray[np.int64],
        seed: int,
        epoch: int,
        shards: int,
    ) -> None:
        """Shuffle the row groups.

        Args:
            first_rows: The first row of each group that is read, counted within the group.
            rows: Rows of each group that are read. It may be 0.
            seed: Seed of the data order.
            epoch: Number of the epoch, from 0.
            shards: Number of logical shards.
        """
        self._first_rows = first_rows
        self._rows = rows
        self._seed = seed
        self._epoch = epoch
        self._shards = shards
        self._groups = np.random.RandomState([seed, epoch]).permutation(len(rows))
        self._ends = np.cumsum(rows[self._groups])

    def count_rows(self, shard: int) -> int:
        """Return the number of rows of a shard."""
        begin, end = self._find_bounds(shard)
        return end - begin

    def list_pieces(self, shard: int) -> list[RowRange]:
        """Return the pieces of a shard, in order."""
        begin, end = self._find_bounds(shard)
        pieces = []
        place = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            group = int(self._groups[place])
            end_of_group = int(self._ends[place])
            rows = min(end, end_of_group) - begin
            into_group = int(self._rows[group]) - (end_of_group - begin)
            # Groups without rows are between others. They give no piece.
            if rows > 0:
                pieces.append(RowRange(group, int(self._first_rows[group]) + into_group, rows))
            begin += rows
            place += 1
        return pieces

    def shuffle_window(self, group: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the order of the rows [first, last) of a group, counted from `first`."""
        random = np.random.RandomState([self._seed, self._epoch, group, first])
        return random.permutation(last - first)

    def _find_bounds(self, shard: int) -> tuple[int, int]:
        """Return the part of the shuffled sequence that belongs to a shard, in rows."""
        total = int(self._ends[-1]) if len(self._ends) else 0
        return shard * total // self._shards, (shard + 1) * total // self._shards


def clip_groups(
    rows: NDArray[np.int64], documents: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the part of each row group that lies in a range of the data set's rows.

    Args:
        rows: Rows of each group.
        documents: The range [first, last) of rows, counted over all groups in order.

    Returns:
        The first row of each group that lies in the range, counted within the group, and the number
        of such rows.
    """
    ends = np.cumsum(rows)
    begins = ends - rows
    first = np.clip(documents[0] - begins, 0, rows)
    last = np.clip(documents[1] - begins, 0, rows)
    return first, last - first


# The golden ratio as a fraction of 2^64. Its multiples spread evenly over the circle.
_TURN = 0x9E3779B97F4A7C15


class ShardMixture:
    """Chooses the data set of each sample of a shard, so that the weights are met exactly.

    Each data set has an arc of a circle, as long as its share. The sample at position p is number
    t = p // shards of shard i = p % shards. It comes from the data set whose arc holds the point
    (phase of shard i + t x golden ratio). The phases of the shards divide the circle evenly. In
    each round of all shards, and in the samples of each shard, a data set therefore has its share
    to within about one sample.
    """

    def __init__(self, weights: list[float], shards: int, seed: int) -> None:
        """Divide the circle.

        Args:
            weights: Share of each data set. They add up to 1.
            shards: Number of logical shards.
            seed: Seed of the phases. Without it, neighbouring shards would read the same data set.
        """
        ends = np.cumsum(weights)[:-1] * 2.0**64
        self._ends = np.array([min(int(end), 2**64 - 1) for end in ends], np.uint64)
        order = np.random.RandomState(seed).permutation(shards)
        self._phases = np.array([(int(k) << 64) // shards for k in order], np.uint64)

    def choose(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the data set for the samples at these positions [k]."""
        turns, shards = np.divmod(positions, len(self._phases))
        # The product wraps around at 2^64, as points on a circle do.
        points = self._phases[shards] + turns.astype(np.uint64) * np.uint64(_TURN)
        return np.searchsorted(self._ends, points, side="right").astype(np.int64)


@dataclasses.dataclass(frozen=True)
class MixturePhase:
    """The mixture that applies from a sample of the run on."""

    start_sample: int
    shares: dict[str, float]
    """Share of each data set in the tokens, by its name. They add up to 1."""


class PhasedMixture:
    """Chooses the data set of each sample of a run whose mixture changes."""

    def __init__(
        self, names: Sequence[str], phases: Sequence[MixturePhase], shards: int, seed: int
    ) -> None:
        """Divide the circle of each phase, see `ShardMixture`.

        Args:
            names: Names of all data sets.
            phases: The phases in order. The first one applies to the samples before it as well.
            shards: Number of logical shards.
            seed: Seed of the phases of the shards.
        """
        self._starts = np.array([phase.start_sample for phase in phases])
        self._mixtures = [
            ShardMixture(list(phase.shares.values()), shards, seed) for phase in phases
        ]
        # The mixture of a phase counts its own data sets only, so that a run that was stopped and
        # resumed with these data sets has the same order.
        self._members = [np.array([names.index(name) for name in phase.shares]) for phase in phases]

    def choose(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the data set, among all names, for the samples at positions [k]."""
        which = np.searchsorted(self._starts, positions, side="right") - 1
        which = np.maximum(which, 0)
        chosen = np.empty(len(positions), np.int64)
        for number in np.unique(which):
            rows = which == number
            chosen[rows] = self._members[number][self._mixtures[number].choose(positions[rows])]
        return chosen
