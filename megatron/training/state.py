"""What changes while a run trains, all of it, and all of it in every checkpoint.

Counters differ on purpose: a step that is dropped or skipped consumes its samples but does not move the learning rate.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron.checkpoint.manifest import APPLIED_STEPS
from megatron.errors import CheckpointError
from megatron.schedule.lr import LRSchedule

_ADDED_LATER = {APPLIED_STEPS, "data_digests", "tokenizer"}
"""Fields that older checkpoints lack. A resume from one reports what cannot be compared."""


@dataclass
class TrainState:
    iteration: int = 0
    consumed_samples: int = 0
    """Position in the data; with `consumed_tokens` it drives batch-size ramp-up and the end."""
    consumed_tokens: int = 0
    lr_samples: int = 0
    """Samples of applied steps only: the learning rate's clock."""
    lr_tokens: int = 0
    warmup_tokens: int = 0
    """`lr_tokens` at the end of warm-up, for decay by tokens."""
    consumed_valid_samples: int = 0
    nan_iterations_in_a_row: int = 0
    applied_steps: int = 0
    """Steps that changed the weights; 0 at a checkpoint of format 2, which does not say."""
    elapsed_seconds: float = 0.0
    """Time in training over all launches."""
    gigaflops_without_embeddings: float = 0.0
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    skip_ranges: list[list[int]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """The training source's state: position and segments."""
    data_digests: dict[str, str | None] = field(default_factory=dict)
    """Sampled fingerprint of a data set -> xxh3_128 of its whole .bin; None where it was not computed yet."""
    tokenizer: dict[str, str] = field(default_factory=dict)
    """Part that a file plays in the tokenizer -> xxh3_128 of its content."""

    def advance(self, samples: int, tokens: int) -> None:
        """One iteration went by, whatever became of it."""
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def advance_lr(self, schedule: LRSchedule, samples: int, tokens: int) -> None:
        """Its step was applied."""
        self.applied_steps += 1
        self.lr_samples += samples
        self.lr_tokens += tokens
        self.warmup_tokens = schedule.compute_warmup_tokens(
            self.lr_samples, self.lr_tokens, self.warmup_tokens
        )

    def compute_learning_rate(self, schedule: LRSchedule) -> float:
        """The rate that the next step will use."""
        return schedule.get_lr(self.lr_samples, self.lr_tokens, self.warmup_tokens)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainState":
        """
        Raises:
            CheckpointError: counters are missing: the run could not be continued exactly.
        """
        names = {f.name for f in fields(cls)}
        missing = sorted(names - _ADDED_LATER - values.keys())
        if missing:
            raise CheckpointError(
                f"the checkpoint's state lacks {', '.join(missing)}; it was written by another version"
            )
        return cls(**{name: value for name, value in values.items() if name in names})
