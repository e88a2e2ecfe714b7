"""What a rank was started with: the first of the three values of a start.

A `Launch` becomes a `Job` once the ranks have met, and a `Run` once everything is built.
"""

from dataclasses import dataclass

from megatron.config.config_with_origin import LoadedConfig
from megatron.config.tree import Config
from megatron.parallel.launcher import LaunchedWorld, read_launcher_world
from megatron.plan.run_plan import Plan
from megatron.run.parts import NO_PARTS, Parts


@dataclass(frozen=True)
class Launch:
    """The configuration as this rank loaded it, the world around it, and the parts of the run."""

    loaded: LoadedConfig
    world: LaunchedWorld
    parts: Parts = NO_PARTS
    early: Plan | None = None
    """The plan of a run from scratch, if `check_before_torch` has resolved it."""

    @property
    def config(self) -> Config:
        """The configuration of this rank. That of rank 0 is the run's."""
        return self.loaded.config


def read_launch(loaded: LoadedConfig, parts: Parts = NO_PARTS) -> Launch:
    """Return the launch of this rank, with the world that its launcher has started.

    Args:
        loaded: The configuration as this rank loaded it.
        parts: The parts of the run besides the core.

    Raises:
        LayoutError: See `read_launcher_world`.
    """
    return Launch(loaded, read_launcher_world(loaded.config.parallel.local_rank), parts)
