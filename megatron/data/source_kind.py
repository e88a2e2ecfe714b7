"""The interface of a kind of data: what a run asks of it, and how it builds the sources."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.config.data import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.phases import PlannedPhase
from megatron.data.registry import DatasetRegistry
from megatron.data.source import BatchSlice, Sources
from megatron.parallel.ranks import Ranks
from megatron.tokenizer import Tokenizer

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
