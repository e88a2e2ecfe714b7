"""Factors on the optimizer's settings of a parameter, by the size of the model.

They are those of `--parametrization`. m is the width ratio, d the depth ratio. The rate, the decay
and epsilon of the base model are multiplied by

| parameter                      | rate  | decay | epsilon    |
|--------------------------------|-------|-------|------------|
| matrices of the layers         | 1 / m | m     | 1 / (m d)  |
| vectors of the layers          | 1     | none  | 1 / (m d)  |
| embedding, output              | 1     | 1     | 1 / m      |
| final norm, embedding norm     | 1     | none  | 1 / m      |

Sources: https://arxiv.org/abs/2203.03466, table 8, and https://arxiv.org/abs/2505.01618, table 1
with alpha = 1. `ModelShape` has the rest: initial weights, and factors on the final norm, the
queries and the residual branches.

Muon's updates of the layers' matrices are orthogonal. The spectral norm of an update must be about
sqrt(rows / columns) (https://arxiv.org/abs/2310.17813), which is the same for all widths if
both grow alike. Only the factor `spectral` makes the norm grow, as sqrt(m).
"""

import math
from dataclasses import dataclass

from megatron.config.optimizer import OptimizerConfig
from megatron.model.shape import ModelShape
from megatron.parallel.parameter_spec import Init, ParameterSpec


@dataclass(frozen=True)
class Scaling:
    """Factors on settings of the optimizer for one parameter."""

    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0


UNSCALED = Scaling()
"""The factors of the standard parametrization."""


def compute_scaling(name: str, spec: ParameterSpec, shape: ModelShape) -> Scaling:
    """Return the factors for a parameter that AdamW or AdEMAMix updates.

    Args:
        name: Global name of the parameter.
        spec: Its spec. Its kind of initial values shows a matrix of the layers.
        shape: Sizes of the model.
    """
    m = shape.width_ratio
    # Gradients fall as the factor on the logits does, and Adam adds epsilon to their size.
    epsilon = 1.0 / m
    if name.startswith("blocks."):
        epsilon /= shape.depth_ratio
    # A matrix of the layers adds up as many products as the model is wide.
    if spec.init in (Init.NORMAL, Init.SCALED_NORMAL):
        return Scaling(1.0 / m, m, epsilon)
    return Scaling(epsilon=epsilon)


def compute_muon_rate(config: OptimizerConfig, shape: ModelShape) -> float:
    """Return the factor on the rate of the matrices that Muon updates.

    Their weight decay is multiplied by its inverse, so rate x decay stays the same.
    """
    if config.muon_scale_mode == "spectral":
        return 1.0 / math.sqrt(shape.width_ratio)
    return 1.0
