"""The parts of a run that are not in the core: their interfaces, and who needs them.

`Parts` has a builder for each part, or None if the run does not use it. `megatron.commands.parts`
fills it from the extras. The loop calls what the builders return, visibly and by name.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from megatron.base.errors import ConfigError
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.tree import Config
from megatron.engine.kind import EngineKind


class Exporter(Protocol):
    """Exports checkpoints while the run trains. Only rank 0 has one."""

    def record_checkpoint(self, iteration: int) -> None:
        """Record that a checkpoint is complete. It is exported if it is due."""

    def list_iterations_in_use(self) -> Collection[int]:
        """Return the checkpoints that are being read, and must not be removed."""

    def poll(self) -> None:
        """Report exports that have ended, and start the next one."""

    def finish(self) -> None:
        """Wait for all exports at the end of the run."""

    def stop(self) -> None:
        """End the exports immediately."""


@dataclass(frozen=True)
class Parts:
    """Builders of the parts of a run. None stands for a part that the run does not use."""

    exporter: Callable[[CheckpointConfig, Callable[[str], None], int], Exporter] | None = None
    """Builder for --hf-export-interval. It takes the settings, a printer and the last iteration."""
    engine: EngineKind | None = None
    """The kind of the engine. None stands for the engine of the core."""


NO_PARTS = Parts()
"""The core alone."""


def check_parts(config: Config, parts: Parts) -> None:
    """Refuse a configuration that asks for a part that is not there.

    Raises:
        ConfigError: A part is missing. The message names the flag and the package.
    """
    needed = [
        (
            config.checkpoint.hf_export_interval is not None,
            parts.exporter,
            "--hf-export-interval",
            "convert",
        ),
        (config.parallel.deepspeed, parts.engine, "--deepspeed", "deepspeed"),
    ]
    for is_needed, part, flag, package in needed:
        if is_needed and part is None:
            raise ConfigError(
                f"{flag} needs megatron.extras.{package}, which this installation does not have. "
                "Install the complete package, or leave out the flag"
            )
