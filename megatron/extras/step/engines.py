"""Chooses the engine that a configuration asks for. This module imports no torch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.config.tree import Config
from megatron.engine.kind import NATIVE, BuildEngine, EngineKind
from megatron.extras.step.kernels.kind import add_kernels

if TYPE_CHECKING:
    from megatron.engine.base import Engine
    from megatron.parallel.mesh import Mesh
    from megatron.plan.run_plan import Plan

LATE_DEVICES = ("cuda",)
"""Types of devices that work while the host goes on. A CPU has nothing to gain."""


def choose_engine(config: Config) -> EngineKind:
    """Return the kind of engine that a configuration asks for."""
    if config.parallel.deepspeed:
        from megatron.extras.step.deepspeed.kind import DEEPSPEED

        return add_kernels(DEEPSPEED)
    kind = NATIVE
    if config.precision.fp8_format is not None:
        from megatron.extras.step.float8.kind import FLOAT8

        kind = FLOAT8
    return add_graphs(add_kernels(add_late_reading(kind)))


def add_late_reading(kind: EngineKind) -> EngineKind:
    """Return a kind whose engine reads late on a GPU, unless the plan has an obstacle.

    Args:
        kind: The kind of a `NativeEngine`.
    """

    def load(device_type: str) -> BuildEngine:
        """Import the engine. See `EngineKind.load`."""
        engine: Any = kind.load(device_type)
        if device_type not in LATE_DEVICES:
            return engine
        from megatron.extras.step.late_reading import make_late

        return make_late(engine)

    return replace(kind, load=load)


def add_graphs(kind: EngineKind) -> EngineKind:
    """Return a kind of engine that records microbatches if its plan asks for it."""

    def load(device_type: str) -> BuildEngine:
        """Import the engine. See `EngineKind.load`."""
        build: Any = kind.load(device_type)

        def build_with_graphs(plan: Plan, mesh: Mesh, *arguments: Any, **options: Any) -> Engine:
            """Build the engine. The choice of `plan.kernel_choice` is in the plan."""
            # A graph is recorded in the second step, so the engine is built as without graphs.
            engine: Engine = build(plan, mesh, *arguments, **options)
            if plan.config.kernels.cuda_graph == "on" and _has_cuda():
                from megatron.engine.native import NativeEngine
                from megatron.extras.step.cuda_graph.captured_runner import capture_microbatches
                from megatron.extras.step.cuda_graph.graph_recorder import CudaGraphRecorder

                assert isinstance(engine, NativeEngine), "no other engine has graphs"
                # Events that time collectives cannot be read if they are in a graph.
                pause = nullcontext
                if mesh.grid.world_size > 1:
                    pause = arguments[0].pause
                recorder = CudaGraphRecorder(mesh.device, pause)
                capture_microbatches(engine, plan, mesh, recorder)
            return engine

        return build_with_graphs

    return replace(kind, load=load, has_graphs=True)


def _has_cuda() -> bool:
    """Return whether torch is built for CUDA. A dry run has fake tensors of a GPU without it."""
    import torch

    return torch.backends.cuda.is_built()
