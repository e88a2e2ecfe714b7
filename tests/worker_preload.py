"""Modules that the fork server imports once, so that new workers have them from the start."""

import contextlib
import gc
import importlib.util

import process_pool  # noqa: F401
import torch

import megatron.engine.native

# A run imports the next two only if it uses them.
import megatron.engine.pipeline_runner
import megatron.engine.sharding
import megatron.run.start.build  # noqa: F401
from megatron.base.errors import ConfigError

# `.ci/check_core_alone.py` runs tests without extras. Without DeepSpeed, the tests that need it are
# skipped. With a GPU, DeepSpeed would start CUDA, which a fork does not survive.
if importlib.util.find_spec("megatron.extras") is not None and not torch.cuda.is_available():
    from megatron.extras.step.deepspeed.deepspeed import import_deepspeed

    with contextlib.suppress(ConfigError):
        import_deepspeed("cpu")

# The client of object stores takes a second. It starts no thread before its first use.
if importlib.util.find_spec("s3fs") is not None:
    import s3fs  # noqa: F401

# The garbage collections of the workers skip these objects. There are very many of them.
gc.freeze()
