"""Packed conversations: which conversations share a sample, and the checks of such data.

Invariant: which conversations share a sample is a function of their sizes, the sequence length and
the seed. Each conversation is read once before any is read twice.

Legend: s sequence length, k samples that are read at once, n conversations.
"""

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.data.batches import START
from megatron.data.cache import Arrays, IndexCache
from megatron.data.documents import DocumentRules
from megatron.data.index_numpy import check_range
from megatron.data.indexed import IndexedDataset

_SHOWN = 5
"""Conversations that a message names."""


def pack(sizes: NDArray[np.int64], capacity: int, seed: int) -> NDArray[np.int32]:
    """Return the sample of each conversation, int32[n], by best fit of decreasing sizes.

    Each conversation goes into the fullest sample that has room for it. The seed decides between
    conversations of equal size.

    Args:
        sizes: int64[n], at most `capacity` each.
        capacity: Tokens of a sample, s + 1.
        seed: Seed of the order.
    """
    order = np.random.RandomState(seed).permutation(len(sizes))
    # Large ones first: the small ones then fill what is left.
    order = order[np.argsort(-sizes[order], kind="stable")]
    # All of them are written, because each conversation fits into an empty sample.
    found = np.empty(len(sizes), np.int32)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set if a sample has room for exactly r tokens. So the fullest fitting one is found
    # without a search.
    rooms = 0
    count = 0
    for place, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            sample = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room = capacity
            sample = count
            count += 1
        found[place] = sample
        with_room[room - size].append(sample)
        rooms |= 1 << (room - size)
    return found


class PackedDataset:
    """Samples of packed conversations. See the module docstring."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: tuple[int, int],
        seq_length: int,
        seed: int,
        num_samples: int,
        cache: IndexCache,
    ) -> None:
        """Open the packing, or build it if the cache does not have it. See `GPTDataset`."""
        self.indexed = indexed
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        # The packing is that of one epoch, and all epochs have it.
        first, last = documents
        count = last - first
        key = self._make_key()

        def build(arrays: Arrays) -> None:
            sizes = indexed.sizes[first:last].astype(np.int64)
            arrays["sample"][:] = pack(sizes, seq_length + 1, seed)

        sample = cache.open("packing", key, {"sample": (np.int32, (count,))}, build)["sample"]
        check_range(sample, count, "sample of a packing")
        # The conversations of a sample stand together, in the order of the file.
        self.doc_idx = np.argsort(sample, kind="stable") + first
        starts = np.flatnonzero(np.diff(sample[self.doc_idx - first], prepend=-1))
        self._bounds = np.append(starts, count)
        self.per_epoch = len(starts)
        self.epochs = max(1, -(-num_samples // self.per_epoch))
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.epochs * self.per_epoch

    def read(
        self, samples: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.int64]
    ) -> None:
        """Read samples into `out`, with marks. See `GPTDataset.read`.

        Raises:
            DataError: out has fewer than s + 1 columns, because a curriculum shortens samples.
        """
        if out.shape[1] != self.seq_length + 1:
            raise DataError(
                f"{self.indexed.prefix} holds conversations, which would be cut at "
                f"{out.shape[1] - 1} tokens by the curriculum. Leave --curriculum-learning out."
            )
        # A missing byte of a mapped file would end the process.
        self.indexed.check_not_truncated()
        for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
            # A view, so this writes into `out`.
            line = out[row]
            at = 0
            for document in self._list_documents(sample):
                ids = self.indexed.get(document)
                line[at : at + len(ids)] = ids
                line[at : at + min(1, len(ids))] -= START
                at += len(ids)
            # Padding is a text of its own. It attends to itself, and none of it counts.
            line[at:] = -1
            line[at : at + 1] -= START

    def locate(self, sample: int, column: int) -> tuple[int, int]:
        """Return the conversation that holds a token of a sample, and the token's offset in it."""
        place = column
        for document in self._list_documents(sample):
            size = int(self.indexed.sizes[document])
            if place < size:
                return document, place
            place -= size
        # A place in the padding is after the last conversation.
        return document, size + place

    def _list_documents(self, sample: int) -> list[int]:
        """Return the conversations of a sample."""
        epoch, place = divmod(sample, self.per_epoch)
        if epoch not in self._orders:
            # A generator for each epoch, so an epoch does not depend on how many come before it.
            order = np.random.RandomState([self.seed, epoch]).permutation(self.per_epoch)
            self._orders[epoch] = order
        packed = int(self._orders[epoch][place])
        found: list[int] = self.doc_idx[self._bounds[packed] : self._bounds[packed + 1]].tolist()
        return found

    def _make_key(self) -> dict:
        """Return everything that determines the packing."""
        return {
            "data": self.indexed.compute_fingerprint(),
            "documents": list(self.documents),
            "seq_length": self.seq_length,
            "seed": self.seed,
        }


class ConversationPacking:
    """Conversations as samples. See `Packing`."""

    def check(self, indexed: IndexedDataset, seq_length: int, rules: DocumentRules | None) -> None:
        """Check a data set of conversations, before an index is built.

        Raises:
            DataError: A flag is missing, a conversation is too long, or documents are among them.
        """
        flags = {"--reset-position-ids": False, "--reset-attention-mask": False}
        flags["--eod-mask-loss"] = False
        if rules is not None:
            given = (rules.reset_position_ids, rules.reset_attention_mask, rules.eod_mask_loss)
            flags = dict(zip(flags, given, strict=True))
        missing = [flag for flag, value in flags.items() if not value]
        if missing:
            raise DataError(
                f"{indexed.prefix} holds conversations, of which several share a sample without "
                f"attention between them. Give {' '.join(missing)} too."
            )
        firsts = indexed.tokens[indexed.pointers[indexed.sizes > 0] // indexed.dtype.itemsize]
        documents = np.flatnonzero(firsts >= 0)
        if len(documents):
            raise DataError(
                f"{indexed.prefix} mixes conversations with documents, as number "
                f"{1 + documents[0]}. Keep them in two data sets, and give both with weights."
            )
        long = np.flatnonzero(indexed.sizes > seq_length + 1)
        if len(long):
            raise DataError(
                f"{indexed.prefix}: {len(long)} of {len(indexed)} conversations have more than "
                f"{seq_length + 1} tokens, the longest {indexed.sizes.max()} (numbers "
                f"{', '.join(str(1 + each) for each in long[:_SHOWN])}). None is cut by a run. "
                f"Raise --seq-length, or make the data again with --longest {seq_length + 1} "
                "--on-long drop, or cut."
            )

    def count_samples(
        self, indexed: IndexedDataset, documents: tuple[int, int], seq_length: int
    ) -> int:
        """Return the samples of the conversations [first, last), at least 1.

        Conversations that are too long are left out. A run is refused for them.
        """
        sizes = indexed.sizes[slice(*documents)].astype(np.int64)
        packed = pack(sizes[sizes <= seq_length + 1], seq_length + 1, 0)
        return 1 + int(packed.max(initial=0))

    def open(
        self,
        indexed: IndexedDataset,
        documents: tuple[int, int],
        seq_length: int,
        seed: int,
        num_samples: int,
        cache: IndexCache,
    ) -> PackedDataset:
        """Return the samples. The packing is built if the cache does not have it."""
        return PackedDataset(indexed, documents, seq_length, seed, num_samples, cache)
