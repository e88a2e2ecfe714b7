"""Filters that leave documents out of the training data while they are read.

A document that is left out gives no tokens and no special tokens. Its own token ids are judged,
after --strip-tokens and without the tokens that are put around it. Texts and token ids therefore
give the same results.

Invariant: what is left out is a function of the documents of one window. A resume reads one window
again, and so finds the same result.

Special tokens that texts spell are counted, and no document is left out for them.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.base.plain_text import format_count
from megatron.tokenizer.build import Tokenizer, list_special_token_ids

NGRAM = 10
"""Tokens of an n-gram in the repetition filter."""

KEPT = 0
TOO_LONG = 1
REPETITIVE = 2
DUPLICATE = 3

FilterCounts = tuple[tuple[int, int], ...]
"""Documents and their tokens that were judged with each outcome: `KEPT`, `TOO_LONG`, `REPETITIVE`,
`DUPLICATE`. Special tokens are not counted."""
NO_COUNTS: FilterCounts = ((0, 0),) * 4

_FLAGS = ("", "--max-document-tokens", "--max-ngram-repetition", "--drop-duplicates")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


@dataclasses.dataclass(frozen=True)
class Filters:
    """The filters of a run. A document is left out by the first one that applies."""

    max_document_tokens: int | None = None
    """Longer documents are left out."""
    max_ngram_repetition: float | None = None
    """Documents with a higher `compute_ngram_repetition` are left out."""
    drop_duplicates: bool = False
    """Documents with the same tokens as an earlier one in their window are left out."""

    @property
    def active(self) -> bool:
        """Return whether there is any filter."""
        return self != Filters()

    def judge(self, window: Sequence[NDArray[np.int64]]) -> list[int]:
        """Return the outcome for each document of a window.

        Args:
            window: The documents in the order of the file, each [n].
        """
        outcomes = [self._judge_alone(ids) for ids in window]
        if not self.drop_duplicates:
            return outcomes
        seen = set()
        for number, ids in enumerate(window):
            if outcomes[number] == KEPT:
                digest = xxhash.xxh3_128_digest(ids.tobytes())
                if digest in seen:
                    outcomes[number] = DUPLICATE
                seen.add(digest)
        return outcomes

    def _judge_alone(self, ids: NDArray[np.int64]) -> int:
        """Return the outcome for a document that does not depend on others."""
        if self.max_document_tokens is not None and len(ids) > self.max_document_tokens:
            return TOO_LONG
        limit = self.max_ngram_repetition
        if limit is not None and compute_ngram_repetition(ids) > limit:
            return REPETITIVE
        return KEPT


@dataclasses.dataclass(frozen=True)
class FilterReport:
    """What the filters have left out of one data set since the start of the run."""

    name: str
    """Name of the data set."""
    counts: FilterCounts

    @property
    def document_share(self) -> float:
        """Share of the documents that were left out."""
        return _compute_share(self.counts, 0)

    @property
    def token_share(self) -> float:
        """Share of the tokens that were left out."""
        return _compute_share(self.counts, 1)

    def to_json(self) -> dict[str, int]:
        """Return all counts by name."""
        named = {
            "documents": sum(documents for documents, _ in self.counts),
            "tokens": sum(tokens for _, tokens in self.counts),
        }
        for flag, (documents, tokens) in list(zip(_FLAGS, self.counts, strict=True))[TOO_LONG:]:
            name = flag.removeprefix("--").replace("-", "_")
            named[f"{name}_documents"] = documents
            named[f"{name}_tokens"] = tokens
        return named

    def describe(self) -> str:
        """Return the line of the log."""
        documents = sum(documents for documents, _ in self.counts)
        return (
            f"data set {self.name}: {self.document_share:.1%} of {documents:,} documents and "
            f"{self.token_share:.1%} of their tokens left out{_list_flags(self.counts)}"
        )


def parse_counts(values: Sequence[Sequence[int]]) -> FilterCounts:
    """Return counts from JSON values."""
    return tuple((documents, tokens) for documents, tokens in values)


def add_counts(first: FilterCounts, second: FilterCounts) -> FilterCounts:
    """Return the sums of two counts."""
    return tuple(
        (one[0] + other[0], one[1] + other[1]) for one, other in zip(first, second, strict=True)
    )


def count_document(counts: FilterCounts, outcome: int, tokens: int) -> FilterCounts:
    """Return the counts with one more document."""
    documents_before, tokens_before = counts[outcome]
    counted = (documents_before + 1, tokens_before + tokens)
    return (*counts[:outcome], counted, *counts[outcome + 1 :])


def describe_emptiness(counts: FilterCounts) -> str:
    """Return why no document of a list has tokens, for an error message."""
    documents = sum(documents for documents, _ in counts)
    if counts[KEPT][0] == documents:
        return "are empty"
    return f"are empty or left out{_list_flags(counts)}"


def compute_ngram_repetition(ids: NDArray[np.int64]) -> float:
    """Return the share of the tokens that are part of a repeated n-gram.

    A sequence of 10 neighbouring tokens is repeated if it occurs at least twice in the document. It
    may overlap itself. All its occurrences count, the first one included. A token that is part of
    several of them counts once. A document of less than 11 tokens has the share 0.

    Source: "fraction of characters in duplicate n-grams" of Gopher (Rae et al. 2021,
    https://arxiv.org/abs/2112.11446, table A1), here with tokens instead of words and characters.
    The n-grams are compared by a hash of 64 bits.

    Args:
        ids: The document [n].

    Returns:
        The share, from 0 to 1.
    """
    if len(ids) <= NGRAM:
        return 0.0
    hashes = _hash_ngrams(ids.view(np.uint64))
    order = np.argsort(hashes)
    ordered = hashes[order]
    equal = ordered[1:] == ordered[:-1]
    if not equal.any():
        return 0.0
    repeated = np.zeros(len(hashes), bool)
    repeated[order[1:][equal]] = True
    repeated[order[:-1][equal]] = True
    # Each one covers its tokens up to the next one. The last one covers all its tokens.
    gaps = np.diff(np.flatnonzero(repeated))
    return float(np.minimum(gaps, NGRAM).sum() + NGRAM) / len(ids)


def _hash_ngrams(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash for each of the n - 9 sequences of 10 tokens in a document [n]."""
    two = _combine(ids[:-1], ids[1:])
    four = _combine(two[:-2], two[2:])
    eight = _combine(four[:-4], four[4:])
    return _combine(eight[:-2], two[8:])


def _combine(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashes of pairs. The products wrap around at 2^64."""
    hashes = first * _MULTIPLIER
    hashes += second
    hashes ^= hashes >> _HALF
    hashes *= _MIXER
    return hashes


def _compute_share(counts: FilterCounts, column: int) -> float:
    """Return the share of what was left out: of documents (column 0), or of tokens (1)."""
    total = sum(count[column] for count in counts)
    if total == 0:
        return 0.0
    return 1 - counts[KEPT][column] / total


def _list_flags(counts: FilterCounts) -> str:
    """Return the filters that have left out documents, with the share of each, in brackets."""
    documents = sum(documents for documents, _ in counts)
    parts = [
        f"{flag}: {count[0] / documents:.1%}"
        for flag, count in zip(_FLAGS, counts, strict=True)
        if flag and count[0]
    ]
    if not parts:
        return ""
    return f" ({', '.join(parts)})"


class SpecialTokenCounter:
    """Finds the special tokens of a tokenizer in texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Search for the special tokens of `tokenizer`."""
        names = {tokenizer.decode([index]) for index in list_special_token_ids(tokenizer)} - {""}
        # A longer one may begin with a shorter one. Without any, nothing is found.
        ordered = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._are_tokens = tokenizer.encode(tokenizer.decode([tokenizer.eod])) == [tokenizer.eod]

    def count(self, texts: Iterable[str]) -> int:
        """Return how many special tokens the texts spell."""
        return sum(len(self._pattern.findall(text)) for text in texts)

    def describe(self, count: int) -> str:
        """Return the line of the log about `count` special tokens that texts spell."""
        found = f"texts spell {format_count(count, 'special token')}"
        if self._are_tokens:
            return f"{found}, and each became this token (--special-tokens-in-text)"
        return (
            f"{found}, and each is ordinary text. With --special-tokens-in-text, each would be a "
            "special token"
        )
