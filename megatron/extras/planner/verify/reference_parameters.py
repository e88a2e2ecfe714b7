"""What the reference knows about each parameter, from its name alone.

The specs of the run are not read, so a wrong kind of initial value or a wrong weight decay there is
found. A parameter without a row is refused.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.model.shape import ModelShape


@dataclass(frozen=True)
class ReferenceParameter:
    """A kind of parameter."""

    start: float | Literal["norm", "table", "vector", "matrix", "output", "kernel", "rate", "step"]
    """Its initial value, or what it is if the value follows from flags or is drawn. An output
    writes to the residual stream. Only tables, matrices and outputs are subject to weight decay."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.start in ("table", "matrix", "output")

    @property
    def is_matrix_of_layer(self) -> bool:
        """Whether Muon updates it, and whether a parametrization scales it by the width."""
        return self.start in ("matrix", "output")


_ONE = ReferenceParameter(1.0)
_ZERO = ReferenceParameter(0.0)
_TABLE = ReferenceParameter("table")
_MATRIX = ReferenceParameter("matrix")
_OUTPUT = ReferenceParameter("output")
PARAMETERS = {
    "embedding.word.weight": _TABLE,
    "embedding.position": _TABLE,
    "head.weight": _TABLE,
    # The output norm of a gated delta net is never centred at zero.
    "attention.norm.weight": _ONE,
    "norm.weight": ReferenceParameter("norm"),
    "norm.bias": _ZERO,
    "attention.qkv.weight": _MATRIX,
    "attention.qkv.bias": _ZERO,
    "attention.out.weight": _OUTPUT,
    "attention.out.bias": _ZERO,
    "attention.sink": ReferenceParameter("vector"),
    **{f"attention.{part}.weight": _MATRIX for part in ("query", "key", "value", "beta", "alpha")},
    **{f"attention.{part}.weight": _MATRIX for part in ("query_down", "latent_down", "latent_up")},
    "_convolution": ReferenceParameter("kernel"),
    "attention.A_log": ReferenceParameter("rate"),
    "attention.dt_bias": ReferenceParameter("step"),
    "up.weight": _MATRIX,
    "up.bias": _ZERO,
    "gate.weight": _MATRIX,
    "gate.bias": _ZERO,
    "down.weight": _OUTPUT,
    "down.bias": _ZERO,
    "activation.alpha_p": ReferenceParameter(math.log(math.exp(0.8) - 1)),
    "activation.alpha_n": ReferenceParameter(math.log(math.exp(0.3) - 1)),
    "router.weight": _MATRIX,
    "router.bias": _ZERO,
    "experts.up": _MATRIX,
    "experts.up_bias": _ZERO,
    "experts.gate": _MATRIX,
    "experts.gate_bias": _ZERO,
    "experts.down": _OUTPUT,
    "experts.down_bias": _ZERO,
    "mlp.shared_gate": _MATRIX,
}
"""End of the name -> what it is."""


def find_row(name: str) -> ReferenceParameter:
    """Return what a parameter is.

    Raises:
        ConfigError: the reference does not know it.
    """
    for end, row in PARAMETERS.items():
        if name.endswith(end):
            return row
    raise ConfigError(
        f"{name} cannot be verified: the reference has no row for this parameter. Add it to "
        "PARAMETERS in megatron/extras/planner/verify/reference_parameters.py."
    )


def compute_initial_weight(
    name: str, size: tuple[int, ...], shape: ModelShape, seed: int
) -> Tensor:
    """Return the initial value of a parameter, from its name and the depth of the model.

    Args:
        name: Name of the parameter in the complete model.
        size: Shape of the complete parameter, without padding.
        shape: Sizes of the model.
        seed: Seed of the run.
    """
    config = shape.config
    row = find_row(name)
    if isinstance(row.start, float):
        return torch.full(size, row.start)
    if row.start == "norm":
        return torch.full(size, 0.0 if config.apply_layernorm_1p else 1.0)
    # The formulas are those of the flags' help.
    std: Any = config.init_method_std
    if std == "small":
        std = (2 / (5 * config.hidden_size)) ** 0.5
    elif std == "megatron":
        std = (1 / (3 * config.hidden_size)) ** 0.5
    # The rows of tokens and positions do not depend on the width.
    width = 1.0
    if row.is_matrix_of_layer:
        width = get_ratios(config)[0] ** 0.5
    if row.start == "output":
        std = _compute_output_std(config, std)
    # Blocks of rows are drawn, of at most this many elements. Matrices of experts have several.
    rows = max(1, 2**18 // math.prod(size[1:]))
    blocks = []
    for number, first in enumerate(range(0, size[0], rows)):
        # The names are hashed, so two layers get different numbers.
        seeds = np.random.SeedSequence((seed, zlib.crc32(name.encode()), number))
        part = (min(rows, size[0] - first), *size[1:])
        generator = np.random.Generator(np.random.SFC64(seeds))
        blocks.append(generator.standard_normal(part, dtype=np.float32))
    values = torch.from_numpy(np.concatenate(blocks))
    if row.start in ("kernel", "rate", "step"):
        return _transform(values, row.start, config)
    return values * (std / width)


def _transform(values: Tensor, start: str, config: ModelConfig) -> Tensor:
    """Return the initial values of a part of a gated delta net, from normal ones."""
    uniform = (1 + torch.erf(values.double() / 2**0.5)) / 2
    if start == "kernel":
        return ((2 * uniform - 1) / values.shape[1] ** 0.5).float()
    if start == "rate":
        return torch.log(0.01 + 15.99 * uniform).float()
    if config.linear_time_step == "one":
        return torch.ones(values.shape)
    return torch.log(torch.exp(0.001 * 100**uniform) - 1).float()


def _compute_output_std(config: ModelConfig, std: float) -> float:
    """Return the deviation of a projection that writes to the residual stream."""
    output: Any = config.output_init_method_std
    # The factor on the branches takes the place of the formula of the depth.
    if config.parametrization == "completep":
        return std
    if output is None:
        return std / float(2 * config.num_layers) ** 0.5
    if output == "wang":
        return 2 / config.num_layers / float(config.hidden_size) ** 0.5
    return float(output)


def get_ratios(model: ModelConfig) -> tuple[float, float]:
    """Return the width and the number of layers, each divided by that of the base model."""
    width, depth = 1.0, 1.0
    if model.parametrization != "standard" and model.base_width:
        width = model.hidden_size / model.base_width
    if model.parametrization == "completep" and model.base_depth:
        depth = model.num_layers / model.base_depth
    return width, depth
