"""Reads the samples of one logical shard of one data set.

The documents of a shard are laid end to end. A sample is s + 1 tokens of this sequence, and
neighbouring samples share one token, as in gpt_dataset.py. After the last document of an epoch
follows the first one of the next epoch.

Invariant: a sample is a function of the cursor before it. The position is reached by reading, by
skipping or from a checkpoint with the same result.

Legend: s sequence length, n tokens of a document.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.url import redact
from megatron.data.stream.filters import (
    KEPT,
    NO_COUNTS,
    FilterCounts,
    Filters,
    count_document,
    describe_emptiness,
)
from megatron.data.stream.formats import FORMATS, FilePath, Row
from megatron.data.stream.listing import Listing
from megatron.data.stream.shard_order import EpochOrder, RowRange, clip_groups
from megatron.errors import DataError

# Epochs in a row in which a shard may have no tokens.
_MOST_EMPTY_EPOCHS = 4
Encode = Callable[[list[str]], list[NDArray[np.int64]]]


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
class Specials:
    """The tokens that are put around each document."""

    bos: int | None = None
    """Id that is put before each document."""
    eos: int | None = None
    """Id that is put after each document."""
    strip: tuple[int, ...] = ()
    """Ids that are removed from the start and the end of each document first."""

    @property
    def count(self) -> int:
        """Number of tokens that each document gets."""
        return (self.bos is not None) + (self.eos is not None)

    def remove_stripped(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document [n] without the ids that are removed from its ends."""
        if not self.strip:
            return ids
        kept = np.flatnonzero(~np.isin(ids, self.strip))
        if len(kept) == 0:
            return ids[:0]
        return ids[kept[0] : kept[-1] + 1]

    def surround(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document [n] with the tokens around it."""
        before = [] if self.bos is None else [self.bos]
        after = [] if self.eos is None else [self.eos]
        return np.concatenate([np.array(before, np.int64), ids, np.array(after, np.int64)])


class Document(NamedTuple):
    """A document as it is read."""

    ids: NDArray[np.int64]
    """Its token ids with the special tokens [n]. It is empty if a filter leaves the document out.
    """
    outcome: int
    """The outcome of the filters, see `filters.py`."""
    size: int
    """Its tokens without the special tokens, also if it is left out."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample, and the cursor of the next one."""

    tokens: NDArray[np.int64]
    """[s + 1]."""
    starts: tuple[int, ...]
    """Places in `tokens` at which a document begins. The first token counts only if it is the first
    one of its document."""
    after: Cursor


class StreamedDataset:
    """A data set whose logical shards can be read."""

    def __init__(
        self,
        name: str,
        listing: Listing,
        documents: tuple[int, int],
        seed: int,
        shards: int,
        specials: Specials,
        encode: Encode | None,
        vocab_size: int | None,
        filters: Filters | None = None,
    ) -> None:
        """Check that each shard has documents.

        Args:
            name: Name of the data set. "." is the folder of the listing itself.
            listing: Its files.
            documents: The range [first, last) of its rows that is read.
            seed: Seed of the order.
            shards: Number of logical shards.
            specials: Tokens around each document.
            encode: Tokenizes texts. It is needed if the files hold texts.
            vocab_size: Every id must be below it. None disables the check.
            filters: They leave documents out. None reads all documents.

        Raises:
            DataError: there are fewer documents than shards, or the texts cannot be tokenized.
        """
        self.name = name
        self.shown_name = name
        if name == ".":
            self.shown_name = redact(listing.folder)
        self.listing = listing
        self.documents = documents
        self.shards = shards
        self.specials = specials
        self.filters = filters or Filters()
        self._encode = encode
        self._vocab_size = vocab_size
        self._first_rows, self._rows = clip_groups(listing.rows, documents)
        found = documents[1] - documents[0]
        if found < shards:
            raise DataError(
                f"data set {self.shown_name} has {found} documents for {shards} logical shards. "
                "Each shard needs one. Lower --logical-shards, or use more data."
            )
        if listing.kind == "text" and encode is None:
            raise DataError(
                f"data set {self.shown_name} holds texts, and there is no tokenizer to turn them "
                "into ids. Give its files with --tokenizer-type and its flags."
            )
        self.fingerprint = listing.compute_fingerprint()
        self.use_seed(seed)

    def use_seed(self, seed: int) -> None:
        """Use another order. No reader of this data set may exist yet."""

        def open_epoch(epoch: int) -> EpochOrder:
            return EpochOrder(self._first_rows, self._rows, seed, epoch, self.shards)

        self.seed = seed
        # Shards are in the same epoch most of the time. At its end they are in two.
        self.open_epoch = functools.lru_cache(maxsize=2)(open_epoch)

    def count_tokens(self, piece: RowRange) -> int | None:
        """Return the tokens of a piece without reading it, or None if that is not possible."""
        tokens = int(self.listing.tokens[piece.group])
        complete = piece.rows == int(self.listing.rows[piece.group])
        # How many tokens are removed is known only when the documents have been read.
        if self.specials.strip or self.filters.active:
            return None
        if tokens < 0 or not complete:
            return None
        return tokens + piece.rows * self.specials.count

    def read_windows(
        self, epoch: int, piece: RowRange, skipped_windows: int
    ) -> Iterator[list[Document]]:
        """Yield the documents of each window of a piece, in the order of training.

        Documents that are left out are empty, so that the others keep their numbers.

        Args:
            epoch: Number of the epoch.
            piece: The rows.
            skipped_windows: Number of windows that are left out at the start.

        Raises:
            DataError: a file has changed or is damaged, or an id is outside the vocabulary.
        """
        listing = self.listing
        windows = piece.split_windows()[skipped_windows:]
        if not windows:
            return
        order = self.open_epoch(epoch)
        path = listing.get_path(int(listing.file[piece.group]))
        chunks = FORMATS[listing.format].read_rows(
            path,
            listing.column,
            int(listing.begin[piece.group]),
            int(listing.end[piece.group]),
            windows[0][0],
        )
        rows: list[Row] = []
        for first, last in windows:
            while len(rows) < last - first:
                more = next(chunks, None)
                if more is None:
                    raise DataError(
                        f"{path} has fewer rows than when it was listed. It has changed, or its "
                        "cached list is wrong: restore the file, or remove the files listing-*.npz "
                        "from the index cache."
                    )
                rows.extend(more)
            documents = self._make_documents(rows[: last - first], path, first)
            rows = rows[last - first :]
            yield [documents[row] for row in order.shuffle_window(piece.group, first, last)]

    def _make_documents(self, rows: list[Row], path: FilePath, first: int) -> list[Document]:
        """Return the documents of the rows of a window."""
        texts = [row for row in rows if isinstance(row, str)]
        encoded = iter(self._encode(texts) if texts and self._encode is not None else [])
        window = [
            self.specials.remove_stripped(next(encoded) if isinstance(row, str) else row)
            for row in rows
        ]
        documents = []
        for ids, outcome in zip(window, self.filters.judge(window), strict=True):
            surrounded = self.specials.surround(ids)
            documents.append(Document(surrounded, outcome, len(ids)))
        self._check_vocabulary(documents, path, first)
        return [
            document if document.outcome == KEPT else document._replace(ids=document.ids[:0])
            for document in documents
        ]

    def _check_vocabulary(self, documents: list[Document], path: FilePath, first: int) -> None:
        """Check the ids of all documents, also of those that are left out.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        if self._vocab_size is not None:
            for number, (ids, _, _) in enumerate(documents):
                # Seen as unsigned, a negative id is huge. One comparison finds both kinds.
                if len(ids) and int(ids.view(np.uint64).max()) >= self._vocab_size:
                    wrong = int(ids[ids.view(np.uint64) >= self._vocab_size][0])
                    raise DataError(
                        f"{path}: row {first + number} of a row group holds the token id {wrong}, "
                        f"but the vocabulary has {self._vocab_size} entries (ids 0 to "
                        f"{self._vocab_size - 1}). The data was made with another tokenizer. Give "
                        "that tokenizer, or its --vocab-size."
                    )


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
        # Documents from the cursor's on, each with its epoch and its number.
        self._documents: deque[tuple[int, int, Document]] = deque()
        # Of the documents before the first one in memory.
        self._filter_counts = cursor.filter_counts
        self._continue_at(Cursor(cursor.epoch, cursor.document))

    def read_sample(self, seq_length: int) -> Sample:
        """Return the next sample, and move the cursor by `seq_length` tokens.

        Raises:
            DataError: see `StreamedDataset.read_windows`, or the shard has no tokens.
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
                if begin < first + piece.rows:
                    for number, document in self._iterate_piece(epoch, piece, first, begin):
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

    def _iterate_piece(
        self, epoch: int, piece: RowRange, first: int, start: int
    ) -> Iterator[tuple[int, Document]]:
        """Yield number and content of the documents of a piece from number `start` on.

        `first` is the number of the first document of the piece.
        """
        # The windows before the start are not read.
        ends = [first + end - piece.first_row for _, end in piece.split_windows()]
        skipped = sum(end <= start for end in ends)
        number = ends[skipped - 1] if skipped else first
        for window in self._dataset.read_windows(epoch, piece, skipped):
            for document in window:
                if number >= start:
                    yield number, document
                number += 1
