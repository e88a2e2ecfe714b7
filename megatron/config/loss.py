"""The training loss, apart from cross entropy itself."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import NOT_NEGATIVE, Range

LossMean = Literal["step", "microbatch"]
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
