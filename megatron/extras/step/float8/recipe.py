"""The flags of float8 as formats, scales and layers. This module imports no torch."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.precision import PrecisionConfig
from megatron.config.tree import Config

MULTIPLE = 16
"""Both sizes of a weight in float8 are multiples of this, in the complete model."""
GRADIENTS = {"e4m3": "float8_e4m3fn", "hybrid": "float8_e5m2"}
"""Value of --fp8-format -> torch's dtype of gradients. e5m2 has fewer digits and a larger range."""
ROWWISE = {"tensorwise": False, "rowwise": True}
"""Value of --fp8-recipe -> whether each token and each row of a weight has its own scale."""


@dataclass(frozen=True)
class Recipe:
    """The formats of the operands, and which values share a scale."""

    format: Literal["e4m3", "hybrid"]
    rowwise: bool
    """Whether each token and each row of a weight has its own scale."""
    emulated: bool
    """Whether rounded operands are multiplied in the dtype of the computation."""

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> "Recipe":
        """Return the recipe of a configuration with --fp8-format."""
        assert precision.fp8_format is not None, "only a run with float8 has a recipe"
        assert precision.fp8_recipe is not None, "the rules refuse a format without a recipe"
        return cls(precision.fp8_format, ROWWISE[precision.fp8_recipe], precision.fp8_emulate)


def list_float8_layers(config: Config) -> range:
    """Return the numbers of the transformer layers whose products are computed in float8."""
    precision = config.precision
    layers = config.model.num_layers
    if not precision.first_last_layers_bf16:
        return range(layers)
    return range(
        precision.num_layers_at_start_in_bf16, layers - precision.num_layers_at_end_in_bf16
    )


def fits_float8(shape: tuple[int, ...]) -> bool:
    """Return whether a weight of this shape in the complete model is used in float8."""
    return all(size % MULTIPLE == 0 for size in shape)
