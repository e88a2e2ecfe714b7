"""What an indexed data set contains, and which properties of it are suspicious.

Invariant: the tokens are read in chunks, whatever the size of the data set.

The checks look for mistakes that are invisible in a loss curve. One of them is a doubled separator,
which two programs each added once. Because of it, a 7B run lost its first 1.5T tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron.base.plain_text import make_plain
from megatron.console.figure import make_figure, save_figure
from megatron.data.indexed import IndexedDataset

# Documents handled at once.
_DOCUMENTS = 1 << 18
# Tokens handled at once.
_TOKENS = 1 << 24
# Number of documents that are named as examples of a problem.
_EXAMPLES = 5
# If at least this fraction of the documents has the same token at the same place, a program has
# probably added it.
_CONSTANT = 0.9
# A separator occurs only at the border of documents. If a token also occurs in the middle of this
# fraction of the documents, it is ordinary text. A newline is an example.
_ORDINARY = 0.1


@dataclass(frozen=True)
class _DocumentBatch:
    """Consecutive documents, with the token at which each begins and ends in the data set."""

    first: int
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each document."""
        return self.ends - self.starts


@dataclass
class Problem:
    """One kind of finding.

    Attributes:
        kind: A short name.
        text: The words after the count, as in "documents end with two separators".
        sure: Whether the tokenizer confirms it. Otherwise it was guessed from a token that nearly
            all documents share. A newline at the end of each text would look the same.
        count: How often it was found.
        examples: Numbers of the first documents that have it.
    """

    kind: str
    text: str
    sure: bool = True
    count: int = 0
    examples: list[int] = field(default_factory=list)

    def add(self, found: NDArray[np.bool_], first_document: int) -> None:
        """Count documents. `found` has one value for each document from `first_document` on."""
        places = np.flatnonzero(found)
        self.count += len(places)
        self.examples += [
            first_document + int(place) for place in places[: _EXAMPLES - len(self.examples)]
        ]

    def add_places(self, places: NDArray[np.int64], documents: _DocumentBatch) -> None:
        """Count tokens at `places`. The examples are the documents that hold them."""
        self.count += len(places)
        holders = (
            documents.first + np.unique(np.searchsorted(documents.ends, places, side="right"))
        ).tolist()
        self.examples += [holder for holder in holders if holder not in self.examples][
            : _EXAMPLES - len(self.examples)
        ]


@dataclass(frozen=True)
class Inspection:
    """The findings of an inspection.

    Attributes:
        prefix: Path of the data set.
        dtype: Type of its tokens.
        documents: Number of documents.
        sequences: Number of sequences.
        tokens: Number of tokens.
        shortest: Tokens of the shortest document.
        mean: Average tokens of a document.
        longest: Tokens of the longest document.
        histogram: (low, high, number of documents that have [low, high) tokens).
        smallest_id: The smallest token id.
        largest_id: The largest token id.
        vocab_size: Size of the vocabulary, if it is known.
        eod: The end-of-document id, if it is known or could be guessed.
        eod_source: 'tokenizer', 'guessed' (the most frequent last token) or 'none'.
        problems: What was found.
    """

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    shortest: int
    mean: float
    longest: int
    histogram: list[tuple[int, int, int]]
    smallest_id: int
    largest_id: int
    vocab_size: int | None
    eod: int | None
    eod_source: str
    problems: list[Problem]


def inspect_dataset(
    prefix: str,
    vocab_size: int | None = None,
    eod: int | None = None,
    specials: tuple[int, ...] = (),
) -> Inspection:
    """Inspect a data set.

    Args:
        prefix: Path of the data set, without .bin and .idx.
        vocab_size: Ids at or above it are reported.
        eod: The end-of-document id. None guesses it.
        specials: Further ids that separate texts (BOS, EOS, ...).

    Raises:
        DataError: the data set is damaged.
    """
    dataset = IndexedDataset(prefix)
    firsts, lasts, before_last = (_CommonToken() for _ in range(3))
    buckets = np.zeros(65, np.int64)
    longest = 0
    shortest = None
    for some in _iterate_documents(dataset):
        lengths = some.lengths
        # frexp's exponent is the number of binary digits, so bucket b holds lengths [2^(b-1), 2^b).
        buckets += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=65)
        longest = max(longest, int(lengths.max()))
        if shortest is None:
            shortest = int(lengths.min())
        else:
            shortest = min(shortest, int(lengths.min()))
        # Documents of one or two tokens may have only separators, which would distort the counts.
        for common, places in (
            (firsts, some.starts[lengths > 2]),
            (lasts, some.ends[lengths > 0] - 1),
            (before_last, some.ends[lengths > 2] - 2),
        ):
            common.add(dataset.tokens[places])
    if eod is not None:
        source = "tokenizer"
    else:
        source = "none"
    # A token that ends most documents is taken as the end-of-document id.
    if eod is None and lasts.part > 0.5 and dataset.num_documents > 1:
        eod = lasts.token
        source = "guessed"
    # Sorted and unique, because specials may contain the end-of-document id.
    separators = np.array(sorted({*specials, *([] if eod is None else [eod])}), np.int64)
    # Without the tokenizer, its BOS and EOS are unknown. Frequent border tokens replace them.
    sure = source == "tokenizer"
    if not sure:
        usual = _find_usual_separators(dataset, firsts, before_last)
        separators = np.union1d(separators, usual)
    problems = _inspect_borders(dataset, eod, separators, sure=sure)
    contents = _inspect_contents(dataset, vocab_size, eod, separators, sure=sure)
    return Inspection(
        prefix=dataset.prefix,
        dtype=dataset.dtype.name,
        documents=dataset.num_documents,
        sequences=len(dataset),
        tokens=len(dataset.tokens),
        shortest=shortest or 0,
        mean=len(dataset.tokens) / max(1, dataset.num_documents),
        longest=longest,
        histogram=[(1 << b >> 1, 1 << b, int(n)) for b, n in enumerate(buckets) if n],
        smallest_id=contents.smallest,
        largest_id=contents.largest,
        vocab_size=vocab_size,
        eod=eod,
        eod_source=source,
        problems=[problem for problem in problems + contents.problems if problem.count],
    )


def report(inspection: Inspection) -> str:
    """Return the findings as text."""
    i = inspection
    known = "" if i.vocab_size is None else f", vocabulary {i.vocab_size}"
    end = "unknown: no token ends most documents"
    if i.eod is not None:
        end = f"{i.eod} ({i.eod_source})"
    lines = [
        f"{i.prefix}: {i.documents} documents, {i.sequences} sequences, {i.tokens} tokens of "
        f"{i.dtype}",
        f"document length in tokens: {i.shortest} to {i.longest}, mean {i.mean:.1f}",
    ]
    most = max((count for _, _, count in i.histogram), default=1)
    lines += [
        f"  {low:>10} - {high - 1:<10} {count:>12} {'#' * max(1, round(50 * count / most))}"
        for low, high, count in i.histogram
    ]
    lines += [f"ids: {i.smallest_id} to {i.largest_id}{known}", f"end of document: {end}"]
    for p in i.problems:
        word = "PROBLEM"
        doubt = ""
        if not p.sure:
            word = "POSSIBLE PROBLEM"
            doubt = (
                " (or a token that nearly every text begins or ends with, such as a newline; "
                "give the tokenizer's flags to find out)"
            )
        lines.append(
            f"{word} {p.kind}: {p.count} {p.text}{doubt}; for example in documents "
            f"{', '.join(map(str, p.examples))}"
        )
    shown = lines if i.problems else [*lines, "no problems found"]
    # Names of files are foreign text.
    return "\n".join(map(make_plain, shown))


def plot_lengths(inspection: Inspection, path: str) -> None:
    """Draw the histogram of document lengths to an image file.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format of the file.
        OSError: The file cannot be written.
    """
    figure = make_figure(8, 4)
    axes = figure.subplots()
    axes.bar(
        [str(low) for low, _, _ in inspection.histogram],
        [count for _, _, count in inspection.histogram],
        width=0.9,
    )
    axes.set_xlabel("tokens in a document (lower bound of each bar)")
    axes.set_ylabel("documents")
    axes.set_title(inspection.prefix)
    save_figure(figure, Path(path))


class _CommonToken:
    """The token that most documents have at some place, and how many documents have it."""

    def __init__(self) -> None:
        """Start without tokens."""
        self._counts: dict[int, int] = {}
        self._seen = 0

    def add(self, tokens: NDArray[Any]) -> None:
        """Count the tokens of further documents."""
        self._seen += len(tokens)
        for token, count in zip(*np.unique(tokens, return_counts=True), strict=True):
            self._counts[int(token)] = self._counts.get(int(token), 0) + int(count)

    @property
    def token(self) -> int:
        """The most frequent token."""
        return max(self._counts, key=lambda token: self._counts[token])

    @property
    def part(self) -> float:
        """The fraction of the documents that have it."""
        if self._seen:
            return self._counts[self.token] / self._seen
        return 0.0

    @property
    def constant(self) -> bool:
        """Whether it is too frequent to be an accident."""
        # Few documents may agree by accident.
        return self._seen >= 10 and self.part >= _CONSTANT


def _iterate_documents(dataset: IndexedDataset) -> Iterator[_DocumentBatch]:
    """Yield all documents in batches of consecutive ones."""
    place = 0
    for first in range(0, dataset.num_documents, _DOCUMENTS):
        offsets = dataset.document_offsets[first : first + _DOCUMENTS + 1]
        # Only the sizes of this batch are read. `place` is the token at which the batch begins.
        sizes = dataset.sizes[offsets[0] : offsets[-1]].astype(np.int64)
        bounds = place + np.concatenate(([0], np.cumsum(sizes)))[offsets - offsets[0]]
        yield _DocumentBatch(first, bounds[:-1], bounds[1:])
        place = int(bounds[-1])


def _show_progress(dataset: IndexedDataset, what: str) -> Iterator[_DocumentBatch]:
    """Yield the batches of documents, with a progress bar if there are many."""
    few = dataset.num_documents < 4 * _DOCUMENTS
    yield from tqdm(
        _iterate_documents(dataset), unit=f" x {_DOCUMENTS} documents", desc=what, disable=few
    )


def _find_usual_separators(
    dataset: IndexedDataset, firsts: _CommonToken, before_last: _CommonToken
) -> NDArray[np.int64]:
    """Return the ids that may be separators, because nearly all documents have them at a border.

    An id that also occurs in the middle of documents is left out. It is ordinary text, such as the
    newline at the end of a text file.
    """
    found = sorted({common.token for common in (firsts, before_last) if common.constant})
    candidates = np.array(found, np.int64)
    if not found:
        return candidates
    middle = np.zeros(len(found), np.int64)
    for some in _iterate_documents(dataset):
        # The two tokens at each border are not in the middle.
        starts = some.starts + 1
        ends = np.maximum(some.ends - 2, starts)
        for index, token in enumerate(found):
            middle[index] += _count_documents_with(dataset, token, starts, ends)
    return candidates[middle < _ORDINARY * dataset.num_documents]


def _count_documents_with(
    dataset: IndexedDataset, token: int, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> int:
    """Return how many of the ranges [start, end) of tokens contain `token`."""
    places = [np.empty(0, np.int64)]
    for begin in range(int(starts[0]), int(ends[-1]), _TOKENS):
        tokens = dataset.tokens[begin : min(begin + _TOKENS, int(ends[-1]))]
        places.append(begin + np.flatnonzero(tokens == token))
    found = np.concatenate(places)
    # The number of places before the end and before the start of each range.
    counts = np.searchsorted(found, ends) - np.searchsorted(found, starts)
    return int(np.count_nonzero(counts))


def _inspect_borders(
    dataset: IndexedDataset, eod: int | None, separators: NDArray[np.int64], *, sure: bool
) -> list[Problem]:
    """Return what is suspicious about the first and the last tokens of documents."""
    empty = Problem("empty documents", "documents have no tokens except separators")
    start = Problem(
        "separator at the beginning",
        "documents begin with a separator (EOD, BOS), but one between two documents is enough",
        sure,
    )
    doubled = Problem("doubled separator at the end", "documents end with two separators", sure)
    without = Problem(
        "no end of document", f"documents do not end with the end-of-document id {eod}", sure
    )
    for some in _show_progress(dataset, "borders"):
        lengths = some.lengths
        tokens = dataset.tokens

        def take_tokens(
            places: NDArray[np.int64], exists: NDArray[np.bool_], tokens: NDArray = tokens
        ) -> NDArray[np.int64]:
            # -1 is no token id, so a document that is too short matches no separator.
            found = np.full(len(places), -1, np.int64)
            found[exists] = tokens[places[exists]]
            return found

        last = take_tokens(some.ends - 1, lengths > 0)
        before = take_tokens(some.ends - 2, lengths > 1)
        first = take_tokens(some.starts, lengths > 0)
        # Documents without content are reported once, and not again as doubled separators.
        nothing = (lengths == 0) | (
            (lengths <= 2) & np.isin(first, separators) & np.isin(last, separators)
        )
        empty.add(nothing, some.first)
        # A document of one token is not reported, since this token may be the end of the document.
        start.add(~nothing & (lengths > 1) & np.isin(first, separators), some.first)
        doubled.add(~nothing & np.isin(last, separators) & np.isin(before, separators), some.first)
        if eod is not None:
            without.add(~nothing & (last != eod), some.first)
    return [empty, start, doubled, without]


@dataclass(frozen=True)
class _Contents:
    """The range of the ids, and what is suspicious inside documents."""

    smallest: int
    largest: int
    problems: list[Problem]


def _inspect_contents(
    dataset: IndexedDataset,
    vocab_size: int | None,
    eod: int | None,
    separators: NDArray[np.int64],
    *,
    sure: bool,
) -> _Contents:
    """Return the range of ids, wrong ids, and end-of-document ids inside documents."""
    beyond = Problem("ids beyond the vocabulary", f"token ids are not in [0, {vocab_size})")
    inside = Problem(
        "end of document inside",
        f"end-of-document ids {eod} are inside documents (special tokens in the text?)",
        sure,
    )
    low = np.iinfo(np.int64).max
    high = -1
    for some in _show_progress(dataset, "tokens"):
        # np.concatenate needs at least one array.
        eods = [np.empty(0, np.int64)]
        for begin in range(int(some.starts[0]), int(some.ends[-1]), _TOKENS):
            tokens = dataset.tokens[begin : min(begin + _TOKENS, int(some.ends[-1]))]
            # The extremes are those of all tokens so far. Without a bad id up to here, the search
            # for places can be left out.
            low = min(low, int(tokens.min()))
            high = max(high, int(tokens.max()))
            if vocab_size is not None and (high >= vocab_size or low < 0):
                # Each wrong id is counted, not only the extremes.
                beyond.add_places(
                    begin + np.flatnonzero((tokens >= vocab_size) | (tokens < 0)), some
                )
            if eod is not None:
                eods.append(begin + np.flatnonzero(tokens == eod))
        # The border of a document may lie between two chunks of tokens. Places are therefore judged
        # when the batch of documents is complete.
        inside.add_places(_find_inside(dataset, np.concatenate(eods), some, separators), some)
    return _Contents(low if high >= 0 else 0, max(high, 0), [beyond, inside])


def _find_inside(
    dataset: IndexedDataset,
    places: NDArray[np.int64],
    some: _DocumentBatch,
    separators: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return those places that are inside a document.

    Places at its beginning or end are left out, and so is the first token of a doubled separator at
    its end.
    """
    # A doubled separator at the end is reported by _inspect_borders already.
    ends = some.ends[some.lengths > 1] - 1
    doubled = ends[np.isin(dataset.tokens[ends], separators)] - 1
    border = np.concatenate(
        (some.ends[some.lengths > 0] - 1, some.starts[some.lengths > 0], doubled)
    )
    return places[~np.isin(places, border)]
