"""The data and the tokenizer of a reduced copy: documents of different lengths.

The documents are beginnings of the run's documents. If those cannot be read, they are random. Their
ids are reduced modulo the size of the small vocabulary. A run on conversations has conversations in
its copy.

The conversations have the marks of the run's own ones. Two tokens of each say its number, so the
reference finds the conversations of a sample in its ids alone, and takes their bounds, positions
and masks from what was written. It does not read the marks in the samples of the copy.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from megatron.base.errors import MegatronError
from megatron.config.data import DataConfig
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter, choose_dtype
from megatron.extras.planner.verify.reduction import EOD, SEQUENCE, VOCABULARY
from megatron.tokenizer.build import END_OF_DOCUMENT

_DOCUMENTS = 400
"""Documents of each data set. Three steps need about 50 samples."""


def write_data(folder: Path, config: DataConfig) -> str:
    """Write both data sets of the copy and its tokenizer, and return what they are made of.

    Args:
        folder: The folder of the copy.
        config: The data of the run.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {symbol: number for number, symbol in enumerate([*alphabet, END_OF_DOCUMENT])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    # Without merges, each byte is a token.
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "data").mkdir()
    prefix, reason = _find_readable(config.data_path, packed=False)
    packed, _ = _find_readable(config.data_path, packed=True)
    for number, name in enumerate(("first", "second")):
        # Of a mixture with documents, the second set has the conversations.
        if packed is not None and (prefix is None or number):
            with IndexedDatasetWriter(folder / "data" / name, np.int32) as writer:
                for conversation in make_conversations(packed, number, _DOCUMENTS):
                    writer.add_document(conversation)
            continue
        if prefix is None:
            documents = _draw_documents(number)
        else:
            documents = _read_documents(prefix, number)
        with IndexedDatasetWriter(folder / "data" / name, choose_dtype(VOCABULARY)) as writer:
            for document in documents:
                writer.add_document(np.append(document % EOD, EOD))
    if config.mock_data:
        return "the samples of --mock-data, which have consecutive ids"
    if prefix is None and packed is None:
        return f"random tokens, because {reason}"
    kinds = {"documents": prefix, "conversations": packed}
    found = [f"the first {kind} of {path}" for kind, path in kinds.items() if path is not None]
    return f"{' and '.join(found)}, with ids modulo {EOD}"


def _find_readable(paths: Sequence[str], *, packed: bool) -> tuple[str | None, str]:
    """Return the first data set of --data-path that can be read, or None and the reason.

    Args:
        paths: The values of --data-path.
        packed: Whether it must hold conversations. Otherwise it must hold documents.
    """
    # A mixture alternates weights and paths.
    prefixes = paths if len(paths) == 1 else paths[1::2]
    reason = "the command has no --data-path with indexed data"
    for prefix in prefixes:
        if "://" in prefix:
            reason = f"{prefix} is not on this machine"
            continue
        try:
            indexed = IndexedDataset(prefix)
        except MegatronError as failure:
            reason = f"the data cannot be read: {failure}"
            continue
        if indexed.is_packed != packed:
            continue
        if indexed.num_documents >= 2:
            return prefix, ""
        reason = f"{prefix} has fewer than 2 documents"
    return None, reason


def _draw_documents(seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield random documents. Some are shorter than a sample, and some are longer."""
    generator = np.random.default_rng(seed)
    for _ in range(_DOCUMENTS):
        # A skewed distribution, so that ids repeat and their gradients add up.
        yield np.minimum(generator.geometric(0.02, generator.integers(3, 2 * SEQUENCE)), EOD) - 1


def _read_documents(prefix: str, number: int) -> Iterator[NDArray[np.int64]]:
    """Yield the beginnings of a data set's documents, every second one, from `number` on."""
    indexed = IndexedDataset(prefix)
    for index in range(_DOCUMENTS):
        # Both sets of a mixture then have different documents.
        document = (2 * index + number) % len(indexed)
        length = min(3 + (7 * index) % (2 * SEQUENCE), int(indexed.sizes[document]))
        yield indexed.get(document, 0, length).astype(np.int64)


_BASE = 250
"""Numbers are written in this base."""
_SHORTEST = 4
"""Tokens of the shortest conversation: one before its number, two of it, and one that counts."""


def make_conversations(prefix: str, number: int, count: int) -> Iterator[NDArray[np.int64]]:
    """Yield beginnings of a run's conversations, with marks and with ids below `EOD`.

    Args:
        prefix: The run's conversations.
        number: Number of the data set of the copy. Both sets have different conversations.
        count: How many are made.
    """
    indexed = IndexedDataset(prefix)
    for index in range(count):
        wanted = _SHORTEST + (7 * index) % (SEQUENCE - _SHORTEST)
        stored = indexed[(2 * index + number) % len(indexed)].astype(np.int64)
        # A short conversation is repeated, and its first token never counts.
        stored = np.resize(stored, max(_SHORTEST, min(wanted, len(stored))))
        counted = stored >= 0
        # No token predicts the first one.
        counted[0] = False
        # A conversation without a token that counts would compare nothing.
        counted[-1] |= not counted.any()
        ids = np.maximum(stored, ~stored) % EOD
        ids[1:3] = divmod(2 * index + number, _BASE)
        yield np.where(counted, ids, ~ids)


class Conversations:
    """The conversations of a copy, by the tokens that say their numbers."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Read the data sets that hold conversations."""
        self._by_number: dict[tuple[int, ...], NDArray[np.int64]] = {}
        for prefix in prefixes:
            indexed = IndexedDataset(prefix)
            # A mixture has documents too.
            for number in range(len(indexed) * indexed.is_packed):
                stored = np.asarray(indexed[number], np.int64)
                self._by_number[tuple(np.maximum(stored, ~stored)[1:3].tolist())] = stored

    def find(self, sample: NDArray[np.int64]) -> tuple[list[int], NDArray[np.bool_]] | None:
        """Return where conversations and the padding of a sample begin, and which tokens count.

        None if the sample is not made of whole conversations, so it has documents.

        Args:
            sample: The ids of a sample, int64[s + 1].
        """
        starts = []
        counted = np.zeros(len(sample), bool)
        at = 0
        while at < len(sample):
            stored = self._by_number.get(tuple(sample[at + 1 : at + 3].tolist()))
            starts.append(at)
            rest = sample[at:]
            # A conversation is stored with marks.
            if stored is None or not np.array_equal(
                rest[: len(stored)], np.maximum(stored, ~stored)
            ):
                # Only padding may be left. A sample of padding alone is none of conversations.
                if rest.any() or len(starts) == 1:
                    return None
                return starts, counted
            counted[at : at + len(stored)] = stored >= 0
            at += len(stored)
        return starts, counted
