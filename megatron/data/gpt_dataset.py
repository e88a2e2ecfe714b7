"""One indexed data set as GPT training reads it: documents become samples, and these are shuffled.

A sample has seq_length + 1 tokens. Neighbouring samples share one token, since the last label of a
sample is the first token of the next one. Three arrays describe the order:

- doc_idx holds the documents, repeated for each epoch and shuffled.
- sample_idx holds where each sample begins, as (index into doc_idx, offset in the document).
- shuffle_idx holds the numbers of the samples, shuffled.

Invariant: the order is a function of (documents, seq_length, seed, number of epochs, whether the
last epoch is shuffled separately). Its bytes are those of the BigScience fork of
Megatron-DeepSpeed.

Legend: s seq_length, k number of samples requested at once.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.data import index_helpers
from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_helpers import shuffle_in_place
from megatron.data.index_numpy import check_range
from megatron.data.indexed import IndexedDataset

# Items handled at once, so that memory does not grow with the data set.
_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class IndexShape:
    """How often the documents are repeated, and how many samples that gives.

    It is computed from sizes alone, before an index is built.
    """

    num_epochs: int
    num_samples: int
    """Samples that all epochs together give, at least as many as requested."""
    separate_last_epoch: bool
    """Whether the last epoch is shuffled separately, because only a part of it is used.

    Every document is then read once before any is read twice.
    """
    samples_before_last_epoch: int
    """Samples that all epochs but the last one give."""

    @classmethod
    def compute(cls, tokens_per_epoch: int, seq_length: int, num_samples: int) -> "IndexShape":
        """Return the shape for a number of requested samples.

        Args:
            tokens_per_epoch: Tokens of all documents.
            seq_length: Tokens of a sample, without the last label.
            num_samples: Samples that are requested.
        """
        # The last sample needs one token more than its seq_length, hence the + 1 and - 1 below.
        # With one epoch, nothing comes before the last one.
        epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
        total = (epochs * tokens_per_epoch - 1) // seq_length
        before_last = 0
        if epochs > 1:
            before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
        per_epoch = (tokens_per_epoch - 1) // seq_length
        # 0.95 is the reference's. A last epoch that is nearly complete is shuffled with the others.
        separate = epochs > 1 and num_samples - before_last < int(0.95 * per_epoch)
        return cls(epochs, total, separate, before_last)


class GPTDataset:
    """Samples of the documents [first, last) of an indexed data set.

    `dataset[i]` is int64[s + 1].
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: tuple[int, int],
        seq_length: int,
        seed: int,
        num_samples: int,
        cache: IndexCache,
    ) -> None:
        """Open the index of the samples, or build it if the cache does not have it.

        Args:
            indexed: The documents.
            documents: The range [first, last) of documents.
            seq_length: s.
            seed: Seed of the shuffles.
            num_samples: Samples that will be requested. The index covers at least as many.
            cache: Where the index is stored.

        Raises:
            DataError: the documents do not fill one sample, or the index cannot be built.
        """
        self.indexed = indexed
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.tokens_per_epoch = count_tokens(indexed, documents)
        # Checked before the index is built, since the shape divides by the tokens of an epoch.
        check_large_enough(indexed.prefix, documents, self.tokens_per_epoch, seq_length)
        self.shape = IndexShape.compute(self.tokens_per_epoch, seq_length, num_samples)
        arrays = cache.open("samples", self._make_key(), self._choose_shapes(), self._build)
        self.doc_idx, self.sample_idx, self.shuffle_idx = (
            arrays[name] for name in ("doc_idx", "sample_idx", "shuffle_idx")
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.shape.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return one sample, int64[s + 1]."""
        out = np.empty((1, self.seq_length + 1), np.int64)
        # The same code as for batches, with one row.
        self.read(np.array([index], np.int64), np.zeros(1, np.int64), out)
        return out[0]

    def read(
        self, samples: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.int64]
    ) -> None:
        """Read samples into `out`, without the GIL while tokens are copied.

        Args:
            samples: int64[k].
            rows: int64[k]. Row rows[i] of `out` receives samples[i].
            out: The first out.shape[1] <= s + 1 tokens of each sample are written.

        Raises:
            RuntimeError: index or data name what does not exist. A file has changed since it was
                opened.
            DataError: a file of the data set was truncated since it was opened.
        """
        numbers = self.shuffle_idx[samples]
        check_range(numbers, self.shape.num_samples, "sample in shuffle_idx")
        # The C++ loop takes int64 only, whatever type is stored.
        starts = self.sample_idx[numbers].astype(np.int64)
        data = self.indexed
        data.check_not_truncated()
        index_helpers.gather_tokens(
            data.tokens, data.pointers, data.sizes, self.doc_idx, starts, rows, out
        )

    def locate(self, sample: int, column: int) -> tuple[int, int]:
        """Return the document that holds a token of a sample, and the token's offset in it.

        Raises:
            RuntimeError: see `read`.
        """
        # Walk over the documents from the sample's first one, as gather_tokens does.
        numbers = self.shuffle_idx[sample : sample + 1]
        check_range(numbers, self.shape.num_samples, "sample in shuffle_idx")
        index, offset = (int(value) for value in self.sample_idx[numbers[0]])
        place = offset + column
        while True:
            check_range(np.array([index]), len(self.doc_idx), "place in doc_idx")
            document = self.doc_idx[index : index + 1]
            check_range(document, len(self.indexed), "document")
            size = int(self.indexed.sizes[document[0]])
            if place < size:
                return int(document[0]), place
            index = index + 1
            place = place - size

    def _make_key(self) -> dict:
        """Return everything that determines the index."""
        # The number of samples is not part of it. Requests that need as many epochs share an index.
        return {
            "data": self.indexed.compute_fingerprint(),
            "documents": list(self.documents),
            "seq_length": self.seq_length,
            "seed": self.seed,
            "num_epochs": self.shape.num_epochs,
            "separate_last_epoch": self.shape.separate_last_epoch,
        }

    def _choose_shapes(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Return the dtype and the shape of each array.

        32 bits are used while they suffice, as in the reference. The largest value decides.
        """
        first, last = self.documents
        repeated = (last - first) * self.shape.num_epochs
        samples = self.shape.num_samples
        return {
            "doc_idx": (choose_signed_type(last - 1), (repeated,)),
            "sample_idx": (choose_signed_type(repeated - 1), (samples + 1, 2)),
            "shuffle_idx": (
                np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64,
                (samples,),
            ),
        }

    def _build(self, arrays: Arrays) -> None:
        """Fill the arrays.

        The order of the draws from the random stream is the reference's: documents, then samples.
        Another order would give other samples.
        """
        rng = np.random.RandomState(self.seed)
        shape = self.shape
        doc_idx = arrays["doc_idx"]
        per_epoch = self.documents[1] - self.documents[0]
        for epoch in range(shape.num_epochs):
            # Epoch by epoch, so that memory holds the documents of one epoch only.
            doc_idx[epoch * per_epoch : (epoch + 1) * per_epoch] = np.arange(*self.documents)
        shuffle_parts(
            doc_idx, len(doc_idx) - per_epoch if shape.separate_last_epoch else len(doc_idx), rng
        )

        index_helpers.sample_index(
            self.indexed.sizes, doc_idx, self.seq_length, arrays["sample_idx"]
        )

        shuffle_idx = arrays["shuffle_idx"]
        # Filled in chunks. One arange of all samples would need as much memory as the array.
        for start in range(0, len(shuffle_idx), _CHUNK):
            stop = min(start + _CHUNK, len(shuffle_idx))
            shuffle_idx[start:stop] = np.arange(start, stop)
        shuffle_parts(
            shuffle_idx,
            shape.samples_before_last_epoch if shape.separate_last_epoch else len(shuffle_idx),
            rng,
        )


def choose_signed_type(largest: int) -> type:
    """Return int32 if it holds `largest`, else int64."""
    if largest <= np.iinfo(np.int32).max:
        return np.int32
    return np.int64


def shuffle_parts(array: NDArray, border: int, rng: np.random.RandomState) -> None:
    """Shuffle [0, border) and then the rest separately.

    Both are shuffled in place, so that a memory-mapped array needs no memory.
    """
    shuffle_in_place(array[:border], rng)
    if border < len(array):
        shuffle_in_place(array[border:], rng)


def count_tokens(indexed: IndexedDataset, documents: tuple[int, int]) -> int:
    """Return the number of tokens of the documents [first, last)."""
    first, last = documents
    return sum(
        int(indexed.sizes[at : min(at + _CHUNK, last)].sum(dtype=np.int64))
        for at in range(first, last, _CHUNK)
    )


def check_large_enough(
    prefix: str, documents: tuple[int, int], tokens: int, seq_length: int
) -> None:
    """Check that documents fill at least one sample.

    Raises:
        DataError: they hold fewer than seq_length + 1 tokens.
    """
    if tokens < seq_length + 1:
        raise DataError(
            f"documents {documents[0]} to {documents[1]} of {prefix} hold {tokens} tokens, fewer "
            f"than one sample: --seq-length {seq_length} needs {seq_length + 1}. Use more data, "
            "another --split, or shorter sequences."
        )
