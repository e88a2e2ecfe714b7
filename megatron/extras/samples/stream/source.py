"""Source of batches that reads data sets of rows, with the same methods as data/source.py.

Sample p of a run belongs to logical shard p modulo n. `PhasedMixture` chooses its data set. Each
shard of each data set has a cursor, and the state is the list of these cursors.

Invariant: what `read_batch` returns is a function of the state and the rank's coordinate. All ranks
together read the same samples whatever their number. A rank reads the shards of its own samples
only, if micro-batch size x data-parallel size divides the number of logical shards.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.plain_text import format_count
from megatron.data.batches import Microbatch, compute_sample_positions, split_microbatches
from megatron.data.documents import DocumentRules
from megatron.data.position_source import Prefetcher, find_kind
from megatron.data.source import BatchSlice
from megatron.extras.samples.stream.filters import (
    NO_COUNTS,
    FilterReport,
    add_counts,
    parse_counts,
)
from megatron.extras.samples.stream.listing import Listing
from megatron.extras.samples.stream.reader import (
    Cursor,
    OpenShard,
    Sample,
    ShardReader,
    continue_segments,
    describe_segments,
    find_record,
    make_record,
    parse_positions,
)
from megatron.extras.samples.stream.shard_order import MixturePhase, PhasedMixture
from megatron.extras.samples.stream.streamed_dataset import StreamedDataset
from megatron.parallel.ranks import Ranks

_COUNTED_AT_ONCE = 1 << 20
_NEW = (0, Cursor())
"""Position of a shard that was not read yet."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a sample comes from."""

    dataset: int
    shard: int
    number: int
    """Number of the sample in its shard of this data set, counted from the start of the run."""


@dataclasses.dataclass(frozen=True)
class _StreamRequest:
    """What identifies a batch. The prefetcher uses it as its key."""

    consumed: int
    batch_size: int
    seq_length: int
    places: tuple[_Place, ...] = dataclasses.field(compare=False)
    """The samples of this rank. They follow from the other fields."""


class StreamSource:
    """Source of samples that are read from files of rows. It never ends."""

    def __init__(
        self,
        name: str,
        datasets: Sequence[StreamedDataset],
        phases: Sequence[MixturePhase],
        seq_length: int,
        batch_slice: BatchSlice,
        threads: int,
        ranks: Ranks,
        *,
        may_restart: bool = False,
        allow_changed_data: bool = False,
    ) -> None:
        """Start at the first sample. Nothing is read yet.

        Args:
            name: Name of the source in messages.
            datasets: The data sets. All have the same number of shards and the same seed.
            phases: The mixtures, in order, each with the sample from which on it applies.
            seq_length: Tokens of a sample, without the last label.
            batch_slice: The part of each batch that this rank reads.
            threads: Threads that read and tokenize. 0 reads in the caller's thread.
            ranks: The ranks of the run. `state` gathers their positions.
            may_restart: Whether a state with another number of shards means the first sample.
                Otherwise it is an error.
            allow_changed_data: The value of the flag. See `find_record`.
        """
        self.name = name
        self.notes: list[str] = []
        self._datasets = list(datasets)
        self._phases = list(phases)
        self._seq_length = seq_length
        self._batch_slice = batch_slice
        self._ranks = ranks
        self._may_restart = may_restart
        self._allow_changed_data = allow_changed_data
        self._number_of_shards = datasets[0].shards
        self._seed = datasets[0].seed
        self._consumed = 0
        # Samples of each data set and shard before the position, [data sets, shards].
        self._counts = np.zeros((len(self._datasets), self._number_of_shards), np.int64)
        self._shards: dict[tuple[int, int], OpenShard] = {}
        # Cursors of a loaded state, by data set and shard.
        self._starts: dict[tuple[int, int], tuple[int, Cursor]] = {}
        self._filter_reports: list[FilterReport] = []
        self._segments = describe_segments(self._datasets, self._phases, 0)
        # Records of data sets that are not read any more. They continue if they are added again.
        self._unused: list[dict[str, Any]] = []
        self._mixture = self._make_mixture(self._seed)
        # Requests are read one at a time, because a later one would pass over samples of an earlier
        # one. The shards of a request are read in parallel.
        self._prefetcher: Prefetcher[_StreamRequest, list[Microbatch]] = Prefetcher(
            self._read, min(threads, 1)
        )
        self._pool = None
        if threads:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stream")

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks together have read or skipped."""
        return self._consumed

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests of the files, row groups and samples of each data set, by its name."""
        return {
            dataset.name: f"{dataset.fingerprint} ({dataset.sampled_digest})"
            for dataset in self._datasets
        }

    @property
    def listings(self) -> list[Listing]:
        """The files of each data set."""
        return [dataset.listing for dataset in self._datasets]

    @property
    def has_filters(self) -> bool:
        """Return whether documents are left out."""
        return any(dataset.filters.active for dataset in self._datasets)

    def describe(self) -> tuple[str, str]:
        """Return what is read, and how much there is, for the table at the start."""
        documents = sum(each.documents[1] - each.documents[0] for each in self._datasets)
        files = sum(len(each.listing.files) for each in self._datasets)
        count = len(self._datasets)
        kinds = sorted({each.listing.kind for each in self._datasets})
        return (
            f"streamed, {format_count(count, 'data set')}, {self._number_of_shards} logical shards",
            f"{format_count(documents, 'document')} of {' and '.join(kinds)} in "
            f"{format_count(files, 'file')}",
        )

    def prepare(self) -> None:
        """Do nothing. The row groups were listed when the data sets were opened."""

    def must_extend(self, batch_size: int) -> bool:
        """Return false, because streamed data never end."""
        return False

    def extend(self, batch_size: int) -> None:
        """Do nothing, because streamed data never end."""

    @property
    def has_batch(self) -> bool:
        """Whether the next batch is probably in memory."""
        return self._prefetcher.has_next

    def read_ahead(self, batch_size: int, seq_length: int | None = None) -> None:
        """Read the next batch into memory. See `Source.read_ahead`."""
        length = seq_length or self._seq_length
        self._prefetcher.read(self._make_request(self._consumed, batch_size, length))

    def read_batch(self, batch_size: int, seq_length: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the next global batch. See `Source.read_batch`.

        Raises:
            DataError: a file has changed or is damaged, or an id is outside the vocabulary.
        """
        length = self._seq_length if seq_length is None else seq_length
        assert 0 < length <= self._seq_length, f"{length} is not in 1 to {self._seq_length}"
        request = self._make_request(self._consumed, batch_size, length)
        if not self._prefetcher.is_ahead(request):
            # This batch is read before the guess at the next one. In parallel, the guess would read
            # the same documents again to pass over these samples.
            self._read(request)
        microbatches = self._prefetcher.take(request, self._guess_requests(request))
        # Only after success, so that a failed read does not move the position.
        for place in request.places:
            self._shards[place.dataset, place.shard].confirm(place.number)
        self.advance(batch_size)
        return microbatches

    def advance(self, samples: int) -> None:
        """Skip samples. What is skipped is passed over when its shard is read next."""
        self._counts += self._count_samples(self._consumed, self._consumed + samples)
        self._consumed += samples

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values. All ranks call it together.

        Raises:
            DataError: a file has changed or is damaged.
        """
        cursors = self._gather_cursors()
        records = []
        self._filter_reports.clear()
        for number, dataset in enumerate(self._datasets):
            of_shards = [cursors[number, shard] for shard in range(self._number_of_shards)]
            records.append(make_record(dataset, self._counts[number].tolist(), of_shards))
            total = functools.reduce(add_counts, [cursor.filter_counts for cursor in of_shards])
            # A data set of a later phase was not read yet.
            if dataset.filters.active and total != NO_COUNTS:
                self._filter_reports.append(FilterReport(dataset.name, total))
        return {
            "consumed_samples": self._consumed,
            "segments": [],
            "stream": {
                "logical_shards": self._number_of_shards,
                "seed": self._seed,
                "segments": self._segments,
                "datasets": records + self._unused,
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state is that of other data, or of another number of logical shards.
        """
        self._prefetcher.discard()
        _refuse_other_data(self.name, find_kind(state))
        stream = state["stream"]
        if stream["logical_shards"] != self._number_of_shards:
            if self._may_restart:
                self.notes.append(
                    f"{self.name}: the data are read from the first sample again, because they "
                    f"have {self._number_of_shards} logical shards and had "
                    f"{stream['logical_shards']} before"
                )
                return
            raise DataError(
                f"{self.name}: --logical-shards {self._number_of_shards} differs from the "
                f"checkpoint's {stream['logical_shards']}. The number of ranks may change, but "
                f"not the number of shards. Use --logical-shards {stream['logical_shards']}."
            )
        self._consumed = int(state["consumed_samples"])
        self._shards.clear()
        self._starts.clear()
        self._counts[:] = 0
        self._keep_seed(int(stream["seed"]))
        left = list(stream["datasets"])
        for number, dataset in enumerate(self._datasets):
            try:
                record, note = find_record(
                    dataset, left, allow_changed_data=self._allow_changed_data
                )
            except DataError as error:
                raise DataError(f"{self.name}: {error}") from error
            if note is not None:
                self.notes.append(f"{self.name}: {note}")
            if record is not None:
                left.remove(record)
                self._counts[number] = record["samples"]
                for shard, position in enumerate(parse_positions(dataset, record)):
                    self._starts[number, shard] = position
        self._unused = left
        requested = describe_segments(self._datasets, self._phases, self._consumed)
        self._segments, changed = continue_segments(stream["segments"], requested)
        if changed:
            self.notes.append(
                f"{self.name}: the data sets, their weights, special tokens or filters have "
                f"changed. The change applies from sample {self._consumed} on"
            )

    def close(self) -> None:
        """Stop the reading threads."""
        self._prefetcher.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def take_notes(self) -> list[str]:
        """Return messages for the user since the last call."""
        notes = list(self.notes)
        self.notes.clear()
        return notes

    def take_filter_reports(self) -> list[FilterReport]:
        """Return what the filters had left out at the last call of `state`, once.

        The reports are those of the whole run, over all ranks. There is one for each data set, and
        none without filters.
        """
        reports = self._filter_reports
        self._filter_reports = []
        return reports

    def _make_request(self, consumed: int, batch_size: int, seq_length: int) -> _StreamRequest:
        """Return the request for a batch at or after the position."""
        batch_slice = self._batch_slice
        mine = compute_sample_positions(
            consumed,
            batch_size,
            batch_slice.dp_rank,
            batch_slice.dp_size,
            batch_slice.micro_batch_size,
        ).reshape(-1)
        # The samples between the position of the run and the batch come first in their shards.
        positions = np.arange(self._consumed, consumed + batch_size)
        counts = self._counts.tolist()
        places = []
        for position, dataset in zip(positions, self._mixture.choose(positions), strict=True):
            shard = int(position) % self._number_of_shards
            places.append(_Place(int(dataset), shard, counts[dataset][shard]))
            counts[dataset][shard] += 1
        own = tuple(places[position - self._consumed] for position in mine)
        return _StreamRequest(consumed, batch_size, seq_length, own)

    def _guess_requests(self, request: _StreamRequest) -> Iterable[_StreamRequest]:
        """Yield the request that follows if batch size and sequence length stay as they are."""
        following = request.consumed + request.batch_size
        yield self._make_request(following, request.batch_size, request.seq_length)

    def _count_samples(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return how many of the samples [begin, end) each data set and shard gives."""
        counts = np.zeros_like(self._counts)
        # In parts, because a long range is skipped when a run starts from an imported checkpoint.
        for start in range(begin, end, _COUNTED_AT_ONCE):
            positions = np.arange(start, min(end, start + _COUNTED_AT_ONCE))
            shards = positions % self._number_of_shards
            np.add.at(counts, (self._mixture.choose(positions), shards), 1)
        return counts

    def _read(self, request: _StreamRequest) -> list[Microbatch]:
        """Read one batch. The position does not move."""
        rows: list[Sample | None] = [None] * len(request.places)
        by_shard: dict[tuple[int, int], list[int]] = {}
        for row, place in enumerate(request.places):
            by_shard.setdefault((place.dataset, place.shard), []).append(row)

        def read_shard(numbers: list[int]) -> None:
            for row in numbers:
                place = request.places[row]
                shard = self._shards[place.dataset, place.shard]
                rows[row] = shard.read(place.number, self._seq_length)

        for key in by_shard:
            if key not in self._shards:
                opened = OpenShard(self._datasets[key[0]], key[1], *self._starts.get(key, _NEW))
                # Another thread may have opened it meanwhile.
                self._shards.setdefault(key, opened)
        if self._pool is None:
            for numbers in by_shard.values():
                read_shard(numbers)
        else:
            list(self._pool.map(read_shard, by_shard.values()))
        samples = [sample for sample in rows if sample is not None]
        tokens = np.stack([sample.tokens[: request.seq_length + 1] for sample in samples])
        size = self._batch_slice.micro_batch_size
        microbatches = split_microbatches(tokens, size)
        rules = self._batch_slice.document_rules
        if rules is None:
            return microbatches
        starts = [sample.starts for sample in samples]
        return [
            _apply_starts(rules, microbatch, starts[number * size : (number + 1) * size])
            for number, microbatch in enumerate(microbatches)
        ]

    def _gather_cursors(self) -> dict[tuple[int, int], Cursor]:
        """Return the cursor of each shard at the position. All ranks call it together.

        The ranks that read a shard know its cursor. If samples of a shard were skipped since, one
        rank passes over them.
        """
        # A copy, because a thread that reads ahead may open a shard meanwhile.
        shards = list(self._shards.items())
        own = [(key, shard.number, shard.cursor) for key, shard in shards]
        starts = self._merge_positions(self._starts, own)
        behind = [
            (dataset, shard)
            for dataset, shard in np.ndindex(*self._counts.shape)
            if starts.get((dataset, shard), _NEW)[0] < self._counts[dataset, shard]
        ]
        # Every rank has the same list, so either all of them enter the gather below or none does.
        if behind:
            passed = []
            for dataset, shard in behind[self._ranks.rank :: self._ranks.size]:
                number, cursor = starts.get((dataset, shard), _NEW)
                wanted = int(self._counts[dataset, shard])
                # A reader of its own, because a thread may use that of the shard to read ahead.
                reader = ShardReader(self._datasets[dataset], shard, cursor)
                reader.skip_tokens((wanted - number) * self._seq_length)
                passed.append(((dataset, shard), wanted, reader.cursor))
            starts = self._merge_positions(starts, passed)
        # Only needed for shards that this rank does not read.
        self._starts = starts
        return {key: starts.get(key, _NEW)[1] for key in np.ndindex(*self._counts.shape)}

    def _merge_positions(
        self,
        known: dict[tuple[int, int], tuple[int, Cursor]],
        own: Iterable[tuple[tuple[int, int], int, Cursor]],
    ) -> dict[tuple[int, int], tuple[int, Cursor]]:
        """Return the latest position of each shard: those that are known, and those of all ranks.

        Args:
            known: Number and cursor of the next sample of a shard. Equal on all ranks.
            own: The same for the shards that this rank has read or passed.
        """
        mine = [[*key, number, *dataclasses.astuple(cursor)] for key, number, cursor in own]
        merged = dict(known)
        for dataset, shard, number, *position, counts in itertools.chain(*self._ranks.gather(mine)):
            if number > merged.get((dataset, shard), _NEW)[0]:
                epoch, document, token = position
                cursor = Cursor(epoch, document, token, parse_counts(counts))
                merged[dataset, shard] = (number, cursor)
        return merged

    def _keep_seed(self, seed: int) -> None:
        """Continue with the seed of the checkpoint, because the cursors belong to its order."""
        if seed != self._seed:
            self.notes.append(
                f"{self.name}: the order of the streamed data keeps the seed {seed} of the "
                f"checkpoint, and not --seed {self._seed}"
            )
        self._seed = seed
        for dataset in self._datasets:
            dataset.use_seed(seed)
        self._mixture = self._make_mixture(seed)

    def _make_mixture(self, seed: int) -> PhasedMixture:
        """Return what chooses the data set of each sample."""
        names = [dataset.name for dataset in self._datasets]
        return PhasedMixture(names, self._phases, self._number_of_shards, seed)


def _refuse_other_data(name: str, kind: str) -> None:
    """Raise an error if a state is that of another kind of data.

    Raises:
        DataError: it is.
    """
    if kind == "streamed":
        return
    if kind in ("indexed", "mock"):
        flag = "without --dataset-format"
    else:
        flag = f"with --dataset-format {kind}"
    raise DataError(
        f"{name}: the checkpoint was trained on data {flag}. Resume with these data, or start a "
        "new run from its weights with --finetune and another --save."
    )


def _apply_starts(
    rules: DocumentRules, microbatch: Microbatch, starts: Sequence[Sequence[int]]
) -> Microbatch:
    """Return the microbatch with the fields that follow from known starts of documents.

    Args:
        rules: The flags that need borders of documents.
        microbatch: [b, s].
        starts: For each sample, the places in its s + 1 tokens where a document begins. Places
            after a truncated sample are left out.
    """
    samples, length = microbatch.tokens.shape
    loss_mask = torch.ones(samples, length)
    position_ids = torch.arange(length).repeat(samples, 1)
    documents = []
    for sample, places in enumerate(starts):
        inner = [place for place in places if 0 < place < length]
        documents.append((0, *inner, length))
        for begin in inner:
            position_ids[sample, begin:] = torch.arange(length - begin)
        # The label of the last token of a document is the first one of another text.
        ends = [place - 1 for place in places if 0 < place <= length]
        loss_mask[sample, ends] = 0
    return dataclasses.replace(
        microbatch,
        loss_mask=loss_mask if rules.eod_mask_loss else None,
        position_ids=position_ids if rules.reset_position_ids else None,
        documents=tuple(documents) if rules.reset_attention_mask else None,
    )
