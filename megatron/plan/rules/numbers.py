"""Rules about numbers: their ranges, their precision, and what only some optimizers have.

Invariant: every number of the configuration has a range. If its field declares none, a whole number
must be at least 1 and any other number must be finite.

`replace_wrong_values` returns values from which the numbers of a plan can be derived, whatever the
user gave.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.config.fields import ConfigWithOrigin, all_fields
from megatron.config.layer_choice import find_expert_layers
from megatron.config.optimizer import list_states
from megatron.config.tree import Config
from megatron.plan.rules.finding import Finding, error, warning
from megatron.plan.rules.model import LAYER_CHOICES


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


# Fields that divide or are divided by others. A value below 1 would end in a ZeroDivisionError, and
# a very large one in an OverflowError. 1 is a possible value of each.
COUNTS = (
    *(
        dotted
        for dotted, field in all_fields().items()
        if field.group in ("model", "parallel") and field.annotation is int
        if field.range.contains(1) and not field.range.contains(0)
    ),
    *("batch.micro_batch_size", "batch.global_batch_size"),
    *("tokenizer.vocab_size", "tokenizer.pad_vocab_size_to"),
    "tokenizer.make_vocab_size_divisible_by",
    *("curriculum.curriculum_min_difficulty", "curriculum.curriculum_max_difficulty"),
    *("curriculum.curriculum_total_step", "curriculum.curriculum_difficulty_step"),
    "curriculum.curriculum_root_degree",
)


def replace_wrong_values(asked: ConfigWithOrigin) -> ConfigWithOrigin:
    """Return `asked` with values from which the numbers of a plan can be derived.

    A size out of its range becomes 1. A wrong choice of layers becomes the default. Rules report
    both.
    """
    config = asked.config
    for name in COUNTS:
        # None is a size that is derived from others, so it needs no limit.
        if asked[name] is not None and not all_fields()[name].range.contains(asked[name]):
            config = _replace_field(config, name, 1)
    for name, read in LAYER_CHOICES.items():
        try:
            if asked[name] is not None:
                read(asked[name], config.model.num_layers)
        except ValueError:
            config = _replace_field(config, name, None)
    experts = "model.num_experts"
    if asked[experts] is not None and not all_fields()[experts].range.contains(asked[experts]):
        config = _replace_field(config, experts, None)
    try:
        if asked[experts] is not None:
            find_expert_layers(config.model.moe_layer_freq, config.model.num_layers)
    except ValueError:
        config = _replace_field(config, "model.moe_layer_freq", "1")
    return ConfigWithOrigin(config, asked.origin)


def _replace_field(config: Config, dotted: str, value: Any) -> Config:
    """Return the configuration with another value of a field."""
    group, name = dotted.split(".")
    return replace(config, **{group: replace(getattr(config, group), **{name: value})})
