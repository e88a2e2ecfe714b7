"""A data set of rows: its documents, with the tokens around them.

Invariant: the documents of a piece are a function of the files, the seed, the epoch and the piece.

Legend: n tokens of a document.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.plain_text import redact
from megatron.extras.samples.stream.filters import KEPT, Filters
from megatron.extras.samples.stream.formats import FORMATS, Row
from megatron.extras.samples.stream.listing import Listing
from megatron.extras.samples.stream.shard_order import EpochOrder, RowRange, clip_groups
from megatron.extras.samples.stream.table_files import FilePath
from megatron.tokenizer.failures import TokenizerError

Encode = Callable[[list[str]], list[NDArray[np.int64]]]

_TOKENIZED_AT_ONCE = 16
"""Texts that are tokenized in one call. A complete window has up to 256 texts. If each shard of a
batch tokenized a complete window, the first batch would take minutes."""


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
    """Its number of tokens without the special tokens. It is set even if the document is left
    out."""


class StreamedDataset:
    """The documents of one data set, divided into logical shards."""

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
        self.sampled_digest = listing.compute_sampled_digest()
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

    def read_documents(self, epoch: int, piece: RowRange, skipped: int = 0) -> Iterator[Document]:
        """Yield the documents of a piece in the order of training.

        Documents that are left out by filters are empty, so that the others keep their numbers.
        Texts are tokenized when they are needed.

        Args:
            epoch: Number of the epoch.
            piece: The rows.
            skipped: Number of documents at the start that are not wanted.

        Raises:
            DataError: a file has changed or is damaged, or an id is outside the vocabulary.
        """
        listing = self.listing
        # Windows that end before the first document that is wanted are not read.
        first_wanted = piece.first_row + skipped
        windows = [window for window in piece.split_windows() if window[1] > first_wanted]
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
            window = rows[: last - first]
            rows = rows[last - first :]
            numbers = order.shuffle_window(piece.group, first, last)[max(0, first_wanted - first) :]
            yield from self._read_window(window, numbers.tolist(), path, first)

    def _read_window(
        self, window: list[Row], numbers: list[int], path: FilePath, first: int
    ) -> Iterator[Document]:
        """Yield the documents of a window.

        Args:
            window: The rows in the order of the file.
            numbers: The rows that are wanted, in the order of training, counted within the window.
            path: The file.
            first: The first row of the window, counted within the row group.
        """
        # Duplicates are found in the complete window.
        if self.listing.kind == "tokens" or self.filters.drop_duplicates:
            documents = self._make_documents(window, path, range(first, first + len(window)))
            for number in numbers:
                yield documents[number]
            return
        for start in range(0, len(numbers), _TOKENIZED_AT_ONCE):
            now = numbers[start : start + _TOKENIZED_AT_ONCE]
            rows = [window[number] for number in now]
            yield from self._make_documents(rows, path, [first + number for number in now])

    def _make_documents(
        self, rows: list[Row], path: FilePath, places: Sequence[int]
    ) -> list[Document]:
        """Return the documents of rows. `places` are their numbers within the row group."""
        texts = [row for row in rows if isinstance(row, str)]
        try:
            encoded = iter(self._encode(texts) if texts and self._encode is not None else [])
        except TokenizerError as error:
            (place,) = (place for row, place in zip(rows, places, strict=True) if row is error.text)
            raise DataError(
                f"{path}: row {place} of a row group: {error}. Leave out or shorten the document, "
                "or give another tokenizer."
            ) from error
        window = [
            self.specials.remove_stripped(next(encoded) if isinstance(row, str) else row)
            for row in rows
        ]
        documents = []
        for ids, outcome in zip(window, self.filters.judge(window), strict=True):
            surrounded = self.specials.surround(ids)
            documents.append(Document(surrounded, outcome, len(ids)))
        self._check_vocabulary(documents, path, places)
        return [
            document if document.outcome == KEPT else document._replace(ids=document.ids[:0])
            for document in documents
        ]

    def _check_vocabulary(
        self, documents: list[Document], path: FilePath, places: Sequence[int]
    ) -> None:
        """Check the ids of all documents, including those that are left out.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        if self._vocab_size is not None:
            for place, (ids, _, _) in zip(places, documents, strict=True):
                # Seen as unsigned, a negative id is huge. One comparison finds both kinds.
                if len(ids) and int(ids.view(np.uint64).max()) >= self._vocab_size:
                    wrong = int(ids[ids.view(np.uint64) >= self._vocab_size][0])
                    raise DataError(
                        f"{path}: row {place} of a row group holds the token id {wrong}, "
                        f"but the vocabulary has {self._vocab_size} entries (ids 0 to "
                        f"{self._vocab_size - 1}). The data was made with another tokenizer. Give "
                        "that tokenizer, or its --vocab-size."
                    )
