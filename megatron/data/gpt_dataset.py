"""Documents -> samples of seq_length + 1 tokens -> shuffled samples: one indexed data set, as GPT training reads it.

Invariant: the order is a function of (documents, seq_length, seed, number of epochs, whether the last epoch stands apart), in
the bytes of the BigScience fork of Megatron-DeepSpeed. Legend: s seq_length, k samples asked for at once.

doc_idx holds the documents, repeated for the epochs and shuffled; sample_idx (index into doc_idx, offset) where each sample
begins, neighbours sharing one token; shuffle_idx the shuffled numbers of the samples.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatron.data import index_helpers
from megatron.data.cache import Arrays, IndexCache
from megatron.data.index_numpy import check_range
from megatron.data.indexed import IndexedDataset
from megatron.errors import DataError

_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class IndexShape:
    """How often the documents are repeated, and what that makes; derived from sizes alone, before anything is built."""

    num_epochs: int
    num_samples: int
    """Samples that the index covers: all that the epochs give, at least as many as were asked for."""
    separate_last_epoch: bool
    """The last epoch is used in part only, and is shuffled apart, so that no document is seen twice before all are seen once."""
    samples_before_last_epoch: int

    @classmethod
    def compute(cls, tokens_per_epoch: int, seq_length: int, num_samples: int) -> "IndexShape":
        epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
        total = (epochs * tokens_per_epoch - 1) // seq_length
        before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length if epochs > 1 else 0
        per_epoch = (tokens_per_epoch - 1) // seq_length
        separate = epochs > 1 and num_samples - before_last < int(0.95 * per_epoch)
        return cls(epochs, total, separate, before_last)


class GPTDataset:
    """Samples of the documents [first, last) of an indexed data set. `dataset[i]` is int64 [s + 1].

    Raises DataError where the documents do not fill one sample. Opening builds the index or takes it from the cache.
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
        self.indexed, self.documents, self.seq_length, self.seed = (
            indexed,
            documents,
            seq_length,
            seed,
        )
        self.tokens_per_epoch = count_tokens(indexed, documents)
        check_large_enough(indexed.prefix, documents, self.tokens_per_epoch, seq_length)
        self.shape = IndexShape.compute(self.tokens_per_epoch, seq_length, num_samples)
        arrays = cache.open("samples", self._make_key(), self._choose_shapes(), self._build)
        self.doc_idx, self.sample_idx, self.shuffle_idx = (
            arrays[name] for name in ("doc_idx", "sample_idx", "shuffle_idx")
        )

    def __len__(self) -> int:
        return self.shape.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        out = np.empty((1, self.seq_length + 1), np.int64)
        self.read(np.array([index], np.int64), np.zeros(1, np.int64), out)
        return out[0]

    def read(
        self, samples: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.int64]
    ) -> None:
        """out[rows[i]] = the first out.shape[1] <= s + 1 tokens of samples[i]; samples and rows are [k]. Releases the GIL.

        Raises RuntimeError where index or data name what does not exist: a file has changed since it was opened.
        """
        numbers = self.shuffle_idx[samples]
        check_range(numbers, self.shape.num_samples, "sample in shuffle_idx")
        starts = self.sample_idx[numbers].astype(np.int64)
        data = self.indexed
        index_helpers.gather_tokens(
            data.tokens, data.pointers, data.sizes, self.doc_idx, starts, rows, out
        )

    def locate(self, sample: int, column: int) -> tuple[int, int]:
        """(document, offset in it) of one token of a sample. Raises RuntimeError as `read`."""
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
            index, place = index + 1, place - size

    def _make_key(self) -> dict:
        return {
            "data": self.indexed.compute_fingerprint(),
            "documents": list(self.documents),
            "seq_length": self.seq_length,
            "seed": self.seed,
            "num_epochs": self.shape.num_epochs,
            "separate_last_epoch": self.shape.separate_last_epoch,
        }

    def _choose_shapes(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """32 bits while they are enough, as the reference has them; the limits are those of the values held."""
        first, last = self.documents
        repeated, samples = (last - first) * self.shape.num_epochs, self.shape.num_samples
        return {
            "doc_idx": (choose_signed_type(last - 1), (repeated,)),
            "sample_idx": (choose_signed_type(repeated - 1), (samples + 1, 2)),
            "shuffle_idx": (
                np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64,
                (samples,),
            ),
        }

    def _build(self, arrays: Arrays) -> None:
        """The draws from the random stream, in the reference's order: documents, then samples."""
        rng = np.random.RandomState(self.seed)
        shape, doc_idx = self.shape, arrays["doc_idx"]
        per_epoch = self.documents[1] - self.documents[0]
        for epoch in range(shape.num_epochs):
            doc_idx[epoch * per_epoch : (epoch + 1) * per_epoch] = np.arange(*self.documents)
        shuffle_parts(
            doc_idx, len(doc_idx) - per_epoch if shape.separate_last_epoch else len(doc_idx), rng
        )

        index_helpers.sample_index(
            self.indexed.sizes, doc_idx, self.seq_length, arrays["sample_idx"]
        )

        shuffle_idx = arrays["shuffle_idx"]
        for start in range(0, len(shuffle_idx), _CHUNK):
            stop = min(start + _CHUNK, len(shuffle_idx))
            shuffle_idx[start:stop] = np.arange(start, stop)
        shuffle_parts(
            shuffle_idx,
            shape.samples_before_last_epoch if shape.separate_last_epoch else len(shuffle_idx),
            rng,
        )


def choose_signed_type(largest: int) -> type:
    """int32 where it holds `largest`, else int64."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def shuffle_parts(array: NDArray, border: int, rng: np.random.RandomState) -> None:
    """Shuffle [0, border) and then, apart from it, the rest; in place, so that a memory-mapped array needs no memory."""
    rng.shuffle(array[:border])
    if border < len(array):
        rng.shuffle(array[border:])


def count_tokens(indexed: IndexedDataset, documents: tuple[int, int]) -> int:
    """Tokens of the documents [first, last)."""
    first, last = documents
    return sum(
        int(indexed.sizes[at : min(at + _CHUNK, last)].sum(dtype=np.int64))
        for at in range(first, last, _CHUNK)
    )


def check_large_enough(
    prefix: str, documents: tuple[int, int], tokens: int, seq_length: int
) -> None:
    """Raises DataError where the documents hold fewer tokens than one sample."""
    if tokens < seq_length + 1:
        raise DataError(
            f"documents {documents[0]} to {documents[1]} of {prefix} hold {tokens} tokens, fewer than one sample: --seq-length "
            f"{seq_length} needs {seq_length + 1}. Take more data, another --split, or shorter sequences."
        )
