"""Sample orders that can be combined. An order maps each position to a data set and a sample.

Invariant: an order is a function of its JSON tree and of the data set's fingerprint. It does not
matter which process rebuilds it, or when. The trees are:

    {"index": {"seed": S, "num_samples": N}}     the data set's own shuffled samples, made for N
    {"cut": [START, STOP], "of": TREE}           positions [START, STOP) of another order
    {"permute": SEED, "of": TREE}                another order, shuffled by RandomState(SEED)
    {"concat": [TREE, TREE, ...]}                orders one after the other

Legend: k is the number of positions that are looked up at once. A leaf is a data set, given by its
index in `leaves`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_helpers import shuffle_in_place
from megatron.data.index_numpy import check_range
from megatron.data.indexed import Samples

Tree = dict[str, Any]
SampleLocations = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The leaf of each position [k], and the number of the sample in that leaf [k]."""


class Order(Protocol):
    """A finite sequence of samples."""

    @property
    def leaves(self) -> list[Samples]:
        """The data sets that the samples come from."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        """Return leaf and sample of each position, with 0 <= position < len.

        Raises:
            RuntimeError: a stored order names a sample that does not exist. Its file has changed
                since it was opened.
        """


class DatasetOrder:
    """All samples of one data set, in its own order."""

    def __init__(self, dataset: Samples) -> None:
        """Use the order of a data set."""
        self.leaves = [dataset]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.leaves[0])

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        """Return leaf and sample of each position."""
        # The only leaf is leaf 0.
        return np.zeros_like(positions), positions


class OrderSlice:
    """Positions [start, stop) of another order."""

    def __init__(self, of: Order, start: int, stop: int) -> None:
        """Take positions [start, stop) of `of`."""
        assert 0 <= start <= stop <= len(of), f"no positions [{start}, {stop}) in {len(of)} samples"
        self.leaves = of.leaves
        self._of = of
        self._start = start
        self._length = stop - start

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        """Return leaf and sample of each position."""
        return self._of.look_up(positions + self._start)


class PermutedOrder:
    """Another order, shuffled with a seed."""

    def __init__(self, of: Order, seed: int, cache: IndexCache) -> None:
        """Open the permutation, or build it if no cache has it."""

        def build(arrays: Arrays) -> None:
            arrays["order"][:] = np.arange(len(of))
            shuffle_in_place(arrays["order"], np.random.RandomState(seed))

        # 4 bytes a sample are enough for most orders, and halve the file.
        dtype: type = np.uint32 if len(of) < np.iinfo(np.uint32).max - 1 else np.int64
        self.leaves = of.leaves
        self._of = of
        self._order = cache.open(
            "permutation", {"seed": seed, "length": len(of)}, {"order": (dtype, (len(of),))}, build
        )["order"]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._of)

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        """Return leaf and sample of each position."""
        chosen = self._order[positions].astype(np.int64)
        # The permutation is a memory-mapped file, which may have been damaged since it was opened.
        check_range(chosen, len(self._of), "position in a permutation")
        return self._of.look_up(chosen)


class _CompositeOrder:
    """Several orders, of which each position belongs to one."""

    def __init__(self, orders: Sequence[Order]) -> None:
        """Collect the leaves of all orders."""
        self.leaves = [leaf for order in orders for leaf in order.leaves]
        self._orders = list(orders)
        # Leaf i of order n is leaf _first_leaf[n] + i of the combined order.
        self._first_leaf = np.cumsum([0] + [len(order.leaves) for order in orders])

    def _gather(self, which: NDArray, within: NDArray[np.int64]) -> SampleLocations:
        """Look up positions `within` the orders `which`, all [k], with one call for each order."""
        leaves = np.empty_like(within)
        samples = np.empty_like(within)
        # `numpy.unique` would import numpy's masked arrays, which nothing else needs.
        for number in sorted(set(which.tolist())):
            here = np.flatnonzero(which == number)
            # The index of a mixture is a memory-mapped file, too, and may have been damaged.
            check_range(within[here], len(self._orders[number]), "sample of a data set")
            leaf, samples[here] = self._orders[number].look_up(within[here])
            leaves[here] = leaf + self._first_leaf[number]
        return leaves, samples


class ConcatenatedOrder(_CompositeOrder):
    """Several orders, one after the other."""

    def __init__(self, orders: Sequence[Order]) -> None:
        """Put the orders one after the other."""
        super().__init__(orders)
        self._ends = np.cumsum([len(order) for order in orders])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1])

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        """Return leaf and sample of each position."""
        # side="right" skips orders without samples.
        which = np.searchsorted(self._ends, positions, side="right")
        begins = np.concatenate(([0], self._ends[:-1]))
        return self._gather(which, positions - begins[which])


class BlendedOrder(_CompositeOrder):
    """A weighted mixture of several orders.

    It ends where its indices end, or before the first sample that one of its orders does not have.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        dataset_index: NDArray,
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        """Combine the orders.

        Args:
            orders: The orders of the mixture.
            dataset_index: The order that gives each sample [samples].
            dataset_sample_index: The position of each sample in its order [samples].
        """
        super().__init__(orders)
        self.dataset_index = dataset_index
        self._sample = dataset_sample_index
        self._length = len(dataset_index)
        lengths = np.array([len(order) for order in orders])
        # In chunks, since the indices may be larger than the memory. The first order that is
        # exhausted ends the mixture. Passing over it would change the mixture's weights.
        for start in range(0, self._length, 1 << 22):
            stop = start + (1 << 22)
            check_range(dataset_index[start:stop], len(lengths), "data set of a mixture")
            missing = np.flatnonzero(
                dataset_sample_index[start:stop] >= lengths[dataset_index[start:stop]]
            )
            if len(missing):
                self._length = start + int(missing[0])
                break

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        """Return leaf and sample of each position."""
        which = self.dataset_index[positions]
        check_range(which, len(self._orders), "data set of a mixture")
        return self._gather(which, self._sample[positions])


def make_index_tree(seed: int, num_samples: int) -> Tree:
    """Return the tree of a data set's own order, made for `num_samples` with a seed."""
    return {"index": {"seed": seed, "num_samples": num_samples}}


def collect_seeds(tree: Tree) -> set[int]:
    """Return the seeds of all indices in a tree."""
    if "index" in tree:
        return {tree["index"]["seed"]}
    # Other trees have their branches under "concat", or a single one under "of".
    return set().union(*(collect_seeds(branch) for branch in tree.get("concat", [tree.get("of")])))


def build_order(tree: Tree, open_index: Callable[[int, int], Samples], cache: IndexCache) -> Order:
    """Return the order that a tree describes.

    Args:
        tree: See the module docstring.
        open_index: Takes seed and number of samples, and opens the data set's index.
        cache: Where permutations are stored.
    """
    if "index" in tree:
        return DatasetOrder(open_index(tree["index"]["seed"], tree["index"]["num_samples"]))
    if "concat" in tree:
        return ConcatenatedOrder(
            [build_order(branch, open_index, cache) for branch in tree["concat"]]
        )
    of = build_order(tree["of"], open_index, cache)
    if "cut" in tree:
        return OrderSlice(of, *tree["cut"])
    return PermutedOrder(of, tree["permute"], cache)


def read(
    order: Order, positions: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.int64]
) -> None:
    """Read samples of an order into `out`.

    Args:
        order: The order.
        positions: int64[k], positions in the order.
        rows: int64[k]. Row rows[i] of `out` receives the sample at positions[i].
        out: The first out.shape[1] tokens of each sample are written.

    Raises:
        RuntimeError: see `Order.look_up` and `GPTDataset.read`.
    """
    leaves, samples = order.look_up(positions)
    # One call for each data set, which copies all its samples without the GIL.
    for leaf in sorted(set(leaves.tolist())):
        here = np.flatnonzero(leaves == leaf)
        order.leaves[leaf].read(samples[here], rows[here], out)


def locate(order: Order, position: int) -> tuple[Samples, int]:
    """Return the data set and the sample at a position."""
    leaves, samples = order.look_up(np.array([position], np.int64))
    return order.leaves[int(leaves[0])], int(samples[0])
