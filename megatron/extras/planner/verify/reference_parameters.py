"""What the reference knows about each parameter, from its name alone.

The specs of the run are not read, so a wrong kind of initial value or a wrong weight decay there is
found. A parameter without a row is refused.
"""

import math
import zlib
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.model.shape import ModelShape

Start = float | Literal["norm", "table", "vector", "matrix", "output", "kernel", "rate", "step"]
"""The initial value of a parameter, or what it is if the value follows from flags or is drawn. An
output writes to the residual stream."""
PARAMETERS: dict[str, Start] = {
    "embedding.word.weight": "table",
    "embedding.position": "table",
    "head.weight": "table",
    # The output norm of a gated delta net is never centred at zero.
    "attention.norm.weight": 1.0,
    "norm.weight": "norm",
    "norm.bias": 0.0,
    "attention.qkv.weight": "matrix",
    "attention.qkv.bias": 0.0,
    "attention.out.weight": "output",
    "attention.out.bias": 0.0,
    "attention.sink": "vector",
    **{f"attention.{part}.weight": "matrix" for part in ("query", "key", "value", "beta", "alpha")},
    **{f"attention.{part}.weight": "matrix" for part in ("query_down", "latent_down", "latent_up")},
    "_convolution": "kernel",
    "attention.A_log": "rate",
    "attention.dt_bias": "step",
    "up.weight": "matrix",
    "up.bias": 0.0,
    "gate.weight": "matrix",
    "gate.bias": 0.0,
    "down.weight": "output",
    "down.bias": 0.0,
    "activation.alpha_p": math.log(math.exp(0.8) - 1),
    "activation.alpha_n": math.log(math.exp(0.3) - 1),
    "router.weight": "matrix",
    "router.bias": 0.0,
    "experts.up": "matrix",
    "experts.up_bias": 0.0,
    "experts.gate": "matrix",
    "experts.gate_bias": 0.0,
    "experts.down": "output",
    "experts.down_bias": 0.0,
    "mlp.shared_gate": "matrix",
}
"""End of the name -> how it starts."""


def find_start(name: str) -> Start:
    """Return how a parameter starts.

    Raises:
        ConfigError: the reference does not know it.
    """
    for end, start in PARAMETERS.items():
        if name.endswith(end):
            return start
    raise ConfigError(
        f"{name} cannot be verified: the reference has no row for this parameter. Add it to "
        "PARAMETERS in megatron/extras/planner/verify/reference_parameters.py."
    )


def decays(name: str) -> bool:
    """Return whether weight decay applies to a parameter."""
    return find_start(name) in ("table", "matrix", "output")


def is_matrix_of_layer(name: str) -> bool:
    """Return whether Muon updates a parameter, and a parametrization scales it by the width."""
    return find_start(name) in ("matrix", "output")


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
    start = find_start(name)
    if isinstance(start, float):
        return torch.full(size, start)
    if start == "norm":
        return torch.full(size, 0.0 if config.apply_layernorm_1p else 1.0)
    # The formulas are those of the flags' help.
    std: Any = config.init_method_std
    if std == "small":
        std = (2 / (5 * config.hidden_size)) ** 0.5
    elif std == "megatron":
        std = (1 / (3 * config.hidden_size)) ** 0.5
    # The rows of tokens and positions do not depend on the width.
    width = 1.0
    if is_matrix_of_layer(name):
        width = get_ratios(config)[0] ** 0.5
    if start == "output":
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
    if start in ("kernel", "rate", "step"):
        return _transform(values, start, config)
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
