"""The devices and links of a cluster, as the cost model sees them.

Nominal values are those of data sheets. A share is the part of a nominal value that a large kernel
reaches. Shares are fitted on the runs that docs/planner.md names, or by tools/calibrate.py.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import ConfigError
from megatron.schedule.communication import Network


@dataclass(frozen=True)
class Hardware:
    """A kind of device in its usual cluster. A hardware file has the same names as keys."""

    name: str
    """Name of the hardware, for reports."""
    peak_tflops: float
    """Dense peak of matrix products in bf16, or in fp16 if the device has no bf16."""
    memory_gib: float
    """Memory of a device in GiB."""
    memory_tb_per_second: float
    """Nominal bandwidth of the memory in 10^12 bytes a second."""
    multiprocessors: int
    """Multiprocessors, which share the tiles of a matrix product."""
    ranks_per_node: int
    """Devices of a node."""
    node_gb_per_second: float
    """Nominal bandwidth of a device to the others of its node, in one direction."""
    network_gb_per_second: float
    """Nominal bandwidth of a device to other nodes, in one direction."""
    watts: float
    """Power limit of a device."""
    fp32_tflops: float | None = None
    """Peak of matrix products in fp32, outside of Tensor Cores. Only runs in fp32 need it. torch
    does not use TF32 unless it is told to."""
    gemm_share: float = 0.78
    """Share of the peak that a large matrix product reaches, without losses at its edges."""
    attention_share: float = 0.5
    """Share of the peak that a flash attention kernel reaches with heads of 128."""
    memory_share: float = 0.85
    """Share of the memory bandwidth that a pointwise kernel reaches."""
    node_share: float = 0.8
    """Share of the node's bandwidth that a large collective reaches."""
    network_share: float = 0.8
    """Share of the network's bandwidth that a large collective reaches."""
    launch_seconds: float = 4e-6
    """Shortest time of a kernel."""
    hop_seconds: float = 5e-6
    """Latency of one hop of a ring."""
    host_watts: float = 100.0
    """Power of the rest of the node for each device."""

    def get_peak(self, *, half: bool) -> float:
        """Return the peak of matrix products in FLOPs a second, in half precision or in fp32.

        Raises:
            ConfigError: There is no peak for fp32.
        """
        if half:
            return self.peak_tflops * 1e12
        if self.fp32_tflops is None:
            raise ConfigError(
                f"hardware {self.name} has no fp32_tflops, which the prediction of a run in fp32 "
                "needs; add it to the hardware file, or give --bf16 or --fp16."
            )
        return self.fp32_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        """Memory of a device in bytes."""
        return self.memory_gib * 2**30

    @property
    def memory_rate(self) -> float:
        """Bytes a second that a pointwise kernel reads and writes."""
        return self.memory_tb_per_second * 1e12 * self.memory_share

    @cached_property
    def network(self) -> Network:
        """The links, with the bandwidths that collectives reach."""
        return Network(
            self.ranks_per_node,
            self.node_gb_per_second * 1e9 * self.node_share,
            self.network_gb_per_second * 1e9 * self.network_share,
            self.hop_seconds,
        )


_ALIASES = {"a100": "a100-80g"}
"""Short names of hardware files."""
_COUNTS = ("multiprocessors", "ranks_per_node")
_FOLDER = files("megatron.cost") / "hardware"


def list_hardware() -> tuple[str, ...]:
    """Return the names of the hardware files that belong to the package."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.is_file())
    )


def load_hardware(name: str) -> Hardware:
    """Return the hardware of a name in `list_hardware`, or of a user's YAML file.

    A user's file may have the key `base`, the name of a hardware whose values it changes.

    Raises:
        ConfigError: The name is not known and there is no such file, or a value of it is wrong.
    """
    # Plans of the first versions said a100.
    name = _ALIASES.get(name, name)
    if name in list_hardware():
        return _parse((_FOLDER / f"{name}.yaml").read_text(), name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"hardware {name} is neither a known name nor a file; use one of "
            f"{', '.join(list_hardware())}, or the path of a YAML file."
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"hardware {name}: the file cannot be read: {failure}.") from None
    return _parse(text, path.stem)


_DEVICES = (
    ("GH200", "gh200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100 80GB HBM3", "h100"),
    ("A100 SXM4 80GB", "a100-80g"),
    ("A100 SXM4 40GB", "a100-40g"),
    ("V100 SXM2 32GB", "v100-32g"),
    ("V100 SXM3 32GB", "v100-32g"),
)
"""Part of a device's name -> its hardware file. The first match wins."""


def find_hardware(device_name: str) -> Hardware | None:
    """Return the hardware of a device, in its usual cluster. None if there is no file for it.

    `device_name` is the name that `torch.cuda.get_device_name` returns.
    """
    # Names are spelled with and without hyphens. Complete words are compared, as GH200 contains
    # H200.
    words = f" {device_name.replace('-', ' ')} ".upper()
    for part, name in _DEVICES:
        if f" {part} " in words:
            return load_hardware(name)
    return None


def _parse(text: str, name: str) -> Hardware:
    """Return the hardware that a YAML text describes. Its default name is `name`."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as failure:
        # A file that is nested too deeply ends in a RecursionError.
        raise ConfigError(f"hardware {name}: the file is not valid YAML: {failure}") from None
    # An empty file is None, and a list is no mapping either.
    if not isinstance(values, dict):
        raise ConfigError(f"hardware {name}: the file must be a mapping of names to values.")
    base = values.pop("base", None)
    # A file that is copied to a new name should report the new name.
    values.setdefault("name", name)
    _check_values(values, name)
    # `8.0` is a whole number, and counts are used as integers.
    values |= {key: int(values[key]) for key in _COUNTS if key in values}
    if base is not None:
        # A base is always one of the package, so that files cannot refer to each other in a cycle.
        if base not in list_hardware():
            raise ConfigError(
                f"hardware {name}: base {base!r} is not known; use one of "
                f"{', '.join(list_hardware())}."
            )
        return replace(load_hardware(base), **values)
    try:
        return Hardware(**values)
    except TypeError:
        # `_check_values` has found unknown names, so only missing ones are left.
        required = [field.name for field in fields(Hardware) if field.name not in values]
        raise ConfigError(
            f"hardware {name}: without a base, the file needs each value that has no default; it "
            f"lacks {', '.join(required)}."
        ) from None


def _check_values(values: dict[str, Any], name: str) -> None:
    known = {field.name for field in fields(Hardware)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"hardware {name}: {key!r} is not a key of a hardware file; use one of "
                f"{', '.join(sorted(known))}."
            )
        if key == "name":
            if not isinstance(value, str):
                raise ConfigError(f"hardware {name}: name is {value!r}; it must be a text.")
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # A comparison with NaN is False, so it is refused here as well.
        if not number or not 0 < value < math.inf:
            raise ConfigError(
                f"hardware {name}: {key} is {value!r}; it must be a number above 0 and finite."
            )
        if key in _COUNTS and value != int(value):
            raise ConfigError(f"hardware {name}: {key} is {value}; it must be a whole number.")
        # A share above 1 would be faster than the data sheet.
        if key.endswith("_share") and value > 1:
            raise ConfigError(f"hardware {name}: {key} is {value}; it must not exceed 1.")
