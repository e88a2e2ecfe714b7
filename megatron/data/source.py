"""Where batches come from: `state()`, `load(state)`, `advance(samples)`, `read_batch(batch_size)`.

Invariant: what `read_batch` returns is a function of the state, the configuration and the rank's place; neither threads nor the number
of ranks nor the way the position was reached take part. The position is one number, hence resume, skipping and rolling back too.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.data.batches import Microbatch, compute_sample_positions, split_microbatches
from megatron.data.building import Say
from megatron.data.cache import WAIT_SECONDS, say_to_stderr
from megatron.data.documents import DocumentRules, check_documents_end
from megatron.data.indexed import IndexedDataset
from megatron.data.prefetch import Prefetcher
from megatron.data.segments import (
    DatasetRegistry,
    History,
    RequestedData,
    Segment,
    make_first_segment,
    open_mixture,
)
from megatron.data.splits import NamedMixture, find_evaluation_mixtures, find_train_mixture
from megatron.errors import ConfigError, DataError

_SCANNED_TOKENS = 1 << 20  # of each data set at the start; the rest is checked as it is read


@dataclasses.dataclass(frozen=True)
class BatchSlice:
    """The rank's part of each batch."""

    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    vocab_size: int | None = None
    """Ids at or beyond it are a DataError; None does not check."""
    document_rules: DocumentRules | None = None


@dataclasses.dataclass(frozen=True)
class _Request:
    consumed: int
    batch_size: int
    seq_length: int


class _Source(abc.ABC):
    """What training and evaluation share; they differ in what a resume and the end of the data mean."""

    def __init__(
        self,
        name: str,
        requested: RequestedData,
        registry: DatasetRegistry,
        batch_slice: BatchSlice,
        threads: int,
    ) -> None:
        self.name, self._requested, self._registry, self._batch_slice = (
            name,
            requested,
            registry,
            batch_slice,
        )
        self._consumed = 0
        self._history: History | None = None
        self._prepared = False
        self._prefetcher: Prefetcher[_Request, list[Microbatch]] = Prefetcher(self._read, threads)

    @property
    def consumed_samples(self) -> int:
        """Samples of all ranks that lie behind."""
        return self._consumed

    @property
    def history(self) -> History:
        """The order of samples; opening it builds its index where no cache has it."""
        if self._history is None:
            self._history = self._keep_notes(
                History([make_first_segment(self._requested)], self._registry).extend(
                    self._requested
                )
            )
        return self._history

    def prepare(self) -> None:
        """Build or open all indices now, in this thread. Raises DataError."""
        if not self._prepared:
            self.history.prepare(self._consumed)
            self._prepared = True

    def state(self) -> dict[str, Any]:
        """JSON: the position, and the segments of the order."""
        return {
            "consumed_samples": self._consumed,
            "segments": [segment.to_json() for segment in self.history.segments],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises DataError where the order that it records cannot be had any more."""
        self._prefetcher.discard()
        self._prepared = False
        self._consumed = int(state["consumed_samples"])
        recorded = History(
            [Segment.from_json(record) for record in state["segments"]], self._registry
        )
        self._history = self._keep_notes(self._resume(recorded))

    def advance(self, samples: int) -> None:
        """Pass over samples without reading them."""
        self._consumed += samples

    def read_batch(self, batch_size: int, seq_length: int | None = None) -> list[Microbatch]:
        """This rank's microbatches of the next global batch, in order; sequences cut to `seq_length` where it is given.

        Raises DataError at the end of the data, and for a token id beyond the vocabulary.
        """
        full = self._requested.seq_length
        length = full if seq_length is None else seq_length
        assert 0 < length <= full, f"sequence length {length} is not in 1 to {full}"
        self.prepare()
        request = _Request(self._consumed, batch_size, length)
        if not self._has_samples_for(request):
            raise DataError(
                f"a batch of {request.batch_size} samples at {request.consumed} reaches past the {self.history.end} training "
                "samples that the order was made for; raise --train-samples or --train-iters."
            )
        microbatches = self._prefetcher.take(request, self._guess_requests(request))
        self._consumed += batch_size
        return microbatches

    def close(self) -> None:
        """End the reading threads."""
        self._prefetcher.close()

    def _guess_requests(self, request: _Request) -> Iterable[_Request]:
        for ahead in range(1, 1 + self._prefetcher.threads):
            guess = dataclasses.replace(
                request, consumed=request.consumed + ahead * request.batch_size
            )
            if self._has_samples_for(guess):
                yield guess

    def _read(self, request: _Request) -> list[Microbatch]:
        batch_slice = self._batch_slice
        positions = compute_sample_positions(
            request.consumed,
            request.batch_size,
            batch_slice.dp_rank,
            batch_slice.dp_size,
            batch_slice.micro_batch_size,
        )
        positions = self._wrap_around(positions.reshape(-1))
        samples = np.empty((len(positions), request.seq_length + 1), np.int64)
        self.history.read(positions, samples)
        if batch_slice.vocab_size is not None:
            self._check_vocabulary(samples, positions, batch_slice.vocab_size)
        microbatches = split_microbatches(samples, batch_slice.micro_batch_size)
        if batch_slice.document_rules is not None:
            microbatches = [
                batch_slice.document_rules.apply(microbatch) for microbatch in microbatches
            ]
        return microbatches

    def _check_vocabulary(
        self, samples: NDArray[np.int64], positions: NDArray[np.int64], vocab_size: int
    ) -> None:
        unsigned = samples.view(np.uint64)  # a negative id becomes a huge one
        if int(unsigned.max()) >= vocab_size:
            row, column = (int(value) for value in np.argwhere(unsigned >= vocab_size)[0])
            with self._registry.guarded():
                dataset, sample = self.history.locate(int(positions[row]))
                document, _ = dataset.locate(sample, column)
            raise make_vocabulary_error(
                dataset.indexed.prefix, document, int(samples[row, column]), vocab_size
            )

    def _keep_notes(self, result: tuple[History, list[str]]) -> History:
        history, notes = result
        self._registry.notes.extend(f"{self.name}: {note}" for note in notes)
        return history

    @abc.abstractmethod
    def _resume(self, recorded: History) -> tuple[History, list[str]]:
        """What a recorded order becomes under this configuration, and what changed, in words."""

    def _wrap_around(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions

    def _has_samples_for(self, request: _Request) -> bool:
        """Whether there are that many samples; evaluation's never end."""
        return True


class GPTTrainSource(_Source):
    """Each sample once, in the order of the segments."""

    def _resume(self, recorded: History) -> tuple[History, list[str]]:
        return recorded.resume(self._consumed, self._requested)

    def _has_samples_for(self, request: _Request) -> bool:
        return request.consumed + request.batch_size <= self.history.end


class GPTValidSource(_Source):
    """Goes on where the last evaluation ended, and from the beginning again past the end of its samples."""

    def _resume(self, recorded: History) -> tuple[History, list[str]]:
        if self._requested.can_continue(recorded.segments[-1]):
            return (
                recorded,
                [],
            )  # made for another number of samples, perhaps: it wraps around, and curves stay comparable
        return History([make_first_segment(self._requested)], self._registry), [
            "data, --seed or --seq-length have changed; the set is shuffled anew"
        ]

    def _wrap_around(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions % self.history.end


@dataclasses.dataclass(frozen=True)
class Sources:
    """All that a run reads; `train` is None where no training samples are asked for."""

    train: GPTTrainSource | None
    valid: dict[str, GPTValidSource]
    test: dict[str, GPTValidSource]
    registry: DatasetRegistry

    @property
    def all(self) -> list[GPTTrainSource | GPTValidSource]:
        return [*([self.train] if self.train else []), *self.valid.values(), *self.test.values()]

    def prepare(self) -> None:
        """Build or open every index now; call it after `load`, before the first step. Any number of ranks may call it at once:
        one builds, the others wait for the file lock. Raises DataError."""
        for source in self.all:
            source.prepare()

    def take_notes(self) -> list[str]:
        """What happened since the last call and the user should read: changed orders, rebuilt caches, empty splits."""
        notes = list(dict.fromkeys(self.registry.notes))
        self.registry.notes.clear()
        return notes

    def state(self) -> dict[str, Any]:
        """JSON of all sources."""
        return {
            "train": None if self.train is None else self.train.state(),
            "valid": {name: source.state() for name, source in self.valid.items()},
            "test": {name: source.state() for name, source in self.test.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state; sets that it does not know begin. Raises DataError."""
        if self.train is not None and state.get("train") is not None:
            self.train.load(state["train"])
        for kind, sources in (("valid", self.valid), ("test", self.test)):
            for name, source in sources.items():
                if name in state.get(kind, {}):
                    source.load(state[kind][name])

    def close(self) -> None:
        """End all threads, those of the background checks too."""
        self.registry.background.close()
        for source in self.all:
            source.close()


def count_evaluation_samples(
    train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
) -> tuple[int, int]:
    """(validation, test) samples of a run; global_batch_size is the final one of a ramp."""
    return (
        train_iters // eval_interval + 1
    ) * eval_iters * global_batch_size, eval_iters * global_batch_size


def build_sources(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    batch_slice: BatchSlice,
    say: Say = say_to_stderr,
    wait_seconds: float = WAIT_SECONDS,
) -> Sources:
    """Open the data sets and check them; indices are built by `prepare`, or at the first use.

    `say` takes what must be known while an index is built; `wait_seconds` is the longest time to wait for another builder.
    Raises ConfigError for a wrong grammar or no data at all, DataError for data that is missing, damaged, too small, or not of
    this vocabulary.
    """
    registry = DatasetRegistry(data.data_cache_path, say=say, wait_seconds=wait_seconds)

    def make_source(
        kind: Callable[..., Any], mixture: NamedMixture, num_samples: int, threads: int
    ) -> Any:
        requested = open_mixture(mixture, seed, seq_length, num_samples, registry)
        if requested is None:
            return None
        for part in requested.parts:
            check_vocabulary(registry.open(part.prefix), batch_slice.vocab_size)
            if batch_slice.document_rules is not None:
                check_documents_end(registry.open(part.prefix), batch_slice.document_rules.eod)
        return kind(mixture.name, requested, registry, batch_slice, threads)

    train = None
    if train_samples > 0:
        mixture = find_train_mixture(data)
        if mixture is None:
            raise ConfigError(
                "no training data is given; use --data-path or --train-weighted-split-paths."
            )
        train = make_source(GPTTrainSource, mixture, train_samples, data.num_workers)
        if train is None:
            raise DataError(
                f"the split of {', '.join(part.prefix for part in mixture.parts)} leaves no document for training."
            )
    evaluated: list[dict[str, GPTValidSource]] = []
    for which, num_samples in (("valid", valid_samples), ("test", test_samples)):
        mixtures = find_evaluation_mixtures(data, which) if num_samples > 0 else ()  # type: ignore[arg-type]
        sources = {
            mixture.name: make_source(GPTValidSource, mixture, num_samples, data.valid_num_workers)
            for mixture in mixtures
        }
        evaluated.append({name: built for name, built in sources.items() if built is not None})
    return Sources(train, evaluated[0], evaluated[1], registry)


def check_vocabulary(indexed: IndexedDataset, vocab_size: int | None) -> None:
    """Scan the first 2^20 tokens. Raises DataError naming id, document and vocabulary size."""
    tokens = indexed.tokens[:_SCANNED_TOKENS]
    if (
        vocab_size is None
        or tokens.size == 0
        or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0)
    ):
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    document = int(np.searchsorted(indexed.pointers, at * indexed.dtype.itemsize, side="right")) - 1
    raise make_vocabulary_error(indexed.prefix, document, int(tokens[at]), vocab_size)


def make_vocabulary_error(prefix: str, document: int, token: int, vocab_size: int) -> DataError:
    return DataError(
        f"{prefix}: document {document} holds the token id {token}, but the vocabulary has {vocab_size} entries (ids 0 "
        f"to {vocab_size - 1}). "
        "The data was made with another tokenizer; give that one, or preprocess the data again."
    )
