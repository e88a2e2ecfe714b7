"""The imports of a rank that trains."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.config.parallel import ParallelConfig


def import_training(parallel: ParallelConfig, world_size: int) -> None:
    """Import what a rank of a layout trains with, except the parts that are not the core.

    Args:
        parallel: The configuration of the layout.
        world_size: Number of processes.
    """
    model_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    with hide_from_collector():
        import megatron.run.pretrain

        # DeepSpeed has a pipeline and shards of its own.
        if parallel.deepspeed:
            return
        import megatron.engine.native

        if parallel.pipeline_model_parallel_size > 1:
            import megatron.engine.pipeline_runner
        if world_size > model_size:
            # FSDP2 imports the compiler when it shards the first module.
            import torch._dynamo  # noqa: F401

            import megatron.engine.sharding  # noqa: F401


@contextmanager
def hide_from_collector() -> Iterator[None]:
    """Exclude the objects that a `with` block creates from all garbage collections.

    The modules of torch have half a million objects that live until the end of the process. While
    they are created, Python would search them for reference cycles again and again. This takes a
    fifth of the CPU time of a start. Each full collection during training would search them too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # At its exit, Triton counts objects that were not collected, and prints them as leaks.
        atexit.register(gc.unfreeze)
