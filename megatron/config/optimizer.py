"""AdamW and the schedule of the learning rate."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW, the learning rate and gradient clipping."""

    optimizer: Literal["adam"] = "adam"
    """adam: AdamW, with decoupled weight decay (https://arxiv.org/abs/1711.05101)."""
    lr: float | None = None
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay, and its floor."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "linear"
    """Shape after warm-up. WSD: constant, then a decay over the last --lr-wsd-decay-*
    (https://arxiv.org/abs/2404.06395)."""
    lr_decay_iters: int | None = None
    """End of the decay in iterations. Default: --train-iters."""
    lr_decay_samples: int | None = None
    """End of the decay in samples. Default: --train-samples."""
    lr_decay_tokens: int | None = None
    """End of the decay in tokens (curriculum learning). Warm-up stays in samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay span, 0 to 1."""
    lr_warmup_iters: int = 0
    """Linear warm-up in iterations."""
    lr_warmup_samples: int = 0
    """Linear warm-up in samples."""
    lr_warmup_tokens: int | None = None
    """Linear warm-up in tokens. It is converted to samples of the full sequence length, so it is
    inexact with a curriculum."""
    lr_wsd_decay_iters: int | None = None
    """Length of WSD's final decay in iterations."""
    lr_wsd_decay_samples: int | None = None
    """Length of WSD's final decay in samples."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of WSD's final decay."""
    override_lr_scheduler: bool = False
    """On resume, take the schedules of learning rate and curriculum from this command line, even if
    the checkpoint's differ."""
    use_checkpoint_lr_scheduler: bool = False
    """On resume, take the schedules of learning rate and curriculum from the checkpoint, and ignore
    this command line's."""
    weight_decay: float = 0.01
    """Decoupled weight decay. It is not applied to biases and norms."""
    weight_decay_on_embeddings: bool = True
    """Apply weight decay to the tables of words and positions. Off
    (--no-weight-decay-on-embeddings): not to them, as in OLMo 2. A tied output matrix is such a
    table, and an untied one is not."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment."""
    adam_beta2: float = 0.999
    """Decay rate of the second moment."""
    adam_eps: float = 1e-8
    """Added to the denominator."""
    cpu_optimizer: bool = False
    """Keep master weights and moments in host memory, and update them there
    (https://arxiv.org/abs/2101.06840). Needs --deepspeed."""
    use_bnb_optimizer: bool = False
    """Keep the moments of the layers' matrices in 8 bits, with bitsandbytes
    (https://arxiv.org/abs/2110.02861). Needs --deepspeed. This also turns --embed-layernorm on,
    unless that is given."""
    clip_grad: float = 1.0
    """Clip the global gradient norm to this. 0 turns clipping off."""
