"""Rules about layers with a gated delta net in place of attention."""

from collections.abc import Iterator
from contextlib import suppress

from megatron.base.plain_text import format_alternatives
from megatron.config.fields import ConfigWithOrigin
from megatron.config.layer_choice import find_linear_layers
from megatron.plan.rules.finding import Finding, PlanContext, error, warning

VARIANT = "model.experimental_attention_variant"
FREQUENCY = "model.linear_attention_freq"
_KEY_HEADS = "model.linear_num_key_heads"


def check_linear_attention(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that a layer is chosen, and that the keys share the values equally."""
    model = settings.config.model
    if model.experimental_attention_variant is None:
        return
    asked = settings.describe(VARIANT)
    # `check_layer_choices` reports a text that cannot be read.
    with suppress(ValueError):
        text = model.linear_attention_freq
        if text and not find_linear_layers(text, model.num_layers):
            yield error(
                f"{settings.describe(FREQUENCY)} leaves no layer with {asked}; leave both out."
            )
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys >= 1 and values % keys:
        yield error(
            f"{settings.describe('model.linear_num_value_heads')} must be a multiple of "
            f"{settings.describe(_KEY_HEADS)}; use {values // keys * keys + keys}."
        )
    if not settings.config.data.reset_attention_mask:
        yield warning(
            f"{asked}: without --reset-attention-mask the state runs over the whole sample, from "
            "one document into the next."
        )


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
