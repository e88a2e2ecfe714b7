"""The choice of engines that read late. This module imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.base.errors import ConfigError
from megatron.config.table import Absent, Table
from megatron.engine.kind import BuildEngine, EngineKind

if TYPE_CHECKING:
    from megatron.plan.run_plan import Plan

DEVICES = ("cuda",)
"""Types of devices that work while the host goes on. A CPU has nothing to gain."""
OPTIMIZERS = Table(
    "--optimizer", {"adam": "AdamW"}, Absent("cannot leave out a step on the device")
)
"""The optimizers that can, with the names of their classes."""


def find_obstacle(plan: Plan) -> str | None:
    """Return why the host reads each step of a plan before its update, or None if it reads late."""
    config = plan.config
    try:
        OPTIMIZERS.require(config.optimizer.optimizer)
    except ConfigError as absent:
        return str(absent)
    obstacles = {
        "--no-late-reading": not config.kernels.late_reading,
        "the host updates the bias of the routers": bool(plan.shape.expert_layers),
        "--log-params-norm logs the norm after each step": config.logging.log_params_norm,
        "a run by time may end after each step": plan.train_seconds is not None,
    }
    return next((reason for reason, found in obstacles.items() if found), None)


def add_late_reading(kind: EngineKind) -> EngineKind:
    """Return a kind whose engine reads late on a GPU, unless `find_obstacle` has a reason.

    Args:
        kind: The kind of a `NativeEngine`.
    """

    def load(device_type: str) -> BuildEngine:
        """Import the engine. See `EngineKind.load`."""
        engine: Any = kind.load(device_type)
        if device_type not in DEVICES:
            return engine
        from megatron.extras.step.late_reading.engine import make_late

        return make_late(engine)

    return replace(kind, load=load)
