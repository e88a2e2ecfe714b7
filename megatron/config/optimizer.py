"""The optimizer and the schedule of the learning rate."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import NOT_NEGATIVE, POSITIVE, PROBABILITY, Range
from megatron.config.table import Table

MomentDtype = Literal["fp32", "bf16"]
StateKind = Literal["weight", "exp_avg", "exp_avg_sq", "exp_avg_slow", "momentum"]
"""The fp32 master (`weight`), or a state of an optimizer. Checkpoints have these names."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer, the learning rate and gradient clipping."""

    optimizer: Literal["adam", "ademamix", "muon"] = "adam"
    """adam: AdamW, with decoupled weight decay (https://arxiv.org/abs/1711.05101). ademamix: AdamW
    with a second, slow average of the gradient (https://arxiv.org/abs/2409.03137). muon: an
    orthogonalised momentum for the matrices of the layers, and AdamW for the rest, at the same
    --lr (https://arxiv.org/abs/2502.16982). --decoupled-lr sets another rate for the word embedding
    and the output matrix."""
    lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate."""
    min_lr: Annotated[float, NOT_NEGATIVE] = 0.0
    """Learning rate at the end of the decay, and its floor."""
    decoupled_lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate of the word embedding and the output matrix. Default: --lr. The shape of
    the schedule is that of --lr."""
    decoupled_min_lr: Annotated[float | None, NOT_NEGATIVE] = None
    """--min-lr of the word embedding and the output matrix, with --decoupled-lr. Default:
    --min-lr."""
    lr_decay_style: Literal[
        "constant", "linear", "cosine", "half-cosine", "inverse-square-root", "WSD"
    ] = "linear"
    """Shape after warm-up. half-cosine: the second half of a cosine, which falls fastest at its
    start. It is for a resume that makes the second half of a cosine longer. inverse-square-root:
    --lr x sqrt(warm-up / samples), and --min-lr after the end of the decay. WSD: constant, then
    a final decay, whose length is --lr-wsd-decay-* (https://arxiv.org/abs/2404.06395)."""
    lr_decay_iters: int | None = None
    """End of the decay in iterations. Default: --train-iters."""
    lr_decay_samples: int | None = None
    """End of the decay in samples. Default: --train-samples."""
    lr_decay_tokens: int | None = None
    """End of the decay in tokens (curriculum learning). Warm-up stays in samples."""
    lr_warmup_fraction: Annotated[float | None, Range("[0, 1]")] = None
    """Warm-up as a fraction of the decay span, 0 to 1. With --train-time it is a fraction of the
    time."""
    lr_warmup_iters: Annotated[int, NOT_NEGATIVE] = 0
    """Warm-up in iterations."""
    lr_warmup_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Warm-up in samples."""
    lr_warmup_tokens: Annotated[int | None, NOT_NEGATIVE] = None
    """Warm-up in tokens. It is converted to samples by dividing by the full sequence length,
    so it is inexact with a curriculum."""
    lr_warmup_init: Annotated[float, NOT_NEGATIVE] = 0.0
    """Learning rate at the start of the warm-up, at most --lr and --decoupled-lr."""
    lr_warmup_style: Literal["linear", "quadratic"] = "linear"
    """Shape of the warm-up, where x is its finished fraction. linear: x. quadratic:
    1 - (1 - x)^2, which is steepest at its start."""
    lr_decay_from_start: bool = False
    """Begin the decay at the start of training and not after the warm-up. The rate is the lower one
    of warm-up and decay. Only for the decay styles linear, cosine and half-cosine."""
    lr_wsd_decay_iters: Annotated[int | None, NOT_NEGATIVE] = None
    """Length of WSD's final decay in iterations. With 0 there is none."""
    lr_wsd_decay_samples: Annotated[int | None, NOT_NEGATIVE] = None
    """Length of WSD's final decay in samples. With 0 there is none."""
    lr_wsd_decay_fraction: Annotated[float | None, Range("[0, 1]")] = None
    """Length of WSD's final decay as a fraction of the decay span, 0 to 1. With --train-time it is
    the last part of the time."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of WSD's final decay. minus_sqrt: 1 - sqrt(finished fraction of the decay)."""
    override_lr_scheduler: bool = False
    """On resume, take the schedules of learning rate and curriculum from this command line, even if
    the checkpoint's differ."""
    use_checkpoint_lr_scheduler: bool = False
    """On resume, take the schedules of learning rate and curriculum from the checkpoint, and ignore
    this command line's."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    """Decoupled weight decay. It is not applied to biases and norms."""
    weight_decay_on_embeddings: bool = True
    """Apply weight decay to the tables of words and positions. Off
    (--no-weight-decay-on-embeddings): not to these, as in OLMo 2. A tied output matrix is the table
    of words. An untied one has weight decay."""
    adam_beta1: Annotated[float, PROBABILITY] = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Annotated[float, PROBABILITY] = 0.999
    """Decay rate of the second moment."""
    adam_eps: Annotated[float, POSITIVE] = 1e-8
    """Added to the denominator."""
    ademamix_beta3: Annotated[float, PROBABILITY] = 0.9999
    """AdEMAMix: decay rate of the slow average."""
    ademamix_alpha: Annotated[float, NOT_NEGATIVE] = 5.0
    """AdEMAMix: weight of the slow average in an update. The fast average has weight 1."""
    ademamix_beta3_warmup: int | None = None
    """AdEMAMix: number of steps in which --ademamix-beta3 is reached from --adam-beta1. Default: no
    such warm-up. The paper uses the length of training."""
    ademamix_alpha_warmup: int | None = None
    """AdEMAMix: number of steps in which --ademamix-alpha is reached from 0. Default: no such
    warm-up. The paper uses the length of training."""
    muon_momentum: Annotated[float, PROBABILITY] = 0.9
    """Muon: decay rate of the momentum."""
    muon_nesterov: bool = False
    """Muon: use Nesterov's momentum."""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """Muon: factor on the update of a matrix of m rows and n columns. spectral: sqrt(max(m, n)).
    shape_scaling: sqrt(max(1, m / n)). unit_rms_norm: sqrt(m / n)."""
    muon_extra_scale_factor: Annotated[float, POSITIVE] = 1.0
    """Muon: another factor on the update. With spectral, 0.2 gives updates the size of AdamW's."""
    # torch has the same limit. More steps would only cost time.
    muon_num_ns_steps: Annotated[int, Range("[1, 99]")] = 5
    """Muon: number of Newton-Schulz steps."""
    muon_coefficient_type: Literal["quintic", "simple"] = "quintic"
    """Muon: coefficients of the Newton-Schulz steps. quintic: three others in each of 5
    steps, and then again from the first. simple: the same three in all steps."""
    muon_fp32_matmul_prec: Literal["auto", "medium", "high"] = "auto"
    """Muon: precision of the Newton-Schulz products. medium: bf16. high: fp32. auto: fp32 if the
    run is in fp32, and bf16 with --bf16 or --fp16. In bf16, a run in fp32 would differ between
    layouts by up to 1e-3 after a few steps. A run that continues a checkpoint keeps its value."""
    exp_avg_dtype: MomentDtype = "fp32"
    """Dtype in which the first moment, or Muon's momentum, is stored between steps. An update
    computes in fp32 in any case. bf16 saves 2 bytes a parameter, and rounds the moment in each
    step. AdEMAMix's slow average stays fp32. It may change on resume."""
    exp_avg_sq_dtype: MomentDtype = "fp32"
    """Dtype in which the second moment is stored between steps. See --exp-avg-dtype. bf16 needs
    --adam-beta2 of at most 0.99609375 (1 - 2^-8), above which rounding would keep the moment from
    falling."""
    cpu_optimizer: bool = False
    """Keep master weights and moments in host memory, and update them there
    (https://arxiv.org/abs/2101.06840). Needs --deepspeed."""
    use_bnb_optimizer: bool = False
    """Keep the moments of the layers' matrices in 8 bits, with bitsandbytes
    (https://arxiv.org/abs/2110.02861). Needs --deepspeed. This also turns --embed-layernorm on,
    unless that flag is given."""
    clip_grad: Annotated[float, NOT_NEGATIVE] = 1.0
    """Clip the global gradient norm to this. 0 turns clipping off."""


@dataclass(frozen=True)
class OptimizerState:
    """A tensor that an optimizer keeps for a parameter. It has the parameter's shape."""

    kind: StateKind
    dtype: str = ""
    """The setting with its dtype. Empty: it is always fp32."""
    decay: str = ""
    """The setting with the decay rate b of an average b m + (1 - b) x. One in bf16 must have it."""

    def get_dtype(self, config: OptimizerConfig) -> MomentDtype:
        """Return the dtype between steps."""
        dtype: MomentDtype = getattr(config, self.dtype) if self.dtype else "fp32"
        return dtype


def _divide_by_width(width: float, config: OptimizerConfig) -> float:
    """Return the divisor for updates whose elements do not grow with the gradient."""
    return width


def _divide_muon(width: float, config: OptimizerConfig) -> float:
    """Return the divisor for updates that are orthogonal matrices."""
    if config.muon_scale_mode == "spectral":
        return math.sqrt(width)
    return 1.0


@dataclass(frozen=True)
class OptimizerRow:
    """What the trainer must know about an optimizer apart from its formula."""

    states: tuple[OptimizerState, ...]
    """Its states of each parameter that it updates."""
    flags: str = ""
    """The beginning of the names of its own settings. They have no effect without it."""
    layer_matrices_only: bool = False
    """Whether it updates only the matrices of the layers, and needs each as a whole. AdamW updates
    the other parameters."""
    divide_rate: Callable[[float, OptimizerConfig], float] = _divide_by_width
    """Takes the width ratio of `engine/optimizer.py`. Returns the number that the rate of the
    layers' matrices is divided by. Their weight decay is multiplied by it."""

    def updates(self, name: str, dimensions: int) -> bool:
        """Return whether it updates a parameter with this global name."""
        if not self.layer_matrices_only:
            return True
        # A convolution has a row for each channel. It is not the matrix of a linear layer.
        is_convolution = name.endswith("_convolution")
        return name.startswith("blocks.") and dimensions == 2 and not is_convolution


_MOMENTS = (
    OptimizerState("exp_avg", "exp_avg_dtype", "adam_beta1"),
    OptimizerState("exp_avg_sq", "exp_avg_sq_dtype", "adam_beta2"),
)
OPTIMIZERS = Table(
    "--optimizer",
    {
        "adam": OptimizerRow(_MOMENTS),
        # A step changes the slow average by less than bf16 can hold.
        "ademamix": OptimizerRow((*_MOMENTS, OptimizerState("exp_avg_slow")), "ademamix_"),
        "muon": OptimizerRow(
            (OptimizerState("momentum", "exp_avg_dtype", "muon_momentum"),),
            "muon_",
            layer_matrices_only=True,
            divide_rate=_divide_muon,
        ),
    },
)
"""`engine/native.py` has the same names, with their classes."""


def find_updater(optimizer: str, name: str, dimensions: int) -> OptimizerRow:
    """Return the row of the optimizer that updates a parameter with this global name."""
    row = OPTIMIZERS.require(optimizer)
    return row if row.updates(name, dimensions) else OPTIMIZERS.require("adam")


def list_states(optimizer: str) -> Iterator[OptimizerState]:
    """Yield all states of an optimizer, those of any parameter."""
    if OPTIMIZERS.require(optimizer).layer_matrices_only:
        yield from OPTIMIZERS.require("adam").states
    yield from OPTIMIZERS.require(optimizer).states
