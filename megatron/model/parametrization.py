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

The first row is that of AdamW and AdEMAMix. Muon's updates of the layers' matrices are orthogonal.
The spectral norm of an update must be about sqrt(rows / columns)
(https://arxiv.org/abs/2310.17813), which is the same for all widths if both grow alike. Only the
factor `spectral` makes the norm grow, as sqrt(m).
"""

from dataclasses import dataclass

from megatron.config.optimizer import OptimizerConfig, find_updater
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


def compute_scaling(
    name: str, spec: ParameterSpec, shape: ModelShape, config: OptimizerConfig
) -> Scaling:
    """Return the factors for a parameter.

    Args:
        name: Global name of the parameter.
        spec: Its spec. Its kind of initial values shows a matrix of the layers.
        shape: Sizes of the model.
        config: The optimizer.
    """
    m = shape.width_ratio
    # Gradients fall as the factor on the logits does, and Adam adds epsilon to their size.
    epsilon = 1.0 / m
    if name.startswith("blocks."):
        epsilon /= shape.depth_ratio
    # A matrix of the layers adds up as many products as the model is wide.
    if spec.init in (Init.NORMAL, Init.SCALED_NORMAL):
        divisor = find_updater(config.optimizer, name, len(spec.shape)).divide_rate(m, config)
        return Scaling(1.0 / divisor, divisor, epsilon)
    return Scaling(epsilon=epsilon)
