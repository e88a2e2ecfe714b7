"""The choice of engines that read late. This module imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.engine.kind import BuildEngine, EngineKind

DEVICES = ("cuda",)
"""Types of devices that work while the host goes on. A CPU has nothing to gain."""


def add_late_reading(kind: EngineKind) -> EngineKind:
    """Return a kind whose engine reads late on a GPU, if its optimizer can leave out a step.

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
