"""The base class of sources whose position is one number of samples.

It chooses the samples of this rank, reads ahead, checks token ids and makes microbatches. A
subclass only returns the tokens of a sample by its number.

`Prefetcher` reads ahead in threads: while a step computes, the next batches are read. The caller
guesses which requests come next. Invariant: what `take` returns does not depend on these guesses. A
wrong guess only wastes a read. Threads are used instead of processes. A fork could copy a locked
lock, and reading releases the GIL anyway.
"""

import abc
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.data.batches import (
    Microbatch,
    apply_marks,
    compute_sample_positions,
    split_microbatches,
    take_marks,
)
from megatron.data.source import BatchSlice, LeftOut

Request = TypeVar("Request")
Result = TypeVar("Result")


class Prefetcher(Generic[Request, Result]):
    """Reads requests in `threads` threads. With 0 threads, `take` reads in the caller's thread."""

    def __init__(self, read: Callable[[Request], Result], threads: int) -> None:
        """Remember the reader. Threads are started by the first guess."""
        self._read = read
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[Request, Future[Result]]] = deque()

    def take(self, request: Request, guesses: Iterable[Request] = ()) -> Result:
        """Return the result of a request, and start to read the guesses for the next ones.

        Args:
            request: What the caller needs now.
            guesses: Requests that may follow, the most likely first.

        Raises:
            Exception: whatever the reader raises, in its thread or here.
        """
        if self.is_ahead(request):
            waiting = self._ahead.popleft()[1]
        else:
            # Nothing was read ahead, or the guesses were wrong, as when the batch size changes.
            self.discard()
            waiting = None
        if self.threads:
            # Submitted before the wait below, so that the threads do not become idle meanwhile.
            self._look_ahead(list(guesses)[: self.threads])
        if waiting is None:
            return self._read(request)
        return waiting.result()

    @property
    def has_next(self) -> bool:
        """Whether the first batch that was guessed is read."""
        return bool(self._ahead) and self._ahead[0][1].done()

    def read(self, request: Request) -> None:
        """Read a request, unless it is being read ahead, and wait for it. `take` returns it.

        No other method may be called meanwhile, except `close`.
        """
        if not self.is_ahead(request):
            self._look_ahead([request])
        wait([self._ahead[0][1]])

    def is_ahead(self, request: Request) -> bool:
        """Return whether a request is the next one that is being read ahead."""
        return bool(self._ahead) and self._ahead[0][0] == request

    def discard(self) -> None:
        """Forget what was read ahead."""
        # A read that runs cannot be cancelled. Its result is dropped when it is done.
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Wait for the reads that have already started, and stop the threads."""
        self.discard()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _look_ahead(self, guesses: Sequence[Request]) -> None:
        """Submit new guesses, and drop the last requests if they are no longer guessed."""
        while self._ahead and self._ahead[-1][0] not in guesses:
            self._ahead.pop()[1].cancel()
        under_way = [request for request, _ in self._ahead]
        for guess in guesses:
            if guess not in under_way:
                self._pool = self._pool or ThreadPoolExecutor(
                    max(1, self.threads), thread_name_prefix="data"
                )
                self._ahead.append((guess, self._pool.submit(self._read, guess)))


_KINDS = {"mock": "--mock-data", "streamed": "data with --dataset-format"}
"""Kind of data -> what a message calls it, if not by its name."""


@dataclasses.dataclass(frozen=True)
class _Request:
    """What identifies a batch. The prefetcher uses it as its key."""

    consumed: int
    batch_size: int
    seq_length: int


class PositionSource(abc.ABC):
    """Base class of a source. It has every method that `TrainSource` asks for.

    By default the data never end, have no index and no filters.
    """

    kind: str
    """Name of the kind of data in checkpoints, as in --dataset-format. A checkpoint of another kind
    is refused."""

    has_marks = False
    """Whether `fill` may write marks. Otherwise a negative id is an error. See `packing`."""

    def __init__(self, name: str, seq_length: int, batch_slice: BatchSlice, threads: int) -> None:
        """Start at the first sample. Nothing is read yet.

        Args:
            name: Name of the source in messages.
            seq_length: Tokens of a sample, without the last label.
            batch_slice: The part of each batch that this rank reads.
            threads: Number of threads that read ahead. 0 reads in the caller's thread.
        """
        self.name = name
        self._seq_length = seq_length
        self._batch_slice = batch_slice
        self._consumed = 0
        self._prefetcher: Prefetcher[_Request, list[Microbatch]] = Prefetcher(self._read, threads)

    @abc.abstractmethod
    def fill(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Write the tokens of samples. The reading threads call it, so it must not change state.

        Args:
            positions: Numbers of the samples [n], from 0 at the start of the run.
            samples: Receives the tokens [n, s + 1]. s is at most the full sequence length. The last
                token of a sample is only a label.

        Raises:
            DataError: the data cannot be read.
        """

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks together have read or skipped."""
        return self._consumed

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digest of each data set that is not in the registry, by its name.

        The ranks compare them. A checkpoint records them, and a resume refuses other ones. They
        are read at each save, so compute them once.
        """
        return {}

    @property
    def has_filters(self) -> bool:
        """Return whether documents are left out."""
        return False

    def describe(self) -> tuple[str, str] | None:
        """Return what is read, and how much there is, for the table at the start."""
        return None

    def describe_place(self, position: int, column: int) -> str:
        """Return where a token of a sample comes from, for a message about it."""
        return f"{self.name}: token {column} of sample {position}"

    def prepare(self) -> None:  # noqa: B027 most sources have no index
        """Do nothing, because there is no index."""

    def must_extend(self, batch_size: int) -> bool:
        """Return False, because the data never end."""
        return False

    def extend(self, batch_size: int) -> None:  # noqa: B027 most sources never end
        """Do nothing, because the data never end."""

    def has_samples(self, end: int) -> bool:
        """Return whether the data have all samples before `end`."""
        return True

    def state(self) -> dict[str, Any]:
        """Return the position and the fingerprints of the data, as JSON values."""
        return {
            "consumed_samples": self._consumed,
            "segments": [],
            "kind": self.kind,
            "fingerprints": self.fingerprints,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state belongs to other data.
        """
        # A position is a number, so it would be accepted for any data.
        trained, own = (_KINDS.get(kind, f"{kind} data") for kind in (find_kind(state), self.kind))
        recorded = state.get("fingerprints", {})
        problem = None
        if trained != own:
            problem = f"was trained on {trained}, and not on {own}"
        elif recorded != self.fingerprints:
            problem = f"records {recorded}, and the data now are {self.fingerprints}"
        if problem is not None:
            raise DataError(
                f"{self.name}: the checkpoint {problem}. Resume with the data of the checkpoint, "
                "or start a new run from its weights with --finetune and another --save."
            )
        self._move_to(int(state["consumed_samples"]))

    def advance(self, samples: int) -> None:
        """Skip samples without reading them."""
        self._consumed += samples

    @property
    def has_batch(self) -> bool:
        """Whether the next batch is probably in memory."""
        return self._prefetcher.has_next

    def read_ahead(self, batch_size: int, seq_length: int | None = None) -> None:
        """Read the next batch into memory. See `Source.read_ahead`."""
        self.prepare()
        request = _Request(self._consumed, batch_size, seq_length or self._seq_length)
        self._prefetcher.read(request)

    def read_batch(self, batch_size: int, seq_length: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the next global batch. See `Source.read_batch`.

        Raises:
            DataError: the data cannot be read, or a token id is outside the vocabulary.
        """
        length = self._seq_length if seq_length is None else seq_length
        assert 0 < length <= self._seq_length, (
            f"sequence length {length} is not in 1 to {self._seq_length}"
        )
        # The reading threads must not start before the indices are open.
        self.prepare()
        request = _Request(self._consumed, batch_size, length)
        microbatches = self._prefetcher.take(request, self._guess_requests(request))
        # Only after success, so that a failed read does not move the position.
        self._consumed += batch_size
        return microbatches

    def take_notes(self) -> list[str]:
        """Return nothing, because all messages are in the registry."""
        return []

    def take_filter_reports(self) -> Sequence[LeftOut]:
        """Return nothing, because there are no filters."""
        return ()

    def close(self) -> None:
        """Stop the reading threads."""
        self._prefetcher.close()

    def _move_to(self, consumed: int) -> None:
        """Set the position. Batches that were read ahead belong to the old one."""
        self._prefetcher.discard()
        self._consumed = consumed

    def _guess_requests(self, request: _Request) -> Iterable[_Request]:
        """Yield the requests that follow if batch size and sequence length stay as they are."""
        for ahead in range(1, 1 + self._prefetcher.threads):
            begin = request.consumed + ahead * request.batch_size
            # A guess past the end of the data would fail in its thread.
            if self.has_samples(begin + request.batch_size):
                yield dataclasses.replace(request, consumed=begin)

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
        positions = positions.reshape(-1)
        samples = np.empty((len(positions), request.seq_length + 1), np.int64)
        self.fill(positions, samples)
        marks = take_marks(samples) if self.has_marks else None
        if batch_slice.vocab_size is not None:
            self._check_vocabulary(samples, positions, batch_slice.vocab_size)
        microbatches = split_microbatches(samples, batch_slice.micro_batch_size)
        if batch_slice.document_rules is not None:
            microbatches = [
                batch_slice.document_rules.apply(microbatch) for microbatch in microbatches
            ]
        if marks is not None:
            size = batch_slice.micro_batch_size
            microbatches = [
                apply_marks(microbatch, marks.select(number * size, (number + 1) * size))
                for number, microbatch in enumerate(microbatches)
            ]
        return microbatches

    def _check_vocabulary(
        self, samples: NDArray[np.int64], positions: NDArray[np.int64], vocab_size: int
    ) -> None:
        """Raise a DataError that names the place if an id is outside the vocabulary."""
        # Seen as unsigned, a negative id is huge. One comparison finds both kinds of wrong ids.
        unsigned = samples.view(np.uint64)
        if int(unsigned.max()) >= vocab_size:
            row, column = (int(value) for value in np.argwhere(unsigned >= vocab_size)[0])
            place = self.describe_place(int(positions[row]), column)
            raise make_vocabulary_error(place, int(samples[row, column]), vocab_size)


def find_kind(state: dict[str, Any]) -> str:
    """Return the kind of data of a source's state: "indexed", "mock", "streamed" or another one."""
    if "kind" in state:
        return str(state["kind"])
    # Checkpoints of earlier versions do not name the kind.
    if state.get("stream") is not None:
        return "streamed"
    return "indexed" if state["segments"] else "mock"


def make_vocabulary_error(place: str, token: int, vocab_size: int) -> DataError:
    """Return the error for a token id that is outside the vocabulary."""
    return DataError(
        f"{place} holds the token id {token}, but the vocabulary has {vocab_size} entries (ids 0 "
        f"to {vocab_size - 1}). The data was made with another tokenizer. Give that tokenizer, or "
        "preprocess the data again."
    )
