"""Import DeepSpeed in the fork server, so that new workers have it from the start."""

from megatron.engine.deepspeed import import_deepspeed

import_deepspeed("cpu")
