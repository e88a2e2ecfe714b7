"""Number formats and loss scaling. Master weights, moments and gradient accumulation over microbatches are fp32 always."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrecisionConfig:
    fp16: bool = False
    """Compute in fp16, with loss scaling."""
    bf16: bool = False
    """Compute in bf16. Without --fp16 and --bf16: fp32."""
    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32 with --fp16 or --bf16."""
    loss_scale: float | None = None
    """Static loss scale for fp16. Default: dynamic."""
    initial_loss_scale: float = 2.0**32
    """First value of the dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Lowest value of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Iterations without overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """Overflow with which the dynamic scale begins to halve, counted since it last doubled: 2 lets one pass."""
