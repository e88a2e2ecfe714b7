"""Modules that the fork server imports once, so that new workers have them from the start."""

import contextlib
import gc

import process_pool  # noqa: F401
import torch

import megatron.engine.native

# A run imports the next two only if it uses them.
import megatron.engine.pipeline
import megatron.engine.sharding
import megatron.run.start.setup  # noqa: F401
from megatron.base.errors import ConfigError
from megatron.extras.deepspeed.deepspeed import import_deepspeed

# Without DeepSpeed, the tests that need it are skipped. With a GPU, DeepSpeed would start CUDA,
# which a fork does not survive.
if not torch.cuda.is_available():
    with contextlib.suppress(ConfigError):
        import_deepspeed("cpu")

# The garbage collections of the workers skip these objects. There are very many of them.
gc.freeze()
