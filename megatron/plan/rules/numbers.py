"""Rules about numbers: their ranges, their precision, and what only some optimizers have.

Invariant: every number of the configuration has a range. If its field declares none, a whole number
must be at least 1 and any other number must be finite.
"""

import math
from collections.abc import Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.optimizer import list_states
from megatron.plan.rules.finding import Finding, error, warning


def check_ranges(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Yield a message for each number that is out of its range."""
    for dotted, value in settings.list_values().items():
        field = all_fields()[dotted]
        # A tuple whose field declares a range is checked number by number. The numbers in other
        # tuples are checked elsewhere.
        if isinstance(value, tuple) and field.declared_range is not None:
            several = value
        else:
            several = (value,)
        numbers = [
            number
            for number in several
            # bool is a subclass of int, so it must be left out explicitly.
            if isinstance(number, int | float) and not isinstance(number, bool)
        ]
        if not all(field.range.contains(number) for number in numbers):
            yield error(f"{settings.describe(dotted)} must be {field.range.describe()}.")


_LARGEST_BF16_DECAY = 1.0 - 2.0**-8
"""Largest decay rate with which each step without a gradient makes any number in bf16 smaller.

bf16 has 8 significant bits, so a step rounds away changes of less than 2^-8 of some numbers.
"""


def check_loss_scale_bounds(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the dynamic loss scale does not start below its minimum."""
    precision = settings.config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield error(
            f"{settings.describe('precision.min_loss_scale')} must not exceed "
            f"{settings.describe('precision.initial_loss_scale')}, the first value of the dynamic "
            "loss scale."
        )


def check_grad_reduction(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --grad-reduce-in-bf16 is used with --bf16."""
    config = settings.config
    if config.parallel.grad_reduce_in_bf16 and not config.precision.bf16:
        yield error(
            "--grad-reduce-in-bf16 needs --bf16: gradients of fp16 and fp32 would lose precision "
            "or range. Add --bf16, or leave out --grad-reduce-in-bf16."
        )


def check_bf16_moments(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the decay rate of a moment in bf16 is low enough for the moment to decrease."""
    optimizer = settings.config.optimizer
    for state in list_states(optimizer.optimizer):
        if state.get_dtype(optimizer) != "bf16":
            continue
        flag = all_fields()[f"optimizer.{state.dtype}"].flag
        if getattr(optimizer, state.decay) > _LARGEST_BF16_DECAY:
            yield error(
                f"{settings.describe(f'optimizer.{state.decay}')} with {flag} bf16: a step would "
                "change the moment by less than bf16 can hold, so it would never fall; the rate "
                f"must be at most {_LARGEST_BF16_DECAY} (1 - 2^-8). Lower it, or give {flag} fp32."
            )


def warn_loss_scale_rounds(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn about a loss scale that is not a power of two.

    A power of two changes exponents only. Any other scale rounds each gradient once more.
    """
    precision = settings.config.precision
    if not precision.fp16:
        return
    # A static scale replaces the dynamic one, so only the scales in use are checked.
    used = ["initial_loss_scale", "min_loss_scale"]
    if precision.loss_scale is not None:
        used = ["loss_scale"]
    for name in used:
        scale = settings[f"precision.{name}"]
        # frexp returns a mantissa in [0.5, 1). It is exactly 0.5 for powers of two and for nothing
        # else.
        if 0 < scale < math.inf and math.frexp(scale)[0] != 0.5:
            below = 2.0 ** (math.frexp(scale)[1] - 1)
            others = f"{below:.10g} or {2 * below:.10g}"
            yield warning(
                f"{settings.describe(f'precision.{name}')} is not a power of two, so scaling "
                f"rounds the gradients; use {others}."
            )
