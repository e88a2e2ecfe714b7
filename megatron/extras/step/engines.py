"""Chooses the engine that a configuration asks for."""

from megatron.config.tree import Config
from megatron.engine.kind import EngineKind
from megatron.engine.native_kind import NATIVE


def choose_engine(config: Config) -> EngineKind:
    """Return the kind of engine that a configuration asks for. This imports no torch."""
    from megatron.extras.step.cuda_graph.kind import add_graphs
    from megatron.extras.step.kernels.kind import add_kernels
    from megatron.extras.step.late_reading.kind import add_late_reading

    if config.parallel.deepspeed:
        from megatron.extras.step.deepspeed.kind import DEEPSPEED

        return add_kernels(DEEPSPEED)
    kind = NATIVE
    if config.precision.fp8_format is not None:
        from megatron.extras.step.float8.kind import FLOAT8

        kind = FLOAT8
    return add_graphs(add_kernels(add_late_reading(kind)))
