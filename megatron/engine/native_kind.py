"""The kind of the engine in the core, which runs every plan."""

from megatron.engine.kind import BuildEngine, EngineKind


def _load(device_type: str) -> BuildEngine:
    from megatron.engine.native import NativeEngine

    return NativeEngine


NATIVE = EngineKind("PyTorch", _load)
