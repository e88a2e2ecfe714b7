"""What a start records about its machine, so that a later start can be compared with it."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron.base.outside_file import POINTER_BYTES, load_text

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
