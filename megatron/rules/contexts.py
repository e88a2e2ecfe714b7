"""What rules know besides the configuration."""

from dataclasses import dataclass

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.plan.run_plan import Plan
from megatron.schedule.position import Progress


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
