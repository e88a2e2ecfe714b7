"""Everything that changes while a run trains. All of it is stored in every checkpoint.

The counters differ from each other on purpose. A step that is dropped or skipped consumes its
samples, but does not move the learning rate.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron.base.errors import CheckpointError
from megatron.checkpoint.manifest import APPLIED_STEPS
from megatron.schedule.lr import LRSchedule

_ADDED_LATER = {
    APPLIED_STEPS,
    "data_digests",
    "tokenizer",
    "lr_seconds",
    "warmup_seconds",
    "used_train_time",
    "costs",
    "spike_guard",
    "kernels",
    "dropout_masks",
    "validated_at",
    "base",
    "pending",
}
"""Fields that older checkpoints lack. A resume from one reports what cannot be compared."""


@dataclass
class TrainState:
    """The counters and records of a run. Weights and moments are the engine's.

    The names of the fields are keys on disk, so they must not change.
    """

    iteration: int = 0
    consumed_samples: int = 0
    """Position in the data. With `consumed_tokens` it drives batch-size ramp-up and the end."""
    consumed_tokens: int = 0
    lr_samples: int = 0
    """Samples of applied steps only. The learning rate is a function of them."""
    lr_tokens: int = 0
    warmup_tokens: int = 0
    """`lr_tokens` at the end of warm-up, for decay by tokens."""
    consumed_valid_samples: int = 0
    validated_at: int = -1
    """Iteration of the last validation that `consumed_valid_samples` includes. -1: none known."""
    nan_iterations_in_a_row: int = 0
    applied_steps: int = 0
    """Steps that changed the weights. It is 0 after a checkpoint of format 2, which lacks it."""
    elapsed_seconds: float = 0.0
    """Time in training over all launches, in seconds. It is rank 0's in a checkpoint."""
    lr_seconds: float = 0.0
    """With --train-time, position of the learning rate in the time of the run."""
    warmup_seconds: float = 0.0
    """`lr_seconds` at the end of a warm-up in samples, for decay by time."""
    used_train_time: float = 0.0
    """The --train-time in seconds that is used up. A longer one continues the run."""
    costs: dict[str, float] = field(default_factory=dict)
    """What steps, evaluations and saves took. See `CostMeter`."""
    gigaflops_without_embeddings: float = 0.0
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    skip_ranges: list[list[int]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """State of the training source: its position and its segments."""
    data_digests: dict[str, str | None] = field(default_factory=dict)
    """Sampled fingerprint of a data set -> xxh3_128 of all bytes of its .bin.

    A value is None if the digest was not known at the time of the save.
    """
    tokenizer: dict[str, str] = field(default_factory=dict)
    """Role of a file in the tokenizer -> xxh3_128 of its content."""
    spike_guard: dict[str, Any] = field(default_factory=dict)
    """State of the spike guard. Empty while it is off, and it is then left out of a checkpoint."""

    kernels: dict[str, Any] = field(default_factory=dict)
    """The type of the GPUs, and the kernels in use. See `run/start/resume.py`."""
    dropout_masks: str = ""
    """Name of the formula of dropout masks. See `run/start/resume.py`."""
    base: str = ""
    """The checkpoint that the run was started from, if it is not in the folder of --save."""
    pending: list[str] = field(default_factory=list)
    """What was due after this iteration, and is repeated because a signal has interrupted it."""

    def keep_guard_windows(self, windows: list[Any]) -> None:
        """Store the ranges that the rollbacks of the spike guard skip, if there are any."""
        if windows:
            self.spike_guard = {**self.spike_guard, "windows": windows}

    def advance(self, samples: int, tokens: int) -> None:
        """Count one iteration, whether its step was applied, dropped or skipped."""
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def advance_lr(self, schedule: LRSchedule, samples: int, tokens: int) -> None:
        """Count one applied step, which moves the learning rate."""
        self.applied_steps += 1
        self.lr_samples += samples
        self.lr_tokens += tokens
        # The token count at the end of warm-up must be recorded when the run passes that point. The
        # counters of a later state do not determine it.
        self.warmup_tokens = schedule.compute_warmup_tokens(
            self.lr_samples, self.lr_tokens, self.warmup_tokens
        )
        # The time at the end of warm-up is recorded for the same reason, and only once.
        if schedule.is_warm(self.lr_samples) and not self.warmup_seconds:
            self.warmup_seconds = self.lr_seconds

    def compute_learning_rate(self, schedule: LRSchedule) -> float:
        """Return the learning rate that the next step will use."""
        return schedule.get_lr(
            self.lr_samples,
            self.lr_tokens,
            self.warmup_tokens,
            seconds=self.lr_seconds,
            warmup_seconds=self.warmup_seconds,
        )

    def compute_decoupled_learning_rate(self, schedule: LRSchedule) -> float | None:
        """Return the rate of the word embedding and the output matrix, or None if it is the same.

        See `compute_learning_rate`.
        """
        if schedule.decoupled is None:
            return None
        return self.compute_learning_rate(schedule.decoupled)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a dictionary for the checkpoint."""
        values = asdict(self)
        for name in ("spike_guard", "base", "pending"):
            if not values[name]:
                del values[name]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainState":
        """Restore the state from a checkpoint's dictionary. Unknown keys are ignored.

        Raises:
            CheckpointError: Counters are missing, so the run could not be continued exactly.
        """
        names = {f.name for f in fields(cls)}
        missing = sorted(names - _ADDED_LATER - values.keys())
        if missing:
            raise CheckpointError(
                f"the checkpoint's state lacks {', '.join(missing)}; it was written by another "
                "version"
            )
        found = {name: value for name, value in values.items() if name in names}
        # Older versions recorded the order of attention kernels alone.
        older = values.get("attention")
        if isinstance(older, dict) and "kernels" not in found:
            kernels = {"attention_backend": older.get("kernels")}
            found["kernels"] = {"gpu": older.get("gpu"), "kernels": kernels}
        return cls(**found)


_ITERATIONS = 50
"""The warning needs this many high losses in a row. A spike that recovers is shorter."""
_FACTOR = 0.2
"""A loss is high if it exceeds the usual loss by this fraction of it, and by at least _MARGIN."""
_MARGIN = 1.0
"""Without this margin, noise would cause a warning if the usual loss is very small."""


def compute_high_loss(usual: float) -> float:
    """Return the loss above which a run is probably diverging, given a usual loss. Both in nats."""
    return usual + max(_MARGIN, _FACTOR * usual)


class DivergenceWatch:
    """Warns once about a run whose loss stays far above the first one of this launch."""

    def __init__(self) -> None:
        """Create a watch that has seen no loss."""
        self._first: float | None = None
        self._above = 0
        self._warned = False

    def observe(self, loss: float, iteration: int) -> str | None:
        """Return a warning if the run seems to have diverged, and None otherwise.

        Args:
            loss: The finite loss of an applied step.
            iteration: The iteration of the step.
        """
        if self._first is None:
            self._first = loss
        limit = compute_high_loss(self._first)
        if loss > limit:
            self._above += 1
        else:
            self._above = 0
        if self._above < _ITERATIONS or self._warned:
            return None
        self._warned = True
        return (
            f"warning: the loss was above {limit:.3f} in the {_ITERATIONS} iterations up to "
            f"{iteration}. In the first iteration of this launch it was {self._first:.3f}. The run "
            "has probably diverged. Roll back to an earlier checkpoint with tools/rollback.py, and "
            "lower --lr or skip the data"
        )
