"""What a run does for rehearsals: it records its installation, and changes loaded weights."""

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from megatron.base.outside_file import POINTER_BYTES, load_text
from megatron.config.precision import PrecisionConfig
from megatron.parallel.shard import TensorShard

_PACKAGES = ("deepspeed", "numpy", "safetensors", "tokenizers", "torchao", "transformers", "triton")
"""Packages besides torch that may change numbers."""
_DRIVER = Path("/sys/module/nvidia/version")


def describe_installation(device_name: str) -> dict[str, Any]:
    """Return the device, NVIDIA's driver and the versions of packages.

    Args:
        device_name: Product name of the device.
    """
    found: dict[str, Any] = {"device": device_name, "cuda": torch.version.cuda}
    if _DRIVER.exists():
        found["driver"] = load_text(_DRIVER, POINTER_BYTES).strip()
    # A copy of a package on the path may have no metadata, and no version then.
    found["packages"] = {name: version(name) for name in _PACKAGES if find_spec(name) is not None}
    return found


def perturb(shards: Sequence[TensorShard], precision: PrecisionConfig) -> None:
    """Change the last bit of one weight of each matrix, in the precision of the products.

    The weight follows from the name of the matrix, so each rank that holds it changes it.

    Args:
        shards: The loaded weights of this rank.
        precision: The precision of the run.
    """
    dtype, bits = torch.float32, torch.int32
    # The integer of the same width has the bits of the number.
    if precision.bf16:
        dtype, bits = torch.bfloat16, torch.int16
    if precision.fp16:
        dtype, bits = torch.float16, torch.int16
    for shard in shards:
        # Vectors, such as norms, have few rounding errors.
        if shard.kind != "weight" or len(shard.global_shape) < 2:
            continue
        number = xxhash.xxh3_64_intdigest(shard.name.encode()) % int(np.prod(shard.global_shape))
        place = np.unravel_index(number, shard.global_shape)
        local = tuple(int(at) - first for at, first in zip(place, shard.offset, strict=True))
        # Another rank may have that part of the matrix.
        inside = zip(local, shard.tensor.shape, strict=True)
        if all(0 <= at < size for at, size in inside):
            rounded = shard.tensor[local].to(dtype).reshape(1)
            changed = (rounded.view(bits) + 1).view(dtype)
            shard.tensor[local] = changed[0].to(shard.tensor.dtype)
