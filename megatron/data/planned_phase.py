"""A phase of the training data, as data.

`megatron.data.phases` reads the file of --data-phases and finds where each phase begins.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataPhase:
    """A phase as the file describes it."""

    origin: str
    """Where the file describes it, as in phases.yaml:7. Messages begin with it."""
    data_path: tuple[str, ...] = ()
    """As --data-path. Its documents are divided by --split."""
    train_weighted_split_paths: tuple[str, ...] = ()
    """As --train-weighted-split-paths, instead of `data_path`."""
    seed: int | None = None
    """Seed of the order of samples. None is --seed."""
    from_iteration: int | None = None
    """The first iteration of the phase, from 1."""
    from_tokens: int | None = None
    """The phase begins with the first iteration that starts after this many consumed tokens."""
    datasets: str | None = None
    """As --datasets, for data with --dataset-format."""
    weights: str | None = None
    """As --weights, for data with --dataset-format."""


@dataclass(frozen=True)
class PlannedPhase:
    """A phase whose beginning is known."""

    phase: DataPhase
    first_iteration: int
    start_sample: int
    """Samples that the run has consumed when the phase begins. For a phase that has started, this
    is an estimate: the value of a run whose batch sizes never changed, and at most the position."""
    started: bool
    """Whether the run has reached the start of the phase."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "PlannedPhase":
        """Return the phase that `dataclasses.asdict` recorded."""
        phase = dict(record["phase"])
        # JSON has no tuples.
        for key in ("data_path", "train_weighted_split_paths"):
            phase[key] = tuple(phase[key])
        return cls(**{**record, "phase": DataPhase(**phase)})
