"""Builds the sources of a run from its configuration: mixtures, phases, sets and synthetic data."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError, DataError
from megatron.base.plain_text import print_to_stderr
from megatron.config.data import DataConfig
from megatron.data.building import Log
from megatron.data.cache import WAIT_SECONDS
from megatron.data.indexed_source import (
    EvaluationSource,
    IndexedSource,
    check_documents_end,
    check_vocabulary,
)
from megatron.data.phases import PlannedPhase, find_phase_mixture, select_phases, use_phase
from megatron.data.position_source import PositionSource
from megatron.data.registry import DatasetRegistry
from megatron.data.segments import RequestedData, open_mixture
from megatron.data.source import BatchSlice, Source, SourceKind, SourceRequest, Sources
from megatron.data.splits import NamedMixture, find_evaluation_mixtures, find_train_mixture


class MockSource(PositionSource):
    """Source of synthetic samples, for --mock-data.

    The ids of a sample increase by 1. The first one follows from the seed, the name of the set and
    the position. A model learns this quickly, so a falling loss shows that training works.
    """

    kind = "mock"

    def __init__(
        self, name: str, seed: int, seq_length: int, batch_slice: BatchSlice, threads: int
    ) -> None:
        """Create a source. No file is read.

        Raises:
            ConfigError: the size of the vocabulary is not known.
        """
        super().__init__(name, seq_length, batch_slice, threads)
        if batch_slice.vocab_size is None:
            raise ConfigError("--mock-data has no documents, so there is no text to show.")
        self._seed = seed
        self._vocab_size = batch_slice.vocab_size

    def state(self) -> dict[str, Any]:
        """Return the position. There are no segments."""
        return {"consumed_samples": self._consumed, "segments": []}

    def fill(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> None:
        """Write the tokens of samples. See `PositionSource.fill`."""
        steps = np.arange(samples.shape[1], dtype=np.int64)
        key = [self._seed, zlib.crc32(self.name.encode())]
        for row, position in zip(samples, positions, strict=True):
            first = np.random.default_rng([*key, int(position)]).integers(self._vocab_size)
            row[:] = (first + steps) % self._vocab_size


def count_evaluation_samples(
    train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
) -> tuple[int, int]:
    """Return the number of validation and of test samples of a run.

    Args:
        train_iters: Iterations of the run.
        eval_interval: Iterations between two evaluations.
        eval_iters: Batches of each evaluation.
        global_batch_size: Samples of a global batch. With a ramp-up, its final value.
    """
    # One evaluation is added, because there is one at the end of training as well.
    return (
        train_iters // eval_interval + 1
    ) * eval_iters * global_batch_size, eval_iters * global_batch_size


def build_sources(
    request: SourceRequest,
    other: SourceKind | None = None,
    *,
    log: Log = print_to_stderr,
    wait_seconds: float = WAIT_SECONDS,
) -> Sources:
    """Open the data sets and check them.

    Indices are built by `Sources.prepare`, or at the first use.

    Args:
        request: What the run asks of its data.
        other: The kind of data of --dataset-format.
        log: Receives urgent messages while an index is built.
        wait_seconds: Longest time to wait for another process that builds the same index.

    Raises:
        ConfigError: the values of the flags cannot be parsed, or name no data at all.
        DataError: data are missing, damaged or too small, or need another vocabulary.
    """
    data = request.data
    registry = DatasetRegistry(data.data_cache_path, log=log, wait_seconds=wait_seconds)
    registry.open_indexed = request.open_indexed or registry.open_indexed
    # First, because --mock-data replaces the data of any other flag.
    if data.mock_data:
        return _build_mock_sources(request, registry)
    if data.dataset_format is not None:
        assert other is not None, "`Parts.find_missing` refuses --dataset-format without its part"
        sources = other.build(request, registry)
        if sources.train is None and request.train_samples != 0:
            asked = "" if request.train_samples is None else f"{request.train_samples:,} "
            raise DataError(
                f"--dataset-format {data.dataset_format} leaves no sample for training in "
                f"{', '.join(data.data_path)}, and the run needs {asked}training samples. Give "
                "more data, or a --split with a larger first share."
            )
        return sources
    return _build_indexed_sources(request, registry)


def _build_indexed_sources(request: SourceRequest, registry: DatasetRegistry) -> Sources:
    """Return the sources of indexed data sets."""
    data = request.data
    opener = _Opener(registry, request.seq_length, request.batch_slice)
    train = None
    # A run that only evaluates needs no training data.
    if request.train_samples is None or request.train_samples > 0:
        wanted = _list_train_mixtures(data, request.seed, request.train_samples, request.phases)
        train = IndexedSource(
            wanted[0][0].name,
            [opener.open_train(*each) for each in wanted],
            registry,
            request.batch_slice,
            data.num_workers,
        )
    evaluated: list[dict[str, Source]] = []
    counts: dict[Literal["valid", "test"], int | None] = {
        "valid": request.valid_samples,
        "test": request.test_samples,
    }
    for which, num_samples in counts.items():
        sources: dict[str, Source] = {}
        mixtures: tuple[NamedMixture, ...] = ()
        if num_samples is None or num_samples > 0:
            mixtures = find_evaluation_mixtures(data, which)
            # With phases, --split holds out documents of the first phase. All evaluations then have
            # the same samples.
            if not mixtures and request.phases:
                first = use_phase(data, request.phases[0].phase)
                mixtures = find_evaluation_mixtures(first, which)
        for mixture in mixtures:
            requested = opener.open(mixture, request.seed, num_samples)
            # Sets without documents in their split are left out. A note reports them.
            if requested is not None:
                sources[mixture.name] = EvaluationSource(
                    mixture.name, [requested], registry, request.batch_slice, data.valid_num_workers
                )
        evaluated.append(sources)
    return Sources(train, evaluated[0], evaluated[1], registry)


@dataclasses.dataclass(frozen=True)
class _Opener:
    """Opens the data sets of mixtures and checks them."""

    registry: DatasetRegistry
    seq_length: int
    batch_slice: BatchSlice

    def open(
        self, mixture: NamedMixture, seed: int, num_samples: int | None, start_sample: int = 0
    ) -> RequestedData | None:
        """Open a mixture. The result is None if its split has no documents.

        Raises:
            DataError: data are missing, damaged or too small, or need another vocabulary.
        """
        requested = open_mixture(
            mixture, seed, self.seq_length, num_samples, self.registry, start_sample
        )
        for part in () if requested is None else requested.parts:
            # A wrong tokenizer is found here, before any index is built.
            indexed = self.registry.open(part.prefix)
            check_vocabulary(indexed, self.batch_slice.vocab_size)
            if indexed.is_packed:
                if indexed.packing is None:
                    raise DataError(
                        f"{part.prefix} holds conversations, and the part that packs them is not "
                        "there. Start with pretrain_gpt.py."
                    )
                indexed.packing.check(indexed, self.seq_length, self.batch_slice.document_rules)
            elif self.batch_slice.document_rules is not None:
                check_documents_end(indexed, self.batch_slice.document_rules.eod)
        return requested

    def open_train(
        self, mixture: NamedMixture, seed: int, num_samples: int | None, start_sample: int
    ) -> RequestedData:
        """Open a mixture for training.

        Raises:
            DataError: as in `open`, or the split has no documents.
        """
        requested = self.open(mixture, seed, num_samples, start_sample)
        if requested is None:
            raise DataError(
                f"the split of {', '.join(part.prefix for part in mixture.parts)} leaves no "
                "document for training."
            )
        return requested


def _list_train_mixtures(
    data: DataConfig, seed: int, train_samples: int | None, phases: Sequence[PlannedPhase]
) -> list[tuple[NamedMixture, int, int | None, int]]:
    """Return mixture, seed, end and start of the present phase and of each later one.

    End and start are in samples of the run. The last end is None if it is not known in advance.

    Raises:
        ConfigError: no training data are given, or a value cannot be parsed.
    """
    if phases:
        ahead = select_phases(phases, train_samples)
        ends = [*(planned.start_sample for planned in ahead[1:]), train_samples]
        return [
            (
                find_phase_mixture(data, planned.phase),
                seed if planned.phase.seed is None else planned.phase.seed,
                end,
                planned.start_sample,
            )
            for planned, end in zip(ahead, ends, strict=True)
        ]
    mixture = find_train_mixture(data)
    if mixture is None:
        raise ConfigError(
            "no training data is given; use --data-path or --train-weighted-split-paths."
        )
    return [(mixture, seed, train_samples, 0)]


def _build_mock_sources(request: SourceRequest, registry: DatasetRegistry) -> Sources:
    """Return synthetic sources. They never end, so only whether a set is read matters."""

    def make(name: str, samples: int | None, threads: int) -> MockSource | None:
        if samples == 0:
            return None
        return MockSource(name, request.seed, request.seq_length, request.batch_slice, threads)

    threads = request.data.valid_num_workers
    return Sources.of_three(
        make("train", request.train_samples, request.data.num_workers),
        make("validation", request.valid_samples, threads),
        make("test", request.test_samples, threads),
        registry,
    )
