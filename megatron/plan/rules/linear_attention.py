"""Rules about layers with a gated delta net in place of attention."""

from collections.abc import Iterator

from megatron.base.plain_text import format_alternatives
from megatron.config.fields import ConfigWithOrigin
from megatron.config.layer_choice import find_linear_layers
from megatron.plan.rules.finding import Finding, PlanContext, error, warning

VARIANT = "model.experimental_attention_variant"
FREQUENCY = "model.linear_attention_freq"
_KEY_HEADS = "model.linear_num_key_heads"
_UNTESTED = (
    ("parallel.deepspeed", "the DeepSpeed engine"),
    ("kernels.use_torch_compile", "compiled layers"),
    ("precision.fp8_format", "products in float8"),
)
"""Fields that a gated delta net was not compared with, and what they mean."""


def check_linear_attention(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the layers are chosen, and that their heads and the other settings fit."""
    model = settings.config.model
    if model.experimental_attention_variant is None:
        return
    asked = settings.describe(VARIANT)
    yield from _check_frequency(settings)
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys >= 1 and values % keys:
        below = values // keys * keys
        yield error(
            f"{settings.describe('model.linear_num_value_heads')} must be a multiple of "
            f"{settings.describe(_KEY_HEADS)}; use {below + keys}."
        )
    if model.parametrization != "standard":
        yield error(
            f"{asked} has no rule in {settings.describe('model.parametrization')}; leave one of "
            "them out."
        )
    for dotted, name in _UNTESTED:
        if settings.is_changed(dotted):
            yield error(
                f"{asked} was not compared with {name}; leave out {settings.describe(dotted)}."
            )
    if not settings.config.data.reset_attention_mask:
        yield warning(
            f"{asked}: without --reset-attention-mask the state runs over the whole sample, from "
            "one document into the next."
        )


def _check_frequency(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that at least one layer is chosen."""
    model = settings.config.model
    asked = settings.describe(VARIANT)
    if model.linear_attention_freq is None:
        yield error(
            f"{asked} needs --linear-attention-freq, which chooses its layers; 4 leaves attention "
            "in every fourth layer, as in Qwen3-Next."
        )
        return
    # `check_ranges` and `check_no_empty_text` report such values.
    if model.num_layers < 1 or not model.linear_attention_freq:
        return
    try:
        if not find_linear_layers(model.linear_attention_freq, model.num_layers):
            yield error(
                f"{settings.describe(FREQUENCY)} leaves no layer with {asked}; leave both out."
            )
    except ValueError as failure:
        yield error(f"{settings.describe(FREQUENCY)}: {failure}.")


def check_linear_heads(context: PlanContext) -> Iterator[Finding]:
    """Check that tensor- and context-parallel ranks share the key heads equally."""
    config = context.config
    heads = config.model.linear_num_key_heads
    tensor = config.parallel.tensor_model_parallel_size
    ranks = config.parallel.context_parallel_size
    if config.model.experimental_attention_variant is None or heads % (tensor * ranks) == 0:
        return
    asked = context.describe("parallel.tensor_model_parallel_size")
    if ranks > 1:
        asked += f" x {context.describe('parallel.context_parallel_size')}"
    possible = [n for n in range(1, heads + 1) if heads % n == 0]
    yield error(
        f"{asked} must divide {context.describe(_KEY_HEADS)}, because each rank computes complete "
        f"heads of a gated delta net; use {format_alternatives(possible)}."
    )
