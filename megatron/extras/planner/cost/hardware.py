"""The devices and links of a cluster, as the cost model sees them.

Nominal values are those of data sheets. A share is the part of a nominal value that a large kernel
reaches. Shares are fitted on the runs that docs/planner_errors.md names, or by tools/calibrate.py.
"""

from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from megatron.base.errors import ConfigError
from megatron.base.outside_file import load_text
from megatron.config.yaml_file import compose, get_line, read_items


@dataclass(frozen=True)
class Network:
    """The links of a cluster. Bandwidths are those that one device reaches in one direction."""

    ranks_per_node: int
    node_bandwidth: float
    """Bytes per second of a device to the others of its node."""
    network_bandwidth: float
    """Bytes per second of a device to other nodes."""
    hop_seconds: float
    """Latency of one hop of a ring."""


@dataclass(frozen=True)
class Hardware:
    """A kind of device in its usual cluster. A hardware file has the same names as keys."""

    name: str
    """Name of the hardware, for reports."""
    peak_tflops: float
    """Dense peak of matrix products in bf16, or in fp16 if the device has no bf16."""
    memory_gib: float
    """Memory of a device in GiB, as torch reports it. It is less than the GB of the data sheet, of
    10^9 or 2^30 bytes, because the driver and error correction take some."""
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
    has_gpu: bool = True
    """Whether the device is a GPU, and not a CPU."""
    has_bf16: bool = True
    """Whether the device computes in bf16. It is written true or false."""
    has_flash: bool = True
    """Whether the device has a FlashAttention kernel. A GPU needs compute capability 8.0."""
    prefers_cudnn: bool = False
    """Whether the trainer prefers cuDNN's attention, as with compute capability 9.0."""
    has_grouped_products: bool = False
    """Whether one kernel computes the products of all experts, as with compute capability 9.0 and
    10.0."""
    fp32_tflops: float | None = None
    """Peak of matrix products in fp32, outside of Tensor Cores. Only runs in fp32 need it. torch
    does not use TF32 unless it is turned on."""
    float8_tflops: float | None = None
    """Dense peak of matrix products in float8 with sums in fp32. None: the device has none."""
    gemm_share: float = 0.78
    """Share of the peak that a large matrix product reaches, without losses at its edges."""
    attention_share: float = 0.5
    """Share of the peak that a flash attention kernel reaches with heads of 128."""
    cudnn_attention_share: float | None = None
    """The same for cuDNN's kernel, if it was measured."""
    attention_fill: float | None = None
    """Tokens of a sequence that take as long as what such a kernel does apart from them."""
    gemm_depth: int = 192
    """Length of the inner dimension of a product that takes as long as filling and emptying the
    pipeline of a tile."""
    gemm_splits: int = 1
    """1: products are not divided along the inner dimension. 2: into 2 parts if that is faster. 3:
    also into 4."""
    gemm_aligned: int = 64
    """Sizes of a product that are multiples of this many elements are read at full speed."""
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
    expert_imbalance: float = 1.0
    """Rows that the experts of the fullest rank get, in multiples of the mean. It is no property of
    a device, but all predictions for a run need it. 1 is a router in perfect balance."""
    usable_share: float = 0.9
    """Share of the memory that a layout may need and still fit. The rest is for what no prediction
    has: fragments, and the buffers of communicators."""
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

    def get_float8_peak(self) -> float:
        """Return the peak of matrix products in float8, in FLOPs a second.

        Raises:
            ConfigError: The device has no such products.
        """
        if self.float8_tflops is None:
            raise ConfigError(
                f"hardware {self.name} has no float8_tflops, because such devices have no float8 "
                "products; choose other hardware, or leave out --fp8-format."
            )
        return self.float8_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        """Memory of a device in bytes."""
        return self.memory_gib * 2**30

    @property
    def usable_bytes(self) -> float:
        """Bytes that a layout may need and still fit with the margin."""
        return self.usable_share * self.memory_bytes

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
_COUNTS = ("multiprocessors", "ranks_per_node", "gemm_depth", "gemm_splits", "gemm_aligned")
_SWITCHES = ("has_gpu", "has_bf16", "has_flash", "prefers_cudnn", "has_grouped_products")
_LEAST = 1e-9
_MOST = 1e9
"""No number of a hardware is outside of these, whatever its unit."""
_MOST_BYTES = 2**20
"""Larger files are no hardware files."""
_FOLDER = files("megatron.extras.planner.cost") / "hardware"


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
        # A checkpoint, say, would take minutes to read.
        text = load_text(path, _MOST_BYTES).removeprefix("\ufeff")
    except OSError as failure:
        raise ConfigError(
            f"--hardware {name}: {failure.strerror}; give a YAML file of a hardware "
            "(docs/planner.md)."
        ) from None
    return _parse(text, path.stem)


_DEVICES = (
    ("GH200", "gh200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100 80GB HBM3", "h100"),
    ("H100 PCIe", "h100-pcie"),
    ("L40S", "l40s"),
    ("A10", "a10"),
    ("RTX 3090", "rtx-3090"),
    ("RTX 4090", "rtx-4090"),
    ("A100 SXM4 80GB", "a100-80g"),
    ("A100 SXM4 40GB", "a100-40g"),
    ("V100 SXM2 32GB", "v100-32g"),
    ("V100 SXM3 32GB", "v100-32g"),
)
"""Part of a device's name -> its hardware file. The first match wins."""
_VARIANTS = (" TI ", " D ", " LAPTOP ", " MIG ")
"""Words of a device's name that make it another device."""


def find_hardware(device_name: str) -> Hardware | None:
    """Return the hardware of a device, in its usual cluster. None if there is no file for it.

    `device_name` is the name that `torch.cuda.get_device_name` returns.
    """
    # Names are spelled with and without hyphens. Complete words are compared, as GH200 contains
    # H200.
    words = f" {device_name.replace('-', ' ')} ".upper()
    if any(variant in words for variant in _VARIANTS):
        return None
    for part, name in _DEVICES:
        if f" {part.upper()} " in words:
            return load_hardware(name)
    return None


def _parse(text: str, name: str) -> Hardware:
    """Return the hardware that a YAML text describes. Its default name is `name`."""
    root, broken = compose(text, f"hardware {name}")
    if broken is not None:
        raise ConfigError(broken)
    errors: list[str] = []
    items = read_items(root, f"hardware {name}", "the file", errors)
    given = {key.value: node for key, node in items}
    if errors or not given:
        raise ConfigError(errors[0] if errors else f"hardware {name}: the file is empty.")
    base = given.pop("base", None)
    # A file that is copied to a new name should report the new name.
    values: dict[str, Any] = {"name": name}
    for key, node in given.items():
        try:
            values[key] = _read_value(key, node)
        except ValueError as error:
            raise ConfigError(f"hardware {name}:{get_line(node)}: {error}") from None
    if base is not None:
        return replace(_load_base(base, name), **values)
    required = [field.name for field in fields(Hardware) if field.default is MISSING]
    missing = [key for key in required if key not in values]
    if missing:
        raise ConfigError(
            f"hardware {name}: without a base, the file needs each value that has no default; it "
            f"lacks {', '.join(missing)}."
        )
    return Hardware(**values)


def _load_base(node: yaml.Node, name: str) -> Hardware:
    """Return the hardware that a file changes.

    A base is always one of the package, so that files cannot form a cycle of bases.
    """
    base = node.value
    if not isinstance(base, str) or _ALIASES.get(base, base) not in list_hardware():
        shown = f" {base}" if isinstance(base, str) else ""
        raise ConfigError(
            f"hardware {name}:{get_line(node)}: the base{shown} is not known; use one of "
            f"{', '.join(list_hardware())}."
        )
    return load_hardware(base)


def _read_value(key: str, node: yaml.Node) -> float | str | bool:
    """Return a value of a hardware file.

    The text is read as on the command line. YAML 1.1 would read 4e-6 as text, and 1:30 as 90.

    Raises:
        ValueError: The key is not known, or the value breaks a rule. The message has both.
    """
    known = sorted(field.name for field in fields(Hardware))
    if key not in known:
        raise ValueError(f"{key!r} is not a value of a hardware; known are {', '.join(known)}.")
    text = node.value
    if not isinstance(text, str):
        raise ValueError(f"{key} is a list or a mapping; it must be one value.")
    if key == "name":
        if not text.isprintable() or not text:
            raise ValueError(f"name is {text!r}; it must be a printable text.")
        return text
    if key in _SWITCHES:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key} is {text!r}; it must be true or false.")
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{key} is {text!r}; it must be a number, as in 4e-6.") from None
    _check_number(key, number)
    if key in _COUNTS:
        return int(number)
    return number


def _check_number(key: str, number: float) -> None:
    """Raise ValueError if a number of a hardware breaks a rule."""
    least = 1 if key in (*_COUNTS, "expert_imbalance") else _LEAST
    # Times and rates of such numbers would overflow. A comparison with NaN is False, so it is
    # refused here as well.
    if not least <= number <= _MOST:
        raise ValueError(f"{key} is {number:g}; it must be from {least:g} to {_MOST:g}.")
    if key in _COUNTS and number != int(number):
        raise ValueError(f"{key} is {number}; it must be a whole number.")
    # A share above 1 would be faster than the data sheet.
    if key.endswith("_share") and number > 1:
        raise ValueError(f"{key} is {number}; it must not exceed 1.")
