"""The training loss, apart from cross entropy itself."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import NOT_NEGATIVE, Range

LossMean = Literal["step", "microbatch"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
LOSS_MEAN = "loss.loss_mean"
"""The dotted name of the field below."""
FOREIGN_ORIGIN = "as in the trainer that has the flag "
"""The origin of --loss-mean begins with this if the command line is that of another trainer. The
flag that shows it follows."""


@dataclass(frozen=True)
class LossConfig:
    """Settings that change the training loss. The validation loss is always cross entropy."""

    # Without this field, a checkpoint has "microbatch" (`load_yaml`).
    loss_mean: LossMean = "step"
    """How the loss is averaged if tokens are masked (--eod-mask-loss, --goldfish-loss). step: over
    all unmasked tokens of the step. microbatch: over each microbatch, and then over microbatches,
    so it depends on the micro-batch size. A resume keeps the value of the checkpoint. A command
    line with a flag that only another trainer has, or with --deepspeed-config, gets microbatch, as
    such trainers compute it. --calculate-per-token-loss means step."""
    z_loss_coefficient: Annotated[float, NOT_NEGATIVE] = 0.0
    """Add this factor times the mean of log(sum of exp(logits))^2, which keeps the logits small
    (https://arxiv.org/abs/2204.02311). The logged training loss contains it. 0 turns it off."""
    goldfish_loss: bool = False
    """Leave out the loss of about one in --goldfish-k tokens, so that texts are not memorised
    (https://arxiv.org/abs/2406.10209). After the same text, the same tokens are always left out."""
    # With 1, no token would be left.
    goldfish_k: Annotated[int, Range("[2, inf)")] = 50
    """Leave out about one in this many tokens."""
    goldfish_h: int = 50
    """Number of tokens, up to and including a token, that decide whether it is left out."""
    moe_router_load_balancing_type: LoadBalancing = "aux_loss"
    """What --moe-aux-loss-coeff balances: the experts of each microbatch (aux_loss), of each
    sequence (seq_aux_loss), or of all microbatches of the step so far, on all ranks
    (global_aux_loss). none: nothing."""
    moe_aux_loss_coeff: Annotated[float, NOT_NEGATIVE] = 0.0
    """Add this factor times the balancing loss E sum(f p) of each layer with experts, where E is
    the number of experts, f an expert's share of the choices and p its mean score
    (https://arxiv.org/abs/2101.03961). Layers add up. Microbatches or sequences are averaged. The
    logged loss does not contain it. 0 turns it off."""
    moe_z_loss_coeff: Annotated[float, NOT_NEGATIVE] = 0.0
    """Add this factor times the mean over tokens of log(sum of exp(logits))^2 of each router, which
    keeps its logits small (https://arxiv.org/abs/2202.08906). Layers add up. The logged loss does
    not contain it. 0 turns it off."""
    moe_router_bias_update_rate: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Change of an expert's bias after each step, upwards if its load is below the mean, otherwise
    downwards. See --moe-router-enable-expert-bias."""
