"""Chooses the engine that a configuration asks for. This module imports no torch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.config.tree import Config
from megatron.engine.kind import NATIVE, BuildEngine, EngineKind
from megatron.extras.step.kernels.kind import find_kernel_obstacle, list_options

if TYPE_CHECKING:
    from megatron.engine.base import Engine
    from megatron.parallel.mesh import Mesh
    from megatron.plan.run_plan import Plan

LATE_DEVICES = ("cuda",)
"""Types of devices that work while the host goes on. A CPU has nothing to gain."""


def choose_engine(config: Config) -> EngineKind:
    """Return the kind of engine that a configuration asks for."""
    kind = NATIVE
    if config.parallel.deepspeed:
        from megatron.extras.step.deepspeed.kind import DEEPSPEED

        kind = DEEPSPEED
    elif config.precision.fp8_format is not None:
        from megatron.extras.step.float8.kind import FLOAT8

        kind = FLOAT8
    return replace(
        kind,
        load=partial(_load, kind, is_native=not config.parallel.deepspeed),
        find_kernel_obstacle=find_kernel_obstacle,
        has_graphs=not config.parallel.deepspeed,
    )


def _load(kind: EngineKind, device_type: str, *, is_native: bool) -> BuildEngine:
    """Import an engine, and return what builds it with its kernels. See `EngineKind.load`.

    Args:
        kind: Imports the engine.
        device_type: "cuda" or "cpu".
        is_native: Whether it is a `NativeEngine`. On a GPU, it reads late unless the plan has an
            obstacle, and records microbatches if the plan asks for it.
    """
    build: Any = kind.load(device_type)
    if is_native and device_type in LATE_DEVICES:
        from megatron.extras.step.late_reading import make_late

        build = make_late(build)

    def build_with_kernels(plan: Plan, mesh: Mesh, *arguments: Any) -> Engine:
        """Build the engine. The choice of `plan.kernel_choice` is in the plan."""
        # A graph is recorded in the second step, so the engine is built as without graphs.
        engine: Engine = build(plan, mesh, *arguments, **list_options(plan, device_type))
        if is_native and plan.config.kernels.cuda_graph == "on" and _has_cuda():
            from megatron.engine.native import NativeEngine
            from megatron.extras.step.cuda_graph import CudaGraphRecorder, capture_microbatches

            assert isinstance(engine, NativeEngine), "no other engine has graphs"
            # Events that time collectives cannot be read if they are in a graph.
            pause = arguments[0].pause if mesh.grid.world_size > 1 else nullcontext
            capture_microbatches(engine, plan, mesh, CudaGraphRecorder(mesh.device, pause))
        return engine

    return build_with_kernels


def _has_cuda() -> bool:
    """Return whether torch is built for CUDA. A dry run has fake tensors of a GPU without it."""
    import torch

    return torch.backends.cuda.is_built()
