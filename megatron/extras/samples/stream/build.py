"""Builds the sources of a run with --dataset-format from its configuration."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError, DataError
from megatron.base.host_limits import allow_open_files
from megatron.base.plain_text import format_count
from megatron.config.data import DataConfig
from megatron.data.blend import normalise, parse_shares
from megatron.data.content import FileSet
from megatron.data.phases import find_phase_shares, select_phases
from megatron.data.registry import DatasetRegistry
from megatron.data.source import SourceRequest, Sources
from megatron.data.splits import compute_split_bounds
from megatron.extras.samples.stream.filters import Filters, SpecialTokenCounter
from megatron.extras.samples.stream.formats import FORMATS, Row
from megatron.extras.samples.stream.listing import Listing, list_dataset
from megatron.extras.samples.stream.shard_order import MixturePhase, RowRange
from megatron.extras.samples.stream.source import StreamSource
from megatron.extras.samples.stream.streamed_dataset import Specials, StreamedDataset
from megatron.tokenizer.build import Tokenizer


def parse_strip_tokens(data: DataConfig) -> tuple[int, ...]:
    """Return the ids of --strip-tokens.

    Raises:
        ConfigError: the flag is not a list of ids.
    """
    try:
        return tuple(int(each) for each in (data.strip_tokens or "").split(",") if each.strip())
    except ValueError as error:
        raise ConfigError(
            f"--strip-tokens {data.strip_tokens!r} must be ids separated by commas, as in 0,1."
        ) from error


def get_filters(data: DataConfig) -> Filters:
    """Return the filters of the training data."""
    return Filters(data.max_document_tokens, data.max_ngram_repetition, data.drop_duplicates)


# Documents of a data set whose first and last ids are looked at when the run starts.
_CHECKED_DOCUMENTS = 256
# Share of documents that begin or end with the same id. By chance, the share is lower.
_NEARLY_ALL = 0.9
# With fewer documents than this for each shard, all documents of a shard might be empty.
_FEW_DOCUMENTS = 4


@dataclasses.dataclass(frozen=True)
class StreamMixtures:
    """The mixtures of a run with streamed data."""

    train: tuple[MixturePhase, ...]
    """The present phase and each later one. It is empty if there is no training."""
    valid: tuple[MixturePhase, ...]
    """One phase, or none if there is no validation."""
    test: tuple[MixturePhase, ...]
    """One phase, or none if there is no test."""

    def list_names(self) -> list[str]:
        """Return the name of each data set, once."""
        phases = [*self.train, *self.valid, *self.test]
        return list(dict.fromkeys(name for phase in phases for name in phase.shares))


def find_stream_mixtures(request: SourceRequest) -> StreamMixtures:
    """Return the mixtures of a run.

    With phases, evaluations read the documents that --split holds out of the first phase. All
    evaluations of a run then have the same samples.

    Raises:
        ConfigError: --datasets or --weights cannot be parsed.
    """
    data = request.data
    phases = request.phases
    if phases:
        train = tuple(
            MixturePhase(planned.start_sample, find_phase_shares(data, planned.phase))
            for planned in select_phases(phases, request.train_samples)
        )
        evaluation = (MixturePhase(0, find_phase_shares(data, phases[0].phase)),)
    else:
        train = (MixturePhase(0, parse_shares(data)),)
        evaluation = train
    return StreamMixtures(
        train if request.train_samples != 0 else (),
        evaluation if request.valid_samples != 0 else (),
        evaluation if request.test_samples > 0 else (),
    )


def list_streamed_datasets(
    data: DataConfig, names: Sequence[str], log: Callable[[str], None] = lambda line: None
) -> dict[str, Listing]:
    """Return the files of data sets, by their names.

    Raises:
        ConfigError: --data-path is not one folder.
        DataError: see `list_dataset`.
    """
    assert data.dataset_format is not None, "checked by the caller"
    root = data.data_path[0]
    return {
        name: list_dataset(
            _join_name(root, name),
            data.dataset_format,
            data.col_name,
            data.data_cache_path,
            log,
            data.data_cache_gb,
        )
        for name in names
    }


def _join_name(root: str, name: str) -> str:
    """Return the folder or URL of a data set."""
    if name == ".":
        return root
    return f"{root.rstrip('/')}/{name}"


class StreamedData:
    """The kind of data of --dataset-format parquet, arrow and jsonl."""

    def list_files(self, request: SourceRequest, log: Callable[[str], None]) -> None:
        """Find the files and their row groups, and store them in the cache.

        Raises:
            ConfigError: a flag cannot be parsed.
            DataError: see `list_dataset`.
        """
        list_streamed_datasets(request.data, find_stream_mixtures(request).list_names(), log)

    def build(self, request: SourceRequest, registry: DatasetRegistry) -> Sources:
        """List the files and return the sources.

        Raises:
            ConfigError: a flag cannot be parsed, or contradicts the documents.
            DataError: data are missing or damaged, or have too few documents.
        """
        data = request.data
        mixtures = find_stream_mixtures(request)
        log = registry.notes.append
        listings = list_streamed_datasets(data, mixtures.list_names(), log)
        pieces = (mixtures.train, mixtures.valid, mixtures.test)
        # Each shard keeps the file open that it reads.
        allow_open_files(data.logical_shards * len(listings) * sum(map(bool, pieces)))
        opener = _StreamOpener(request, listings, _build_tokenizer(listings, request))
        train, valid, test = (
            opener.open_source(name, piece, phases, threads, log) if phases else None
            for piece, (name, phases, threads) in enumerate(
                [
                    ("train", mixtures.train, data.num_workers),
                    ("validation", mixtures.valid, data.valid_num_workers),
                    ("test", mixtures.test, data.valid_num_workers),
                ]
            )
        )
        registry.file_sets += _list_file_sets([train, valid, test])
        return Sources.of_three(train, valid, test, registry)


def _list_file_sets(sources: Sequence[StreamSource | None]) -> list[FileSet]:
    """Return the files of each data set that is not remote, once."""
    listings = [listing for each in sources if each is not None for listing in each.listings]
    found = [listing.get_file_set() for listing in listings]
    return list({each.fingerprint: each for each in found if each is not None}.values())


def _build_tokenizer(listings: dict[str, Listing], request: SourceRequest) -> Tokenizer | None:
    """Return the tokenizer if files hold texts."""
    texts = any(listing.kind == "text" for listing in listings.values())
    if texts and request.build_tokenizer is not None:
        return request.build_tokenizer()
    return None


@dataclasses.dataclass(frozen=True)
class _StreamOpener:
    """Opens the data sets of a source."""

    request: SourceRequest
    listings: dict[str, Listing]
    tokenizer: Tokenizer | None

    @property
    def data(self) -> DataConfig:
        """The data section of the configuration."""
        return self.request.data

    def open_source(
        self,
        name: str,
        piece: int,
        phases: Sequence[MixturePhase],
        threads: int,
        log: Callable[[str], None],
    ) -> StreamSource | None:
        """Return the source of one piece of --split, or None if it has no documents.

        Raises:
            DataError: a phase of the training has no documents.
        """
        ranges = self._find_ranges(piece, phases)
        left = [_leave_out_others(phase, ranges) for phase in phases]
        for phase, before in zip(left, phases, strict=True):
            if not phase.shares and piece == 0:
                raise DataError(
                    f"--split {self.data.split} leaves no document of {self.data.data_path[0]} "
                    f"({', '.join(before.shares)}) for training."
                )
        if not ranges:
            return None
        shards = self.data.logical_shards
        if piece > 0:
            # A small set for evaluation may have fewer documents than there are shards.
            shards = min(shards, *(last - first for first, last in ranges.values()))
        # Evaluation reads all documents, so that its losses do not depend on the filters.
        filters = get_filters(self.data) if piece == 0 else Filters()
        datasets = [self._open_dataset(each, ranges[each], shards, filters) for each in ranges]
        if piece > 0 and any(has_empty_document(each) for each in datasets):
            # With several shards, one of them could have only empty documents.
            datasets = [self._open_dataset(each, ranges[each], 1, filters) for each in ranges]
        if piece == 0:
            for dataset in datasets:
                for warning in [*check_separators(dataset), *self._check_texts(dataset)]:
                    log(warning)
        return StreamSource(
            name,
            datasets,
            left,
            self.request.seq_length,
            self.request.batch_slice,
            threads,
            self.request.ranks,
            # Another data set on a resume may change the number of shards of an evaluation.
            may_restart=piece > 0,
            allow_changed_data=self.data.allow_changed_data,
        )

    def _find_ranges(
        self, piece: int, phases: Sequence[MixturePhase]
    ) -> dict[str, tuple[int, int]]:
        """Return the documents [first, last) of each data set that has some in a piece."""
        ranges = {}
        for name in dict.fromkeys(each for phase in phases for each in phase.shares):
            bounds = compute_split_bounds(self.data.split, int(self.listings[name].rows.sum()))
            if bounds[piece] < bounds[piece + 1]:
                ranges[name] = (bounds[piece], bounds[piece + 1])
        return ranges

    def _open_dataset(
        self, name: str, documents: tuple[int, int], shards: int, filters: Filters
    ) -> StreamedDataset:
        """Return one data set."""
        listing = self.listings[name]
        eos = self.data.eos_token
        if eos is None and self.tokenizer is not None and listing.kind == "text":
            eos = self.tokenizer.eod
        return StreamedDataset(
            name,
            listing,
            documents,
            self.request.seed,
            shards,
            Specials(self.data.bos_token, eos, parse_strip_tokens(self.data)),
            None if self.tokenizer is None else self._encode,
            self.request.batch_slice.vocab_size,
            filters,
        )

    def _check_texts(self, dataset: StreamedDataset) -> list[str]:
        """Return notes about null texts, and texts that spell special tokens.

        The first documents are read.
        """
        if dataset.listing.kind != "text" or self.tokenizer is None:
            return []
        rows = read_first_rows(dataset)
        texts = [row for row in rows if isinstance(row, str)]
        first = f"data set {dataset.shown_name}, its first {format_count(len(rows), 'row')}:"
        notes = []
        if len(texts) < len(rows):
            notes.append(
                f"{first} {len(rows) - len(texts):,} have no text (null, or a blank line). Each is "
                "an empty document"
            )
        counter = SpecialTokenCounter(self.tokenizer)
        if spelled := counter.count(texts):
            notes.append(f"{first} {counter.describe(spelled)}")
        return notes

    def _encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Return the ids of each text."""
        assert self.tokenizer is not None, "it is passed only with a tokenizer"
        return [np.array(ids, np.int64) for ids in self.tokenizer.encode_batch(texts)]


def _leave_out_others(phase: MixturePhase, names: Container[str]) -> MixturePhase:
    """Return a phase without the data sets that are not among `names`."""
    kept = {name: share for name, share in phase.shares.items() if name in names}
    shares = normalise(list(kept.values())) if kept else []
    return MixturePhase(phase.start_sample, dict(zip(kept, shares, strict=True)))


def check_separators(dataset: StreamedDataset) -> list[str]:
    """Compare the first documents of a data set with its special tokens.

    Returns:
        Warnings.

    Raises:
        ConfigError: nearly all documents have the token already that would be added.
        DataError: the documents cannot be read.
    """
    specials = dataset.specials
    if dataset.listing.kind == "text":
        return []
    documents = read_first_documents(dataset)
    enough = _NEARLY_ALL * len(documents)
    if not documents:
        return []
    for flag, token, place in (("--bos-token", specials.bos, 0), ("--eos-token", specials.eos, -1)):
        # The token itself was added, so the one next to it is compared.
        inner = 1 if place == 0 else -2
        doubled = sum(len(ids) > 1 and int(ids[inner]) == token for ids in documents)
        if token is not None and doubled >= enough:
            raise ConfigError(
                f"{flag} {token}: {doubled} of the first {len(documents)} documents of data set "
                f"{dataset.shown_name} have this token there already, so it would be doubled. "
                f"Leave out the flag, or add --strip-tokens {token}."
            )
    if specials.count == 0:
        most_common = [
            collections.Counter(int(ids[place]) for ids in documents).most_common(1)[0][1]
            for place in (0, -1)
        ]
        if max(most_common) < enough:
            return [
                f"warning: the documents of data set {dataset.shown_name} have no common first or "
                "last token, so the model cannot see where a text ends. Give the id of the "
                "end-of-document token with --eos-token"
            ]
    return []


def has_empty_document(dataset: StreamedDataset) -> bool:
    """Return whether a data set with few documents for each shard has an empty one.

    False if there are many documents for each shard. They are not read then.

    Raises:
        DataError: the documents cannot be read.
    """
    first, last = dataset.documents
    if dataset.specials.count > 0 or last - first >= _FEW_DOCUMENTS * dataset.shards:
        return False
    pieces = itertools.chain.from_iterable(
        dataset.open_epoch(0).list_pieces(shard) for shard in range(dataset.shards)
    )
    documents = itertools.chain.from_iterable(dataset.read_documents(0, each) for each in pieces)
    return any(len(document.ids) == 0 for document in documents)


def read_first_rows(dataset: StreamedDataset) -> list[Row]:
    """Return the first rows of the files of a data set, as they are stored.

    Raises:
        DataError: they cannot be read.
    """
    listing = dataset.listing
    group = int(np.flatnonzero(listing.rows)[0])
    path = listing.get_path(int(listing.file[group]))
    ends = (int(listing.begin[group]), int(listing.end[group]))
    rows = next(FORMATS[listing.format].read_rows(path, listing.column, *ends, 0))
    return rows[:_CHECKED_DOCUMENTS]


def read_first_documents(dataset: StreamedDataset) -> list[NDArray[np.int64]]:
    """Return the documents of the first window that is not empty, with their special tokens.

    Documents that the filters leave out are not among them.
    """
    rows: Sequence[int] = dataset.listing.rows.tolist()
    group = next(number for number, count in enumerate(rows) if count)
    piece = RowRange(group, 0, min(rows[group], _CHECKED_DOCUMENTS))
    return [document.ids for document in dataset.read_documents(0, piece) if len(document.ids)]
