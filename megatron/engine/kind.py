"""What the start of a run must know about an engine before it builds it.

A configuration that its engine cannot run is refused before torch is imported. So a kind of engine
is described without torch, and only `EngineKind.load` imports the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.base.errors import ConfigError
from megatron.config.tree import Config
from megatron.plan.rules.finding import Rule, apply_rules, list_errors, refuse_errors
from megatron.plan.run_plan import Plan

if TYPE_CHECKING:
    from megatron.engine.base import Engine, PhaseTimers
    from megatron.parallel.mesh import Mesh


BuildEngine = Callable[["Plan", "Mesh", "PhaseTimers", Callable[[], None]], "Engine"]
"""Builds an engine from the plan, the mesh, the timers and a function.

The engine calls the function before weights or moments change.
"""


@dataclass(frozen=True)
class FileSettings:
    """Settings of an engine that are in a file and not in the configuration."""

    path: str
    content: str
    """The settings as text, or why there are none. They must be equal on all ranks."""


def _describe_no_file(config: Config) -> FileSettings | None:
    return None


def _miss_kernels(device_type: str) -> str:
    return "megatron.extras.step.kernels is not installed"


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine. Its functions need no process group. Only `load` imports torch."""

    name: str
    """Its name in messages."""
    load: Callable[[str], BuildEngine]
    """Imports the engine for a type of device, "cuda" or "cpu", and returns its constructor.

    It raises ConfigError if a package that the engine needs is not installed.
    """
    flag: str = ""
    """The flag that asks for this engine. Empty for the engine of a run without such a flag."""
    rules: tuple[Rule[Plan], ...] = ()
    """They yield an error for each setting that the engine cannot run, with what to do instead."""
    file_rules: tuple[Rule[Config], ...] = ()
    """They yield an error for each file with settings of this engine that does not exist."""
    describe_settings: Callable[[Config], FileSettings | None] = _describe_no_file
    """Returns the settings that are not in the configuration. It never raises an error."""
    find_kernel_obstacle: Callable[[str], str] = _miss_kernels
    """Returns why this rank cannot run fused kernels on a type of device, or an empty text."""
    has_graphs: bool = False
    """Whether it can record microbatches as CUDA graphs."""

    def list_unsupported(self, plan: Plan) -> list[str]:
        """Return a line for each setting that the engine cannot run, with what to do instead."""
        return list_errors(apply_rules(self.rules, plan))


def refuse_unsupported(plan: Plan, kind: EngineKind) -> None:
    """Raise an error if the engine cannot run the plan.

    Raises:
        ConfigError: The engine cannot run some settings, each with a line of its own. Or a file
            with settings of the engine does not exist.
    """
    refuse_errors(apply_rules(kind.file_rules, plan.config))
    if refused := kind.list_unsupported(plan):
        lines = "".join(f"\n  {line}" for line in refused)
        raise ConfigError(f"{kind.flag or kind.name} does not support:{lines}")


def _load(device_type: str) -> BuildEngine:
    from megatron.engine.native import NativeEngine

    return NativeEngine


NATIVE = EngineKind("PyTorch", _load)
