"""What the training loop needs of a source of batches, and all sources of a run.

`SourceKind` is the interface of a kind of data: what a run asks of it, and how it builds the
sources.

Invariant: what `read_batch` returns is a function of the state, the configuration and the rank's
coordinate. Threads do not influence it, nor does the way in which the position was reached. All
ranks together read the same samples whatever their number. The position is one number. Resume,
skipping and rolling back therefore only set this number.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.config.data import DataConfig
from megatron.data.batches import Microbatch
from megatron.data.documents import DocumentRules
from megatron.data.indexed import IndexedDataset
from megatron.data.phases import PlannedPhase
from megatron.data.registry import DatasetRegistry
from megatron.parallel.ranks import Ranks
from megatron.tokenizer.build import Tokenizer


@dataclasses.dataclass(frozen=True)
class BatchSlice:
    """The part of each batch that a rank reads."""

    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    vocab_size: int | None = None
    """An id that is not below it is a DataError. None disables the check."""
    document_rules: DocumentRules | None = None
    """Masks and positions that follow from document borders. None leaves samples as they are."""


class LeftOut(Protocol):
    """What the filters have left out of one data set since the start of the run."""

    @property
    def name(self) -> str:
        """Name of the data set."""

    @property
    def document_share(self) -> float:
        """Share of the documents that were left out."""

    def to_json(self) -> dict[str, int]:
        """Return all counts by name, for the metrics."""

    def describe(self) -> str:
        """Return the line of the log."""


class Source(Protocol):
    """What the training loop needs of a source."""

    name: str

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks together have read or skipped."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digest of each data set that is not in the registry, by its name."""

    def prepare(self) -> None:
        """Build or open all indices now."""

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values. All ranks call it together."""

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state belongs to other data.
        """

    def advance(self, samples: int) -> None:
        """Skip samples without reading them."""

    @property
    def has_batch(self) -> bool:
        """Whether the next batch is probably in memory, so that `read_batch` returns at once."""

    def read_ahead(self, batch_size: int, seq_length: int | None = None) -> None:
        """Read the next batch into memory, in any thread. The position does not move.

        An error of the read is raised by `read_batch`. See there for the arguments.
        """

    def read_batch(self, batch_size: int, seq_length: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the next global batch, in order.

        Args:
            batch_size: Samples of all ranks.
            seq_length: Sequences are truncated to it. None means the full sequence length.

        Raises:
            DataError: the data end, are damaged, or have an id outside the vocabulary.
        """

    def take_notes(self) -> list[str]:
        """Return messages for the user since the last call that are not in the registry."""

    def close(self) -> None:
        """Stop the reading threads."""


class TrainSource(Source, Protocol):
    """What the training loop needs of the source of training samples."""

    @property
    def has_filters(self) -> bool:
        """Return whether documents are left out."""

    def must_extend(self, batch_size: int) -> bool:
        """Return whether endless data must be extended before the next batch."""

    def extend(self, batch_size: int) -> None:
        """Add passes over endless data, so that the next batch is covered.

        Raises:
            DataError: an index cannot be built.
        """

    def describe(self) -> tuple[str, str] | None:
        """Return what is read, and how much there is, for the table at the start.

        None if `measure_training_data` describes the data.
        """

    def take_filter_reports(self) -> Sequence[LeftOut]:
        """Return what the filters had left out at the last call of `state`, once.

        The reports are those of the whole run, over all ranks.
        """


@dataclasses.dataclass(frozen=True)
class Sources:
    """All sources of a run. `train` is None if no training samples are requested."""

    train: TrainSource | None
    valid: dict[str, Source]
    test: dict[str, Source]
    registry: DatasetRegistry

    @classmethod
    def of_three(
        cls,
        train: TrainSource | None,
        valid: Source | None,
        test: Source | None,
        registry: DatasetRegistry,
    ) -> "Sources":
        """Return the sources of data with at most one set for validation and one for the test."""
        return cls(
            train,
            {"validation": valid} if valid is not None else {},
            {"test": test} if test is not None else {},
            registry,
        )

    @property
    def all(self) -> list[Source]:
        """All sources, training first."""
        return [*([self.train] if self.train else []), *self.valid.values(), *self.test.values()]

    def prepare(self) -> None:
        """Build or open every index now.

        Call it after `load` and before the first step. Any number of ranks may call it at the same
        time. One process builds, and the others wait for its file lock.

        Raises:
            DataError: the data are missing, damaged or have changed, or an index cannot be built.
        """
        for source in self.all:
            source.prepare()

    def take_notes(self) -> list[str]:
        """Return messages for the user since the last call, each once.

        They report changed orders, rebuilt caches and empty splits.
        """
        # Several sources may use the same cache or files and report the same about it.
        notes = list(self.registry.notes)
        self.registry.notes.clear()
        for source in self.all:
            notes += source.take_notes()
        return list(dict.fromkeys(notes))

    def state(self) -> dict[str, Any]:
        """Return the state of all sources, as JSON values."""
        return {
            "train": None if self.train is None else self.train.state(),
            "valid": {name: source.state() for name, source in self.valid.items()},
            "test": {name: source.state() for name, source in self.test.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state. Sources that it does not contain start at their first sample.

        Raises:
            DataError: a recorded order cannot be rebuilt any more.
        """
        if self.train is not None and state.get("train") is not None:
            self.train.load(state["train"])
        for kind, sources in (("valid", self.valid), ("test", self.test)):
            for name, source in sources.items():
                # The configuration may have added sets since the state was recorded.
                if name in state.get(kind, {}):
                    source.load(state[kind][name])

    def close(self) -> None:
        """Stop all threads, including the one of the background checks."""
        self.registry.background.close()
        for source in self.all:
            source.close()


OpenIndexed = Callable[[str], IndexedDataset]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """What a run asks of its data."""

    data: DataConfig
    seq_length: int
    """Tokens of a sample, without the last label."""
    seed: int
    """Seed of the data order."""
    train_samples: int | None
    """Samples that training will read. 0 opens no training data. None: the number is not known in
    advance."""
    valid_samples: int | None
    """Samples that all validations together will read. None: the number is not known in advance."""
    test_samples: int
    """Samples that the test will read."""
    batch_slice: BatchSlice
    """The part of each batch that this rank reads."""
    phases: Sequence[PlannedPhase] = ()
    """The phases of --data-phases. Without them, one mixture is read from start to end. Phases
    before the current one are not opened."""
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    """The ranks that read together."""
    build_tokenizer: Callable[[], Tokenizer] | None = None
    """Builds the tokenizer. It is called only if the data hold texts."""
    open_indexed: OpenIndexed | None = None
    """Opens the indexed data set at a path. None opens no manifest of several."""


class SourceKind(Protocol):
    """A kind of data."""

    def list_files(self, request: SourceRequest, log: Callable[[str], None]) -> None:
        """Find the files on rank 0, before all ranks call `build`.

        Results that take long are stored in a cache, so that other ranks need not open all files.

        Args:
            request: What the run asks.
            log: Prints a line of the log.

        Raises:
            ConfigError: A flag cannot be parsed.
            DataError: Data are missing or damaged.
        """

    def build(self, request: SourceRequest, registry: DatasetRegistry) -> Sources:
        """Return the sources of this rank. It must not communicate.

        Args:
            request: What the run asks.
            registry: The sources refer to it. Messages for the user go to its `notes`. The bytes
                of the files in its `file_sets` are compared with the checkpoint at each save.

        Raises:
            ConfigError: A flag cannot be parsed, or this kind of data cannot do what it asks.
            DataError: Data are missing, damaged or too small.
        """
