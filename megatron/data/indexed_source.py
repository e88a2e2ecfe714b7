"""Sources of samples from indexed data sets (.bin and .idx)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.json_record import restore
from megatron.data.batches import Microbatch
from megatron.data.indexed import IndexedDataset
from megatron.data.position_source import PositionSource, make_vocabulary_error
from megatron.data.registry import DatasetRegistry
from megatron.data.segments import History, RequestedData, Segment, make_first_segment
from megatron.data.source import BatchSlice

# Number of tokens of each data set whose ids are checked at the start. The ids of all tokens are
# checked when their batch is read.
_SCANNED_TOKENS = 1 << 20
# Of each data set at the start. One document with the right end is enough to accept the tokenizer.
_CHECKED_DOCUMENTS = 1000


class IndexedSource(PositionSource):
    """Source of training samples. Each sample is read once, in the order of the segments."""

    kind = "indexed"
    has_marks = True

    def __init__(
        self,
        name: str,
        phases: Sequence[RequestedData],
        registry: DatasetRegistry,
        batch_slice: BatchSlice,
        threads: int,
    ) -> None:
        """Remember what is requested. Data orders are opened by `prepare` or at the first use.

        Args:
            name: Name of the source in messages.
            phases: What is requested, in order. All but training have one phase. All have the same
                sequence length.
            registry: The data sets.
            batch_slice: The part of each batch that this rank reads.
            threads: Number of threads that read ahead.
        """
        super().__init__(name, phases[0].seq_length, batch_slice, threads)
        self._phases = tuple(phases)
        self._registry = registry
        # Opened late, because a resume replaces the order before it is used.
        self._history: History | None = None
        self._prepared = False

    @property
    def history(self) -> History:
        """The order of samples. The first access builds its index if no cache has it."""
        if self._history is None:
            self._history = self._keep_notes(History.start(self._phases, self._registry))
        return self._history

    def prepare(self) -> None:
        """Build or open all indices now, in this thread.

        Raises:
            DataError: the data are missing, damaged or have changed, or an index cannot be built.
        """
        if not self._prepared:
            self.history.prepare(self._consumed)
            self._prepared = True

    def state(self) -> dict[str, Any]:
        """Return the position and the segments of the order, as JSON values."""
        return {
            "consumed_samples": self._consumed,
            "segments": [dataclasses.asdict(segment) for segment in self.history.segments],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the order that the state records cannot be rebuilt any more.
        """
        super().load(state)
        self._prepared = False
        recorded = History(
            [restore(Segment, record) for record in state["segments"]], self._registry
        )
        self._history = self._keep_notes(self._resume(recorded))

    def fill(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Write the tokens of samples. See `PositionSource.fill`."""
        self.history.read(self._wrap_around(positions), samples)

    def describe_place(self, position: int, column: int) -> str:
        """Return the document of a token, for a message about it."""
        # Locating the document is slow, but it happens only before an error.
        (place,) = self._wrap_around(np.array([position], np.int64))
        with self._registry.guarded():
            dataset, sample = self.history.locate(int(place))
            document, _ = dataset.locate(sample, column)
        return f"{dataset.indexed.prefix}: document {document}"

    def _keep_notes(self, history: History) -> History:
        """Move the messages for the user to the registry, and return the history."""
        self._registry.notes.extend(f"{self.name}: {note}" for note in history.notes)
        history.notes.clear()
        return history

    def _wrap_around(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions that are read. Training reads each position as it is."""
        return positions

    def must_extend(self, batch_size: int) -> bool:
        """Return whether endless data must be extended before the next batch."""
        return self._phases[-1].endless and self._consumed + batch_size > self.history.end

    def extend(self, batch_size: int) -> None:
        """Add passes over endless data, so that the next batch is covered.

        All ranks add the same ones, because they follow from the order so far.

        Raises:
            DataError: an index cannot be built.
        """
        self._history = self._keep_notes(
            self.history.extend(self._phases[-1], self._consumed + batch_size)
        )
        self._prepared = False
        self.prepare()

    def has_samples(self, end: int) -> bool:
        """Return whether the order has all samples before `end`."""
        return end <= self.history.end

    def read_batch(self, batch_size: int, seq_length: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the next global batch. See `Source.read_batch`.

        Raises:
            DataError: the data end before the batch does, or a token id is outside the vocabulary.
        """
        self.prepare()
        if not self.has_samples(self._consumed + batch_size):
            raise DataError(
                f"a batch of {batch_size} samples that starts at sample {self._consumed} reaches "
                f"past the {self.history.end} training samples of the data order. Raise "
                "--train-samples or --train-iters."
            )
        return super().read_batch(batch_size, seq_length)

    def _resume(self, recorded: History) -> History:
        """Return the order that continues a recorded one."""
        number = sum(phase.start_sample <= self._consumed for phase in self._phases)
        return recorded.resume(self._consumed, self._phases[number - 1 :])


class EvaluationSource(IndexedSource):
    """Source of evaluation samples.

    An evaluation continues where the last one ended. After the last sample it starts again at the
    first one.
    """

    def _resume(self, recorded: History) -> History:
        (requested,) = self._phases
        if requested.can_continue(recorded.segments[-1]):
            # The order may have been made for another number of samples. It is kept, since the same
            # samples in the same order keep loss curves comparable. Reading wraps around.
            return recorded
        changed = "data, --seed or --seq-length have changed; the set is shuffled again"
        return History([make_first_segment(requested)], self._registry, [changed])

    def has_samples(self, end: int) -> bool:
        """Return True, because evaluation data never end."""
        return True

    def _wrap_around(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        # Evaluation data never end. The first sample follows the last one.
        return positions % self.history.end


def check_vocabulary(indexed: IndexedDataset, vocab_size: int | None) -> None:
    """Check the ids of the first 2^20 tokens of a data set.

    Args:
        indexed: The data set.
        vocab_size: Every id must be below it. None disables the check.

    Raises:
        DataError: an id is outside the vocabulary. The message names id and document.
    """
    tokens = indexed.tokens[:_SCANNED_TOKENS]
    if indexed.is_packed:
        tokens = np.maximum(tokens, ~tokens)
    if (
        vocab_size is None
        or tokens.size == 0
        or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0)
    ):
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    # pointers is sorted. The last sequence that begins at or before the byte holds the token.
    document = int(np.searchsorted(indexed.pointers, at * indexed.dtype.itemsize, side="right")) - 1
    raise make_vocabulary_error(
        f"{indexed.prefix}: document {document}", int(tokens[at]), vocab_size
    )


def check_documents_end(indexed: IndexedDataset, eod: int) -> None:
    """Check that some of the first documents end with `eod`.

    Without this check a wrong tokenizer would find no bounds, and no error would be reported.

    Raises:
        DataError: none of the documents that were checked ends with it.
    """
    lasts = indexed.document_offsets[1 : _CHECKED_DOCUMENTS + 1] - 1
    # Empty documents and sequences have no last token.
    lasts = lasts[(lasts >= 0) & (indexed.sizes[lasts] > 0)]
    ends = indexed.pointers[lasts] // indexed.dtype.itemsize + indexed.sizes[lasts] - 1
    if len(ends) and not np.any(indexed.tokens[ends] == eod):
        raise DataError(
            f"{indexed.prefix}: none of the first {len(ends)} documents ends with the tokenizer's "
            f"end-of-document id {eod}, so --reset-position-ids, --reset-attention-mask and "
            "--eod-mask-loss would have no effect. Give the tokenizer that the data was made with, "
            "preprocess the data with --append-eod, or leave these flags out."
        )
