"""Computes how often a run reads its training data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.base.errors import DataError
from megatron.base.plain_text import format_count, format_some
from megatron.config.data import DataConfig
from megatron.data.blend import normalise
from megatron.data.gpt_dataset import count_tokens
from megatron.data.indexed import IndexedDataset
from megatron.data.phases import PlannedPhase, find_phase_mixture
from megatron.data.splits import NamedMixture, find_train_mixture

MANY_EPOCHS = 4
"""Up to this number, repeated data are almost as good as new data.

Source: https://arxiv.org/abs/2305.16264.
"""


@dataclass(frozen=True)
class DatasetUse:
    """One training data set, and what a run reads of it."""

    prefix: str
    tokens: int
    """Tokens of the documents for training."""
    asked: float
    """Tokens that the run reads of this data set. Repeated tokens count each time."""
    filled: float = 1.0
    """Share of these that the data fill. Samples of conversations have padding at their ends."""

    @property
    def epochs(self) -> float:
        """How often each token is read."""
        return self.asked * self.filled / self.tokens


def measure_training_data(
    data: DataConfig,
    tokens: int,
    open_dataset: Callable[[str], IndexedDataset] = IndexedDataset,
    phases: Sequence[PlannedPhase] = (),
    samples: int = 0,
    seq_length: int = 0,
) -> list[DatasetUse]:
    """Return the training data sets of a run that reads `tokens` tokens.

    Data sets whose split has no document for training are left out. Synthetic and streamed data
    are not among them.

    Args:
        data: The data section of the configuration.
        tokens: Tokens that the run reads of all data sets together.
        open_dataset: Opens the data set with a prefix.
        phases: The phases of --data-phases. The data of phases that are over may be missing.
        samples: Samples of the run. It is needed only with phases.
        seq_length: Tokens of a sample. It is needed only for conversations.

    Raises:
        ConfigError: The values of the flags cannot be parsed.
        DataError: A data set is missing or damaged.
    """
    # Streamed data are described by their source.
    if data.mock_data or data.dataset_format is not None:
        return []
    if phases:
        return _measure_phases(data, tokens, open_dataset, phases, samples, seq_length)
    mixture = find_train_mixture(data)
    if mixture is None:
        return []
    return _measure_mixture(mixture, tokens, open_dataset, seq_length)


def _measure_phases(
    data: DataConfig,
    tokens: int,
    open_dataset: Callable[[str], IndexedDataset],
    phases: Sequence[PlannedPhase],
    samples: int,
    seq_length: int,
) -> list[DatasetUse]:
    """Return the data sets of all phases. See `measure_training_data`."""
    found: dict[tuple[str, int], DatasetUse] = {}
    ends = [*(planned.start_sample for planned in phases[1:]), samples]
    present = sum(planned.started for planned in phases) - 1
    for number, (planned, end) in enumerate(zip(phases, ends, strict=True)):
        share = max(0, min(end, samples) - planned.start_sample) / max(1, samples)
        # Training ends before the phase. Its data may not exist yet.
        if share == 0:
            continue
        try:
            uses = _measure_mixture(
                find_phase_mixture(data, planned.phase), share * tokens, open_dataset, seq_length
            )
        except DataError:
            if number < present:
                continue
            raise
        # Several phases may read the same documents.
        for use in uses:
            key = (use.prefix, use.tokens)
            asked = use.asked + (found[key].asked if key in found else 0.0)
            found[key] = replace(use, asked=asked)
    return list(found.values())


def _measure_mixture(
    mixture: NamedMixture,
    tokens: float,
    open_dataset: Callable[[str], IndexedDataset],
    seq_length: int,
) -> list[DatasetUse]:
    """Return the data sets of a mixture that gives `tokens` tokens."""
    found = []
    for part in mixture.parts:
        indexed = open_dataset(part.prefix)
        documents = part.select_documents(len(indexed))
        there = count_tokens(indexed, documents)
        filled = 1.0
        if seq_length and indexed.packing is not None:
            count = indexed.packing.count_samples(indexed, documents, seq_length)
            filled = min(1.0, there / (count * seq_length))
        if there:
            found.append((part, there, filled))
    if not found:
        return []
    shares = normalise([part.weight for part, *_ in found])
    return [
        DatasetUse(part.prefix, there, share * tokens, filled)
        for (part, there, filled), share in zip(found, shares, strict=True)
    ]


def describe_epochs(uses: Sequence[DatasetUse]) -> str:
    """Return one phrase about how often the data are read."""
    asked = sum(use.asked for use in uses)
    there = sum(use.tokens for use in uses)
    if len(uses) == 1:
        epochs = f"{uses[0].epochs:.3g} epochs"
    else:
        lowest = min(use.epochs for use in uses)
        highest = max(use.epochs for use in uses)
        epochs = f"{lowest:.3g} to {highest:.3g} epochs of {len(uses)} data sets"
    padding = 1 - sum(use.asked * use.filled for use in uses) / max(1.0, asked)
    packed = f", {padding:.1%} of them padding" if padding > 0 else ""
    return f"{epochs}: {asked:,.0f} tokens asked for{packed}, {there:,} available"


def warn_about_many_epochs(uses: Sequence[DatasetUse]) -> list[str]:
    """Return one warning about all data sets that are read more than a few times, if any."""
    many = sorted((use for use in uses if use.epochs > MANY_EPOCHS), key=lambda use: -use.epochs)
    if not many:
        return []
    shown = format_some(
        f"{use.prefix} has {use.tokens:,} tokens for training, and the run reads {use.asked:,.0f} "
        f"from it, which is {use.epochs:,.1f} epochs"
        for use in many
    )
    return [
        f"{format_count(len(many), 'data set')} with many epochs: {shown}. More than {MANY_EPOCHS} "
        "epochs improve the model little. Use more data, or a shorter run"
    ]
