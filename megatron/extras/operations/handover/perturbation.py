"""The smallest change of loaded weights, which shows how much a run amplifies rounding errors."""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from megatron.config.precision import PrecisionConfig
from megatron.parallel.shard import TensorShard


def perturb(shards: Sequence[TensorShard], precision: PrecisionConfig) -> None:
    """Change the last bit of one weight of each matrix, in the precision of the products.

    The weight follows from the name of the matrix, so each rank that holds it changes it.

    Args:
        shards: The loaded weights of this rank.
        precision: The precision of the run.
    """
    dtype, bits = torch.float32, torch.int32
    if precision.bf16 or precision.fp16:
        dtype, bits = (torch.bfloat16 if precision.bf16 else torch.float16), torch.int16
    for shard in shards:
        if shard.kind != "weight" or len(shard.global_shape) < 2:
            continue
        number = xxhash.xxh3_64_intdigest(shard.name.encode()) % int(np.prod(shard.global_shape))
        place = np.unravel_index(number, shard.global_shape)
        local = tuple(int(at) - first for at, first in zip(place, shard.offset, strict=True))
        inside = zip(local, shard.tensor.shape, strict=True)
        if all(0 <= at < size for at, size in inside):
            rounded = shard.tensor[local].to(dtype).reshape(1)
            changed = (rounded.view(bits) + 1).view(dtype)
            shard.tensor[local] = changed[0].to(shard.tensor.dtype)
