"""Number formats and loss scaling.

Master weights and gradient accumulation over microbatches are always fp32. So are moments, unless
--exp-avg-dtype or --exp-avg-sq-dtype says otherwise.
"""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.interval import POSITIVE


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
