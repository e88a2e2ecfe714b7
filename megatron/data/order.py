"""Sample orders that compose: a finite map position -> (data set, sample).

Invariant: an order is a function of its JSON tree and the data set's fingerprint alone, whoever rebuilds it and when.

    {"index": {"seed": S, "num_samples": N}}     the data set's own shuffled samples, made for N
    {"cut": [START, STOP], "of": TREE}           a stretch of another order
    {"permute": SEED, "of": TREE}                another order, shuffled by numpy.random.RandomState(SEED)
    {"concat": [TREE, TREE, ...]}                one after the other

Legend: k positions looked up at once; a leaf is a data set, by its place in `leaves`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.cache import Arrays, IndexCache
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_numpy import check_range

Tree = dict[str, Any]
SampleLocations = tuple[NDArray[np.int64], NDArray[np.int64]]  # (leaf [k], sample of that leaf [k])


class Order(Protocol):
    @property
    def leaves(self) -> list[GPTDataset]: ...

    def __len__(self) -> int: ...

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        """Leaf and sample of each position; 0 <= position < len.

        Raises RuntimeError where a stored order names what does not exist: its file has changed since it was opened.
        """
        ...


class DatasetOrder:
    """All samples of one data set, in its own order."""

    def __init__(self, dataset: GPTDataset) -> None:
        self.leaves = [dataset]

    def __len__(self) -> int:
        return len(self.leaves[0])

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        return np.zeros_like(positions), positions


class OrderSlice:
    """Positions [start, stop) of another order."""

    def __init__(self, of: Order, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= len(of), f"cannot cut [{start}, {stop}) out of {len(of)}"
        self.leaves, self._of, self._start, self._length = of.leaves, of, start, stop - start

    def __len__(self) -> int:
        return self._length

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        return self._of.look_up(positions + self._start)


class PermutedOrder:
    """Another order, shuffled by a seed."""

    def __init__(self, of: Order, seed: int, cache: IndexCache) -> None:
        def build(arrays: Arrays) -> None:
            arrays["order"][:] = np.arange(len(of))
            np.random.RandomState(seed).shuffle(arrays["order"])

        dtype: type = np.uint32 if len(of) < np.iinfo(np.uint32).max - 1 else np.int64
        self.leaves, self._of = of.leaves, of
        self._order = cache.open(
            "permutation", {"seed": seed, "length": len(of)}, {"order": (dtype, (len(of),))}, build
        )["order"]

    def __len__(self) -> int:
        return len(self._of)

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        chosen = self._order[positions].astype(np.int64)
        check_range(chosen, len(self._of), "position in a permutation")
        return self._of.look_up(chosen)


class _CompositeOrder:
    """Orders side by side: gathers each position's place from the order that it belongs to."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self.leaves = [leaf for order in orders for leaf in order.leaves]
        self._orders = list(orders)
        self._first_leaf = np.cumsum([0] + [len(order.leaves) for order in orders])

    def _gather(self, which: NDArray, within: NDArray[np.int64]) -> SampleLocations:
        leaves, samples = np.empty_like(within), np.empty_like(within)
        for number in np.unique(which):
            here = np.flatnonzero(which == number)
            check_range(within[here], len(self._orders[number]), "sample of a data set")
            leaf, samples[here] = self._orders[number].look_up(within[here])
            leaves[here] = leaf + self._first_leaf[number]
        return leaves, samples


class ConcatenatedOrder(_CompositeOrder):
    """One order after the other."""

    def __init__(self, orders: Sequence[Order]) -> None:
        super().__init__(orders)
        self._ends = np.cumsum([len(order) for order in orders])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        which = np.searchsorted(self._ends, positions, side="right")
        begins = np.concatenate(([0], self._ends[:-1]))
        return self._gather(which, positions - begins[which])


class BlendedOrder(_CompositeOrder):
    """A mixture. It ends where its indices end, or before the first sample that one of its orders no longer has."""

    def __init__(
        self,
        orders: Sequence[Order],
        dataset_index: NDArray,
        dataset_sample_index: NDArray[np.int64],
    ) -> None:
        super().__init__(orders)
        self.dataset_index, self._sample = dataset_index, dataset_sample_index
        self._length = len(dataset_index)
        lengths = np.array([len(order) for order in orders])
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
        return self._length

    def look_up(self, positions: NDArray[np.int64]) -> SampleLocations:
        which = self.dataset_index[positions]
        check_range(which, len(self._orders), "data set of a mixture")
        return self._gather(which, self._sample[positions])


def make_index_tree(seed: int, num_samples: int) -> Tree:
    return {"index": {"seed": seed, "num_samples": num_samples}}


def collect_seeds(tree: Tree) -> set[int]:
    """Seeds of all indices in a tree."""
    if "index" in tree:
        return {tree["index"]["seed"]}
    return set().union(*(collect_seeds(branch) for branch in tree.get("concat", [tree.get("of")])))


def build_order(
    tree: Tree, open_index: Callable[[int, int], GPTDataset], cache: IndexCache
) -> Order:
    """The order that a tree describes; `open_index(seed, num_samples)` opens the data set's index."""
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
    """out[rows[i]] = the first out.shape[1] tokens of the sample at positions[i]; positions and rows are [k]."""
    leaves, samples = order.look_up(positions)
    for leaf in np.unique(leaves):
        here = np.flatnonzero(leaves == leaf)
        order.leaves[leaf].read(samples[here], rows[here], out)


def locate(order: Order, position: int) -> tuple[GPTDataset, int]:
    """Data set and sample of one position."""
    leaves, samples = order.look_up(np.array([position], np.int64))
    return order.leaves[int(leaves[0])], int(samples[0])
