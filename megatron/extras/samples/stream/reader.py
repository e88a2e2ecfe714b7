"""Reads the samples of one logical shard of one data set, and records its position.

The documents of a shard are laid end to end. A sample is s + 1 tokens of this sequence, and
neighbouring samples share one token, as in gpt_dataset.py. After the last document of an epoch
follows the first one of the next epoch.

Invariant: a sample is a function of the cursor before it. The position is reached by reading, by
skipping or from a checkpoint with the same result.

A checkpoint records the cursors of all shards of a data set as JSON values. A segment has the data
sets, weights, special tokens and filters that apply from a sample on.

Legend: s sequence length.
"""

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.plain_text import redact
from megatron.extras.samples.stream.filters import (
    NO_COUNTS,
    FilterCounts,
    count_document,
    describe_emptiness,
    parse_counts,
)
from megatron.extras.samples.stream.shard_order import MixturePhase, RowRange
from megatron.extras.samples.stream.streamed_dataset import Document, StreamedDataset

# Epochs in a row in which a shard may have no tokens.
_MOST_EMPTY_EPOCHS = 4


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The first token of the next sample of a shard."""

    epoch: int = 0
    document: int = 0
    """Number of the document in the shard's order of this epoch."""
    token: int = 0
    """Number of the token in the document, special tokens included."""
    filter_counts: FilterCounts = NO_COUNTS
    """What the filters found in the documents before this one, since the start of the run. Nothing
    is counted while there are no filters."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample, and the cursor of the next one."""

    tokens: NDArray[np.int64]
    """[s + 1]."""
    starts: tuple[int, ...]
    """Places in `tokens` at which a document begins. The first token counts only if it is the first
    one of its document."""
    after: Cursor


class ShardReader:
    """Reads one logical shard of a data set from a cursor on."""

    def __init__(self, dataset: StreamedDataset, shard: int, cursor: Cursor) -> None:
        """Remember the position. Nothing is read before the first sample."""
        self._dataset = dataset
        self._shard = shard
        self._list_pieces = functools.lru_cache(maxsize=2)(self._list_numbered_pieces)
        self.seek(cursor)

    def seek(self, cursor: Cursor) -> None:
        """Go to a cursor. Documents in memory are dropped."""
        self.cursor = cursor
        # Documents in memory, from that of the cursor on, each with its epoch and its number.
        self._documents: deque[tuple[int, int, Document]] = deque()
        # The counts of the filters for the documents before the first one in memory.
        self._filter_counts = cursor.filter_counts
        self._continue_at(Cursor(cursor.epoch, cursor.document))

    def read_sample(self, seq_length: int) -> Sample:
        """Return the next sample, and move the cursor by `seq_length` tokens.

        Raises:
            DataError: see `StreamedDataset.read_documents`, or the shard has no tokens.
        """
        wanted = seq_length + 1
        parts = []
        starts = []
        found = 0
        passed = self.cursor.token
        place = 0
        while found < wanted:
            if place == len(self._documents):
                self._read_document()
            ids = self._documents[place][2].ids
            if passed == 0 and len(ids):
                starts.append(found)
            parts.append(ids[passed : passed + wanted - found])
            found += len(parts[-1])
            passed = 0
            place += 1
        self.skip_tokens(seq_length)
        return Sample(np.concatenate(parts), tuple(starts), self.cursor)

    def skip_tokens(self, tokens: int) -> None:
        """Move the cursor. Row groups whose size is known are passed over without reading.

        With filters no size is known, so everything is read.

        Raises:
            DataError: see `read_sample`.
        """
        left = self.cursor.token + tokens
        while True:
            if not self._documents:
                left = self._pass_over_pieces(left)
                self._read_document()
            epoch, number, document = self._documents[0]
            size = len(document.ids)
            if (epoch, number) == (self.cursor.epoch, self.cursor.document):
                # The document may be shorter than when a part of it was read, or be left out. Its
                # filters and special tokens may change on a resume.
                left = min(left, size + tokens)
            if left < size:
                self.cursor = Cursor(epoch, number, left, self._filter_counts)
                return
            left -= size
            self._documents.popleft()
            if self._dataset.filters.active:
                self._filter_counts = count_document(
                    self._filter_counts, document.outcome, document.size
                )

    def _read_document(self) -> None:
        """Add the next document to those in memory."""
        epoch, number, document = next(self._upcoming)
        self._documents.append((epoch, number, document))
        self._next = Cursor(epoch, number + 1)

    def _pass_over_pieces(self, tokens: int) -> int:
        """Pass over complete pieces, and return the number of tokens that are left to skip."""
        left = tokens
        while True:
            pieces = self._list_pieces(self._next.epoch)
            piece = pieces.get(self._next.document)
            size = None if piece is None else self._dataset.count_tokens(piece)
            if piece is None or size is None or size > left:
                return left
            left -= size
            passed = self._next.document + piece.rows
            if passed < self._dataset.open_epoch(self._next.epoch).count_rows(self._shard):
                self._continue_at(Cursor(self._next.epoch, passed))
                continue
            # This also ends if the pieces have no tokens, because it goes on only after progress.
            self._continue_at(Cursor(self._next.epoch + 1))
            if left == tokens:
                return left

    def _continue_at(self, document: Cursor) -> None:
        """Let the next document that is read be this one."""
        self._next = document
        self._upcoming: Iterator[tuple[int, int, Document]] = self._iterate_from(document)

    def _list_numbered_pieces(self, epoch: int) -> dict[int, RowRange]:
        """Return the pieces of the shard, each under the number of its first document."""
        pieces = {}
        number = 0
        for piece in self._dataset.open_epoch(epoch).list_pieces(self._shard):
            pieces[number] = piece
            number += piece.rows
        return pieces

    def _iterate_from(self, start: Cursor) -> Iterator[tuple[int, int, Document]]:
        """Yield epoch, number and content of each document from a cursor's on, without end.

        Raises:
            DataError: several epochs have no tokens, so probably no sample could ever be filled.
        """
        epoch = start.epoch
        begin = start.document
        empty_epochs = 0
        while True:
            tokens = 0
            counts = NO_COUNTS
            for first, piece in self._list_pieces(epoch).items():
                skipped = max(0, begin - first)
                documents = self._dataset.read_documents(epoch, piece, skipped)
                for number, document in enumerate(documents, first + skipped):
                    yield epoch, number, document
                    tokens += len(document.ids)
                    counts = count_document(counts, document.outcome, document.size)
            if tokens:
                empty_epochs = 0
            elif begin == 0:
                empty_epochs += 1
            # A shard of few documents may have others in the next epoch.
            if empty_epochs == _MOST_EMPTY_EPOCHS:
                raise DataError(
                    f"all documents of logical shard {self._shard} of data set "
                    f"{self._dataset.shown_name} {describe_emptiness(counts)}. Relax the filters "
                    "if there are any, lower --logical-shards, or use other data."
                )
            epoch += 1
            begin = 0


class OpenShard:
    """One shard of one data set: the position of the run, and samples that were read ahead."""

    def __init__(self, dataset: StreamedDataset, shard: int, number: int, cursor: Cursor) -> None:
        """Remember the position: sample `number` begins at `cursor`."""
        self.number = number
        self.cursor = cursor
        self._reader = ShardReader(dataset, shard, cursor)
        self._next_number = number
        self._ahead: dict[int, Sample] = {}
        self._lock = threading.Lock()

    def read(self, number: int, seq_length: int) -> Sample:
        """Return a sample that is not before the position. The position does not move.

        Raises:
            ValueError: the sample is before the position. This happens only for a batch that was
                read ahead and is no longer needed, so its result is not used.
        """
        with self._lock:
            if number < self.number:
                raise ValueError(f"sample {number} is before the position {self.number}")
            # Two threads may ask for samples of the same shard in any order.
            if number not in self._ahead:
                self._go_to(number, seq_length)
                self._ahead[number] = self._reader.read_sample(seq_length)
                self._next_number = number + 1
            return self._ahead[number]

    def confirm(self, number: int) -> None:
        """Move the position behind a sample that was read."""
        with self._lock:
            self.cursor = self._ahead[number].after
            self.number = number + 1
            # Samples after the confirmed one were read ahead and are still wanted.
            self._ahead = {later: s for later, s in self._ahead.items() if later > number}

    def _go_to(self, number: int, seq_length: int) -> None:
        """Let the reader continue with a sample."""
        if number < self._next_number:
            # The reader only moves forward, so it starts again at the position.
            self._reader.seek(self.cursor)
            self._next_number = self.number
        if number > self._next_number:
            self._reader.skip_tokens((number - self._next_number) * seq_length)
        self._next_number = number


_NAMED_FILES = 5


def describe_dataset(dataset: StreamedDataset) -> dict[str, Any]:
    """Return what identifies a data set."""
    specials = dataset.specials
    described: dict[str, Any] = {
        "name": dataset.name,
        "fingerprint": dataset.fingerprint,
        "documents": list(dataset.documents),
        "specials": {"bos": specials.bos, "eos": specials.eos, "strip": list(specials.strip)},
    }
    if dataset.filters.active:
        described["filters"] = dataclasses.asdict(dataset.filters)
    return described


def make_record(
    dataset: StreamedDataset, samples: Sequence[int], cursors: Sequence[Cursor]
) -> dict[str, Any]:
    """Return the record of a data set.

    Args:
        dataset: The data set.
        samples: Samples before the position in each shard.
        cursors: The cursor of each shard.
    """
    record = {
        **describe_dataset(dataset),
        "sampled": dataset.sampled_digest,
        "last_change_ns": dataset.listing.find_last_change(),
        "samples": list(samples),
        "epoch": [cursor.epoch for cursor in cursors],
        "document": [cursor.document for cursor in cursors],
        "token": [cursor.token for cursor in cursors],
    }
    counts = [cursor.filter_counts for cursor in cursors]
    # The counts of a run whose filters were removed are kept as well.
    if dataset.filters.active or any(each != NO_COUNTS for each in counts):
        record["filter_counts"] = counts
    return record


def find_record(
    dataset: StreamedDataset, records: Sequence[dict[str, Any]], *, allow_changed_data: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the record of a data set, and a note for the user. Both may be None.

    There is no record if the data set is new.

    Args:
        dataset: The data set.
        records: The records of the checkpoint.
        allow_changed_data: Accept files whose contents have changed, with a note.

    Raises:
        DataError: its files or its range of rows have changed.
    """
    described = describe_dataset(dataset)
    matching = [
        record
        for record in records
        if all(record[key] == described[key] for key in ("fingerprint", "documents"))
    ]
    for record in matching:
        if _has_same_samples(dataset, record):
            return record, None
    if matching:
        what = _describe_change(dataset, matching[0])
        if allow_changed_data:
            return matching[0], f"{what}. --allow-changed-data accepts them"
        raise DataError(
            f"{what}. A run must continue with the data that it started with. Restore them, or "
            "accept them with --allow-changed-data."
        )
    if any(record["name"] == dataset.name for record in records):
        raise DataError(
            f"the files of data set {dataset.name} ({redact(dataset.listing.folder)}) or its "
            "--split have changed since the checkpoint, so its order cannot be continued. Restore "
            "them. Put new files into a folder of their own, and add it to --datasets."
        )
    return None, None


def _has_same_samples(dataset: StreamedDataset, record: dict[str, Any]) -> bool:
    """Return whether the sampled contents are those of a record, as far as they are known."""
    # An older version recorded none. ETags cannot be compared with bytes.
    recorded = record.get("sampled", dataset.sampled_digest)
    kinds = [digest.partition("-")[0] for digest in (recorded, dataset.sampled_digest)]
    return recorded == dataset.sampled_digest or kinds[0] != kinds[1]


def _describe_change(dataset: StreamedDataset, record: dict[str, Any]) -> str:
    """Return that the contents of files have changed, and which files."""
    changed = dataset.listing.list_changed_since(record["last_change_ns"])
    shown = ", ".join(changed[:_NAMED_FILES])
    if len(changed) > _NAMED_FILES:
        shown += f" and {len(changed) - _NAMED_FILES} more"
    if changed:
        shown = f". Modified since then: {shown}"
    else:
        shown = ". No modification time is later, so it is not known which files they are"
    return (
        f"the files of data set {dataset.name} ({redact(dataset.listing.folder)}) have the names, "
        f"sizes and row groups that the checkpoint records, and other contents{shown}"
    )


def parse_positions(dataset: StreamedDataset, record: dict[str, Any]) -> list[tuple[int, Cursor]]:
    """Return the number of the next sample of each shard, and its cursor."""
    # The cursor counts special tokens. One more or less before the document moves it.
    shift = (dataset.specials.bos is not None) - (record["specials"]["bos"] is not None)
    columns = (
        record["samples"],
        record["epoch"],
        record["document"],
        record["token"],
        # Without filters there is no such list.
        record.get("filter_counts", [NO_COUNTS] * dataset.shards),
    )
    positions = []
    for samples, epoch, document, token, counts in zip(*columns, strict=True):
        moved = max(0, token + shift) if token else 0
        positions.append((samples, Cursor(epoch, document, moved, parse_counts(counts))))
    return positions


def describe_segments(
    datasets: Sequence[StreamedDataset], phases: Sequence[MixturePhase], first_start: int
) -> list[dict[str, Any]]:
    """Return the segment of each phase.

    Args:
        datasets: The data sets of all phases.
        phases: The phases in order.
        first_start: The sample from which on the first phase applies.
    """
    described = {dataset.name: describe_dataset(dataset) for dataset in datasets}
    starts = [first_start, *(phase.start_sample for phase in phases[1:])]
    return [
        {
            "start_sample": start,
            "datasets": [
                {**described[name], "weight": share} for name, share in phase.shares.items()
            ],
        }
        for start, phase in zip(starts, phases, strict=True)
    ]


def continue_segments(
    recorded: Sequence[dict[str, Any]], requested: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the segments of a run that goes on, and whether it changes without being planned.

    Args:
        recorded: The segments of the checkpoint.
        requested: The segments of the configuration. The first one begins at the position.
    """
    present, *later = requested
    # Nothing was read of a segment that begins at the position or later.
    past = [each for each in recorded if each["start_sample"] < present["start_sample"]]
    if past and present["datasets"] == past[-1]["datasets"]:
        return [*past, *later], False
    # A phase that begins here as planned is recorded already.
    changed = bool(past) and present not in recorded
    return [*past, present, *later], changed
