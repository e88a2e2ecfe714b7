"""Sources of batches: `state()`, `load(state)`, `advance(samples)` and `read_batch(batch_size)`.

Invariant: what `read_batch` returns is a function of the state, the configuration and the rank's
coordinate. Threads do not influence it, nor does the way in which the position was reached. All
ranks together read the same samples whatever their number. The position is one number. Resume,
skipping and rolling back therefore only set this number.
"""

import abc
import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError, DataError
from megatron.data.batches import Microbatch, compute_sample_positions, split_microbatches
from megatron.data.documents import DocumentRules
from megatron.data.indexed import IndexedDataset
from megatron.data.prefetch import Prefetcher
from megatron.data.registry import DatasetRegistry
from megatron.data.segments import History, RequestedData, Segment, make_first_segment

# Number of tokens of each data set whose ids are checked at the start. The ids of all tokens are
# checked when their batch is read.
_SCANNED_TOKENS = 1 << 20


@dataclasses.dataclass(frozen=True)
class BatchSlice:
    """The part of each batch that a rank reads."""

    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    vocab_size: int | None = None
    """An id that is not below it is a DataError. None disables the check."""
    document_rules: DocumentRules | None = None
    """Masks and positions that follow from document borders. None leaves samples as they are."""


@dataclasses.dataclass(frozen=True)
class _Request:
    """What identifies a batch. The prefetcher uses it as its key."""

    consumed: int
    batch_size: int
    seq_length: int


class _Source(abc.ABC):
    """Base class of the sources of training and evaluation samples.

    Subclasses define what happens on a resume and at the end of the data.
    """

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
            phases: What is requested, in order. All but training have one phase.
            registry: The data sets.
            batch_slice: The part of each batch that this rank reads.
            threads: Number of threads that read ahead.
        """
        self.name = name
        self._phases = tuple(phases)
        self._registry = registry
        self._batch_slice = batch_slice
        self._consumed = 0
        # Opened late, because a resume replaces the order before it is used.
        self._history: History | None = None
        self._prepared = False
        self._prefetcher: Prefetcher[_Request, list[Microbatch]] = Prefetcher(self._read, threads)

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks together have read or skipped."""
        return self._consumed

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
            "segments": [segment.to_json() for segment in self.history.segments],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the order that the state records cannot be rebuilt any more.
        """
        # Batches that were read ahead belong to the old position and the old order.
        self._prefetcher.discard()
        self._prepared = False
        if state.get("stream") is not None:
            raise DataError(
                f"{self.name}: the checkpoint was trained on data with --dataset-format. Resume "
                "with these data, or start a new run from its weights with --finetune and another "
                "--save."
            )
        if not state["segments"]:
            raise DataError(
                f"{self.name}: the checkpoint was trained on --mock-data; resume with it, or start "
                "a new run from these weights with --finetune and another --save"
            )
        self._consumed = int(state["consumed_samples"])
        recorded = History(
            [Segment.from_json(record) for record in state["segments"]], self._registry
        )
        self._history = self._keep_notes(self._resume(recorded))

    def advance(self, samples: int) -> None:
        """Skip samples without reading them."""
        self._consumed += samples

    def read_batch(self, batch_size: int, seq_length: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the next global batch, in order.

        Args:
            batch_size: Samples of all ranks.
            seq_length: Sequences are truncated to it. None means the full sequence length.

        Raises:
            DataError: the data end before the batch does, or a token id is outside the vocabulary.
        """
        # All phases have the same sequence length.
        full = self._phases[0].seq_length
        if seq_length is None:
            length = full
        else:
            length = seq_length
        assert 0 < length <= full, f"sequence length {length} is not in 1 to {full}"
        # The reading threads use the order. They must not start before its indices are open.
        self.prepare()
        request = _Request(self._consumed, batch_size, length)
        if not self._has_samples_for(request):
            raise DataError(
                f"a batch of {request.batch_size} samples that starts at sample "
                f"{request.consumed} reaches past the {self.history.end} training samples of the "
                "data order. Raise --train-samples or --train-iters."
            )
        microbatches = self._prefetcher.take(request, self._guess_requests(request))
        # Only after success, so that a failed read does not move the position.
        self._consumed += batch_size
        return microbatches

    @property
    def fingerprints(self) -> dict[str, str]:
        """Nothing, because all data sets are in the registry."""
        return {}

    def take_notes(self) -> list[str]:
        """Return nothing, because all messages are in the registry."""
        return []

    def close(self) -> None:
        """Stop the reading threads."""
        self._prefetcher.close()

    def _guess_requests(self, request: _Request) -> Iterable[_Request]:
        """Yield the requests that follow if batch size and sequence length stay as they are."""
        for ahead in range(1, 1 + self._prefetcher.threads):
            guess = dataclasses.replace(
                request, consumed=request.consumed + ahead * request.batch_size
            )
            # A guess past the end of the data would fail in its thread.
            if self._has_samples_for(guess):
                yield guess

    def _read(self, request: _Request) -> list[Microbatch]:
        """Read one batch. The reading threads call this method, so it must not change state."""
        batch_slice = self._batch_slice
        positions = compute_sample_positions(
            request.consumed,
            request.batch_size,
            batch_slice.dp_rank,
            batch_slice.dp_size,
            batch_slice.micro_batch_size,
        )
        # Flatten the positions in the order of the microbatches, which split_microbatches expects.
        positions = self._wrap_around(positions.reshape(-1))
        samples = np.empty((len(positions), request.seq_length + 1), np.int64)
        self._fill(positions, samples)
        if batch_slice.vocab_size is not None:
            self._check_vocabulary(samples, positions, batch_slice.vocab_size)
        microbatches = split_microbatches(samples, batch_slice.micro_batch_size)
        if batch_slice.document_rules is not None:
            microbatches = [
                batch_slice.document_rules.apply(microbatch) for microbatch in microbatches
            ]
        return microbatches

    def _fill(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Write the tokens of the samples at these positions into `samples`, a row for each."""
        self.history.read(positions, samples)

    def _check_vocabulary(
        self, samples: NDArray[np.int64], positions: NDArray[np.int64], vocab_size: int
    ) -> None:
        """Raise a DataError that names the document if an id is outside the vocabulary."""
        # Seen as unsigned, a negative id is huge. One comparison finds both kinds of wrong ids.
        unsigned = samples.view(np.uint64)
        if int(unsigned.max()) >= vocab_size:
            row, column = (int(value) for value in np.argwhere(unsigned >= vocab_size)[0])
            # Locating the document is slow, but it happens only before an error.
            with self._registry.guarded():
                dataset, sample = self.history.locate(int(positions[row]))
                document, _ = dataset.locate(sample, column)
            raise make_vocabulary_error(
                dataset.indexed.prefix, document, int(samples[row, column]), vocab_size
            )

    def _keep_notes(self, result: tuple[History, list[str]]) -> History:
        """Keep the messages for the user, and return the history."""
        history, notes = result
        self._registry.notes.extend(f"{self.name}: {note}" for note in notes)
        return history

    @abc.abstractmethod
    def _resume(self, recorded: History) -> tuple[History, list[str]]:
        """Return the order that continues a recorded one, and messages about what changed."""

    def _wrap_around(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions that are read. Training reads each position as it is."""
        return positions

    def _has_samples_for(self, request: _Request) -> bool:
        """Return whether the order has the samples of a request."""
        return True


class GPTTrainSource(_Source):
    """Source of training samples. Each sample is read once, in the order of the segments."""

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
            self.history.extend_endless(self._phases[-1], self._consumed + batch_size)
        )
        self._prepared = False
        self.prepare()

    def _resume(self, recorded: History) -> tuple[History, list[str]]:
        number = sum(phase.start_sample <= self._consumed for phase in self._phases)
        return recorded.resume(self._consumed, self._phases[number - 1 :])

    def _has_samples_for(self, request: _Request) -> bool:
        return request.consumed + request.batch_size <= self.history.end


class GPTValidSource(_Source):
    """Source of evaluation samples.

    An evaluation continues where the last one ended. After the last sample it starts again at the
    first one.
    """

    def _resume(self, recorded: History) -> tuple[History, list[str]]:
        (requested,) = self._phases
        if requested.can_continue(recorded.segments[-1]):
            # The order may have been made for another number of samples. It is kept, since the same
            # samples in the same order keep loss curves comparable. Reading wraps around.
            return (recorded, [])
        return History([make_first_segment(requested)], self._registry), [
            "data, --seed or --seq-length have changed; the set is shuffled again"
        ]

    def _wrap_around(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        # Evaluation data never end. The first sample follows the last one.
        return positions % self.history.end


class MockSource(_Source):
    """Source of synthetic samples, for --mock-data.

    The ids of a sample increase by 1. The first one follows from the seed, the name of the set and
    the position. A model learns this quickly, so a falling loss shows that training works.
    """

    def __init__(
        self, name: str, seed: int, seq_length: int, batch_slice: BatchSlice, threads: int
    ) -> None:
        """Create a source. No file is read.

        Raises:
            ConfigError: the size of the vocabulary is not known.
        """
        requested = RequestedData((), seed, seq_length, 0)
        super().__init__(name, [requested], DatasetRegistry(None), batch_slice, threads)
        if batch_slice.vocab_size is None:
            raise ConfigError("--mock-data has no documents, so there is no text to show.")
        self._vocab_size = batch_slice.vocab_size

    def must_extend(self, batch_size: int) -> bool:
        """Return False. Synthetic data never end."""
        return False

    def extend(self, batch_size: int) -> None:
        """Do nothing. Synthetic data never end."""

    def prepare(self) -> None:
        """Do nothing. There is no index."""

    def state(self) -> dict[str, Any]:
        """Return the position. There are no segments."""
        return {"consumed_samples": self._consumed, "segments": []}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state is that of real data.
        """
        if state["segments"] or state.get("stream") is not None:
            raise DataError(
                f"{self.name}: the checkpoint was trained on real data, and --mock-data would go "
                "on with synthetic tokens; remove --mock-data, or start a new run with --finetune "
                "and another --save"
            )
        self._prefetcher.discard()
        self._consumed = int(state["consumed_samples"])

    def _fill(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        steps = np.arange(samples.shape[1], dtype=np.int64)
        key = [self._phases[0].seed, zlib.crc32(self.name.encode())]
        for row, position in zip(samples, positions, strict=True):
            first = np.random.default_rng([*key, int(position)]).integers(self._vocab_size)
            row[:] = (first + steps) % self._vocab_size

    def _resume(self, recorded: History) -> tuple[History, list[str]]:
        raise AssertionError("`load` is overridden, so this method is never called")


class Source(Protocol):
    """What the training loop needs of a source."""

    name: str

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks together have read or skipped."""
        ...

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digest of each data set that is not in the registry, by its name."""
        ...

    def prepare(self) -> None:
        """Build or open all indices now."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values. All ranks call it together."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state belongs to other data.
        """
        ...

    def advance(self, samples: int) -> None:
        """Skip samples without reading them."""
        ...

    def read_batch(self, batch_size: int, seq_length: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the next global batch, in order.

        Raises:
            DataError: the data end, are damaged, or have an id outside the vocabulary.
        """
        ...

    def take_notes(self) -> list[str]:
        """Return messages for the user since the last call that are not in the registry."""
        ...

    def close(self) -> None:
        """Stop the reading threads."""
        ...


class TrainSource(Source, Protocol):
    """What the training loop needs of the source of training samples."""

    def must_extend(self, batch_size: int) -> bool:
        """Return whether endless data must be extended before the next batch."""
        ...

    def extend(self, batch_size: int) -> None:
        """Add passes over endless data, so that the next batch is covered.

        Raises:
            DataError: an index cannot be built.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Sources:
    """All sources of a run. `train` is None if no training samples are requested."""

    train: TrainSource | None
    valid: dict[str, Source]
    test: dict[str, Source]
    registry: DatasetRegistry

    @property
    def all(self) -> list[Source]:
        """All sources, training first."""
        return [*([self.train] if self.train else []), *self.valid.values(), *self.test.values()]

    def prepare(self) -> None:
        """Build or open every index now.

        Call it after `load` and before the first step. Any number of ranks may call it at the same
        time. One process builds, and the others wait for its file lock.

        Raises:
            DataError: see `_Source.prepare`.
        """
        for source in self.all:
            source.prepare()

    def take_notes(self) -> list[str]:
        """Return messages for the user since the last call, each once.

        They report changed orders, rebuilt caches and empty splits.
        """
        # Several sources may use the same cache or files and report the same about it.
        notes = list(self.registry.notes)
        self.registry.notes.clear()
        for source in self.all:
            notes += source.take_notes()
        return list(dict.fromkeys(notes))

    def state(self) -> dict[str, Any]:
        """Return the state of all sources, as JSON values."""
        return {
            "train": None if self.train is None else self.train.state(),
            "valid": {name: source.state() for name, source in self.valid.items()},
            "test": {name: source.state() for name, source in self.test.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state. Sources that it does not contain start at their first sample.

        Raises:
            DataError: a recorded order cannot be rebuilt any more.
        """
        if self.train is not None and state.get("train") is not None:
            self.train.load(state["train"])
        for kind, sources in (("valid", self.valid), ("test", self.test)):
            for name, source in sources.items():
                # The configuration may have added sets since the state was recorded.
                if name in state.get(kind, {}):
                    source.load(state[kind][name])

    def close(self) -> None:
        """Stop all threads, including the one of the background checks."""
        self.registry.background.close()
        for source in self.all:
            source.close()


def check_vocabulary(indexed: IndexedDataset, vocab_size: int | None) -> None:
    """Check the ids of the first 2^20 tokens of a data set.

    Args:
        indexed: The data set.
        vocab_size: Every id must be below it. None disables the check.

    Raises:
        DataError: an id is outside the vocabulary. The message names id and document.
    """
    tokens = indexed.tokens[:_SCANNED_TOKENS]
    if (
        vocab_size is None
        or tokens.size == 0
        or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0)
    ):
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    # pointers is sorted. The last sequence that begins at or before the byte holds the token.
    document = int(np.searchsorted(indexed.pointers, at * indexed.dtype.itemsize, side="right")) - 1
    raise make_vocabulary_error(indexed.prefix, document, int(tokens[at]), vocab_size)


def make_vocabulary_error(prefix: str, document: int, token: int, vocab_size: int) -> DataError:
    """Return the error for a token id that is outside the vocabulary."""
    return DataError(
        f"{prefix}: document {document} holds the token id {token}, but the vocabulary has "
        f"{vocab_size} entries (ids 0 to {vocab_size - 1}). The data was made with another "
        "tokenizer. Give that tokenizer, or preprocess the data again."
    )
