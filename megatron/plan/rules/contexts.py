"""The data that rules need besides the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.data import TokenizerConfig
from megatron.config.fields import ConfigWithOrigin
from megatron.config.tree import Config
from megatron.plan.run_plan import Plan
from megatron.schedule.lr import LRSchedule
from megatron.schedule.position import Progress
from megatron.schedule.skip import SkipRange


@dataclass(frozen=True)
class PlanContext(ConfigWithOrigin):
    """The number of ranks, and what follows from it and the configuration.

    Values that are out of their range are replaced, so that each number of the plan exists.
    """

    plan: Plan
    """The plan of this configuration, without findings."""
    position: Progress | None
    """Where the run starts. None if only its checkpoint knows."""
    may_read_files: bool
    """Whether rules may look for files."""

    @property
    def start(self) -> Progress:
        """Where the run starts. It is the first sample if the position is not known."""
        return self.position or Progress()

    @property
    def iterations_ahead(self) -> range:
        """The iterations still to come, if samples or iterations end the run."""
        return range(self.start.iteration + 1, self.plan.train_iters + 1)


@dataclass(frozen=True)
class TokenizerContext:
    """A tokenizer, and the files of the tokenizer that a checkpoint was trained with."""

    tokenizer: TokenizerConfig
    iteration: int
    """Iteration of the checkpoint."""
    saved_digests: Mapping[str, str]
    """Role of a file -> digest of its content in the checkpoint."""


@dataclass(frozen=True)
class ResumeContext(TokenizerContext):
    """A run, and the checkpoint that it continues."""

    given: Config
    """The configuration of the command line."""
    plan: Plan
    """The plan of the run. Its learning rate and its skipped ranges are those of `given`."""
    saved: Config
    """The configuration of the checkpoint."""
    has_states: bool
    """Whether the checkpoint has the states of an optimizer."""
    saved_schedule: LRSchedule | None
    saved_ranges: tuple[SkipRange, ...]
