"""What each number may be by itself.

Invariant: every number of the configuration has a range. Without an entry here, a whole number must
be at least 1 and any other number must be finite.
"""

import math
from collections.abc import Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields

_POSITIVE = "(0, inf)"
_NOT_NEGATIVE = "[0, inf)"
_PROBABILITY = "[0, 1)"
# Above 1e15, products with a usual sequence length exceed 64 bits.
_COUNT = "[1, 1e15]"
_WORKERS = "[0, 64]"

RANGES = {
    "model.rotary_base": _POSITIVE,
    "model.rotary_percent": "(0, 1]",
    "model.rope_scaling_factor": _POSITIVE,
    "model.rope_low_freq_factor": _POSITIVE,
    "model.rope_high_freq_factor": _POSITIVE,
    "model.layernorm_epsilon": _POSITIVE,
    "model.hidden_dropout": _PROBABILITY,
    "model.attention_dropout": _PROBABILITY,
    "model.init_method_std": _POSITIVE,
    # `numpy.random.RandomState` takes seeds of 32 bits.
    "batch.seed": "[0, 4294967295]",
    "batch.eval_iters": _NOT_NEGATIVE,
    "batch.exit_duration_in_mins": _POSITIVE,
    "parallel.check_invariants_interval": _NOT_NEGATIVE,
    "parallel.distributed_timeout_minutes": _POSITIVE,
    # Some launchers pass -1 for "none".
    "parallel.local_rank": "[-1, inf)",
    "optimizer.lr": _POSITIVE,
    "optimizer.min_lr": _NOT_NEGATIVE,
    "optimizer.lr_warmup_fraction": "[0, 1]",
    "optimizer.lr_warmup_iters": _NOT_NEGATIVE,
    "optimizer.lr_warmup_samples": _NOT_NEGATIVE,
    "optimizer.lr_warmup_tokens": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.adam_beta1": _PROBABILITY,
    "optimizer.adam_beta2": _PROBABILITY,
    "optimizer.adam_eps": _POSITIVE,
    "optimizer.clip_grad": _NOT_NEGATIVE,
    "loss.z_loss_coefficient": _NOT_NEGATIVE,
    # With 1 no token would be left.
    "loss.goldfish_k": "[2, inf)",
    "precision.loss_scale": _POSITIVE,
    "precision.initial_loss_scale": _POSITIVE,
    "precision.min_loss_scale": _POSITIVE,
    "batch.micro_batch_size": "[1, 1e9]",
    "batch.global_batch_size": "[1, 1e9]",
    "batch.train_iters": _COUNT,
    "batch.train_samples": _COUNT,
    "model.seq_length": "[1, 1e9]",
    "tokenizer.vocab_size": "[1, 2147483647]",
    "tokenizer.pad_vocab_size_to": "[1, 2147483647]",
    "data.num_workers": _WORKERS,
    "data.valid_num_workers": _WORKERS,
    "logging.peak_tflops_per_device": _POSITIVE,
    "checkpoint.save_at": "[1, inf)",
    "checkpoint.load_iteration": "[1, inf)",
}
"""Intervals in mathematical notation: [a, b) contains a but not b."""


def check_ranges(settings: ConfigWithOrigin) -> Iterator[str]:
    """Yield a message for each number that is out of its range."""
    for dotted, value in settings.list_values().items():
        # A tuple with an entry in RANGES is checked number by number. Tuples without one have rules
        # of their own.
        if isinstance(value, tuple) and dotted in RANGES:
            several = value
        else:
            several = (value,)
        numbers = [
            number
            for number in several
            # bool is a subclass of int, so it must be left out explicitly.
            if isinstance(number, int | float) and not isinstance(number, bool)
        ]
        if all_fields()[dotted].annotation is int:
            default = "[1, inf)"
        else:
            default = "(-inf, inf)"
        interval = RANGES.get(dotted, default)
        if not all(_is_inside(number, interval) for number in numbers):
            yield f"{settings.describe(dotted)} must be {_describe_interval(interval)}."


def _is_inside(value: float, interval: str) -> bool:
    low, high = _parse_bounds(interval)
    if interval.startswith("["):
        above = value >= low
    else:
        above = value > low
    if interval.endswith("]"):
        below = value <= high
    else:
        below = value < high
    # All comparisons with nan are false, so nan is in no interval.
    return above and below


def _describe_interval(interval: str) -> str:
    low, high = _parse_bounds(interval)
    if math.isfinite(high):
        if interval.startswith("["):
            lower = "at least"
        else:
            lower = "above"
        return (
            f"{lower} {low:.10g} and {'at most' if interval.endswith(']') else 'below'} {high:.10g}"
        )
    if math.isfinite(low):
        if interval.startswith("["):
            return f"at least {low:g}"
        return f"above {low:g}, and finite"
    return "finite"


def _parse_bounds(interval: str) -> tuple[float, float]:
    low, _, high = interval[1:-1].partition(", ")
    return float(low), float(high)
