"""Number formats and loss scaling.

Master weights and gradient accumulation over microbatches are always fp32. So are moments, unless
--exp-avg-dtype or --exp-avg-sq-dtype says otherwise.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class PrecisionConfig:
    """Settings of the compute format and of the loss scale for fp16."""

    fp16: bool = False
    """Compute in fp16, with loss scaling."""
    bf16: bool = False
    """Compute in bf16. Without --fp16 and --bf16, compute in fp32."""
    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32 with --fp16 or --bf16."""
    loss_scale: Annotated[float | None, POSITIVE] = None
    """Static loss scale for fp16. Default: dynamic."""
    initial_loss_scale: Annotated[float, POSITIVE] = 2.0**32
    """First value of the dynamic loss scale."""
    min_loss_scale: Annotated[float, POSITIVE] = 1.0
    """Lowest value of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Iterations without overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """Number of the overflow, counted since the scale last doubled, at which the dynamic scale
    starts to halve. With 2, the first overflow leaves the scale as it is."""
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Multiply in float8 in the linear layers of transformer layers: in e4m3 only, or with
    gradients in e5m2 (hybrid). It needs --bf16, --fp8-recipe, torchao, and GPUs of the Ada or
    Hopper generation or later. Weights, sums, norms, embedding and output layer stay as they are.
    The scales do not depend on the layout. Its kernels have not run on a GPU yet."""
    fp8_recipe: Literal["tensorwise", "rowwise"] | None = None
    """What shares a scale of --fp8-format: a tensor, or a token and a row of a weight. Scales are
    powers of two. With tensorwise all three products of a layer are in float8. With rowwise the
    gradients of weights are not, which costs time and keeps digits."""
    fp8_start_iteration: int = 1
    """The first iteration in float8. Those before it are in bf16."""
    fp8_emulate: bool = False
    """Multiply the values of float8 in the dtype of the computation. It needs no GPU with float8,
    and is slower than a run without --fp8-format."""
    first_last_layers_bf16: bool = False
    """Leave the first and the last transformer layers out of float8."""
    num_layers_at_start_in_bf16: Annotated[int, NOT_NEGATIVE] = 1
    """Number of first layers that --first-last-layers-bf16 leaves out of float8."""
    num_layers_at_end_in_bf16: Annotated[int, NOT_NEGATIVE] = 1
    """Number of last layers that --first-last-layers-bf16 leaves out of float8."""
