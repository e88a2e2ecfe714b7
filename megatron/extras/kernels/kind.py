"""An engine with kernels. This module imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron.config.kernels import KernelsConfig
from megatron.engine.kind import BuildEngine, EngineKind

if TYPE_CHECKING:
    from megatron.engine.base import Engine


def add_kernels(kind: EngineKind, config: KernelsConfig) -> EngineKind:
    """Return a kind of engine whose model uses the kernels of the configuration.

    Args:
        kind: The kind of an engine that takes `FusedOperators`, as `EngineBase` does.
        config: The settings of kernels.
    """
    if not config.fusion_flags:
        return kind

    def load(device_type: str) -> BuildEngine:
        """Import the engine and the kernels.

        Raises:
            ConfigError: See `choose_operators` and `EngineKind.load`.
        """
        from megatron.extras.kernels.operators import choose_operators

        build: Callable[..., Engine] = kind.load(device_type)
        return partial(build, operators=choose_operators(config, device_type))

    return replace(kind, load=load)
