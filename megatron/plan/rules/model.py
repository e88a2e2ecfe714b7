"""Rules about the shape of the model."""

from collections.abc import Callable, Iterator

from megatron.config.fields import ConfigWithOrigin
from megatron.config.layer_choice import choose_layers, find_linear_layers
from megatron.config.model import DROPOUT_STEPS
from megatron.model.layer_parts import get_activation
from megatron.model.shape import ModelShape
from megatron.plan.rules.finding import Finding, PlanContext, error, warning

LAYER_CHOICES: dict[str, Callable[[str, int], frozenset[int]]] = {
    "model.no_rope_layers": choose_layers,
    "model.full_attention_layers": choose_layers,
    "model.linear_attention_freq": find_linear_layers,
}
"""Fields that choose layers -> the function that reads them."""
_HEAD_DIM_MULTIPLE = 64
"""The attention kernels on GPUs are fastest for head sizes that are multiples of this."""
_USUAL_HIDDEN_PER_LAYER = (32, 256)


def check_dropout(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that rounding leaves something to drop and something to keep."""
    for name in ("model.hidden_dropout", "model.attention_dropout"):
        p = settings.list_values()[name]
        # `check_ranges` reports other values.
        if not 0 < p < 1:
            continue
        rounded, rest = divmod(round(p * DROPOUT_STEPS), DROPOUT_STEPS)
        if not rest:
            yield error(
                f"{settings.describe(name)} would be rounded to {rounded}: probabilities are "
                f"multiples of 1 / {DROPOUT_STEPS:,}. Give 0, or a value from 2e-5 to 0.9999."
            )


def check_heads_divide_hidden_size(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the heads divide the hidden size, and the key/value heads divide the heads."""
    model = settings.config.model
    # `check_ranges` reports this value. Here it would be a division by zero.
    if model.num_attention_heads < 1:
        return
    derived = model.kv_channels is None and "latent" not in model.attention_kinds
    if derived and model.hidden_size % model.num_attention_heads:
        yield error(
            f"{settings.describe('model.num_attention_heads')} must divide "
            f"{settings.describe('model.hidden_size')}; change one, or set the width of a head "
            "with --kv-channels."
        )
    groups = model.num_query_groups
    if groups is not None and groups >= 1 and model.num_attention_heads % groups:
        divisors = [
            n for n in range(1, model.num_attention_heads + 1) if model.num_attention_heads % n == 0
        ]
        yield error(
            f"{settings.describe('model.num_query_groups')} must divide "
            f"{settings.describe('model.num_attention_heads')}; use one of "
            f"{', '.join(map(str, divisors))}."
        )


def check_rotary_dim_is_even(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the rotated channels of a head are an even number of at least 2.

    Rotary positions rotate channels in pairs.
    """
    model = settings.config.model
    if (
        # Values outside their range are reported by `check_ranges`. The arithmetic below needs
        # valid ones.
        model.position_embedding_type != "rotary"
        or "latent" in model.attention_kinds
        or model.num_attention_heads < 1
        or not 0 < model.rotary_percent <= 1
    ):
        return
    head = ModelShape(model, 0, 0).head_dim
    rotated = int(head * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield error(
            f"{settings.describe('model.rotary_percent')} of a head's {head} channels are "
            f"{rotated}, but rotary positions rotate pairs of channels; choose a head size or "
            "fraction that gives an even number of at least 2."
        )


def check_rope_scaling(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the low and the high frequencies of a scaling do not overlap."""
    model = settings.config.model
    if model.rope_scaling == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield error(
            f"{settings.describe('model.rope_low_freq_factor')} must be below "
            f"{settings.describe('model.rope_high_freq_factor')}; Llama 3 has 1 and 4."
        )
    if model.rope_scaling != "yarn":
        return
    if model.rope_beta_slow >= model.rope_beta_fast:
        yield error(
            f"{settings.describe('model.rope_beta_slow')} must be below "
            f"{settings.describe('model.rope_beta_fast')}; YaRN has 1 and 32."
        )
    if model.rotary_base <= 1:
        yield error(
            f"{settings.describe('model.rotary_base')} must be above 1 with --rope-scaling yarn; "
            "the paper has 10000."
        )


def check_layer_choices(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that each choice of layers can be read, and that it chooses layers of the model."""
    num_layers = settings.config.model.num_layers
    # `check_ranges` reports this value.
    if num_layers < 1:
        return
    for dotted, read in LAYER_CHOICES.items():
        text = settings[dotted]
        # `check_no_empty_text` reports an empty text.
        if not text:
            continue
        try:
            read(text, num_layers)
        except ValueError as failure:
            yield error(f"{settings.describe(dotted)}: {failure}.")


def check_parametrization(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that a parametrization has its base model, and no other scaling by the size."""
    model = settings.config.model
    if model.parametrization == "standard":
        return
    asked = settings.describe("model.parametrization")
    if model.base_width is None:
        yield error(
            f"{asked} needs --base-width, the hidden size of the model whose --lr is given."
        )
    if model.parametrization == "completep":
        if model.base_depth is None:
            yield error(f"{asked} needs --base-depth, the number of layers of the base model.")
        if model.output_init_method_std is not None:
            yield error(
                f"{asked} scales the residual branches themselves; leave out "
                f"{settings.describe('model.output_init_method_std')}."
            )
    elif model.base_depth is not None:
        yield error(
            f"{asked} has no rule for the depth; use --parametrization completep, or leave out "
            f"{settings.describe('model.base_depth')}."
        )
    for name in ("init_method_std", "output_init_method_std"):
        refused = model.parametrization == "completep" and name.startswith("output")
        if isinstance(getattr(model, name), str) and not refused:
            yield error(
                f"{asked} scales initial weights by the width, and so does "
                f"{settings.describe('model.' + name)}; give a number, that of the base model."
            )
    if settings.config.parallel.deepspeed:
        yield error(
            f"{asked} gives parameters different rates, which the DeepSpeed engine does not "
            f"support; leave out {settings.describe('parallel.deepspeed')}."
        )


def check_positions_cover_sequence(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the table of learned positions has a row for each token of a sample."""
    model = settings.config.model
    size = model.max_position_embeddings
    if size is not None and model.position_embedding_type == "absolute" and size < model.seq_length:
        yield error(
            f"{settings.describe('model.max_position_embeddings')} must be at least "
            f"{settings.describe('model.seq_length')}: each token of a sample needs a position."
        )


def warn_about_shape(context: PlanContext) -> Iterator[Finding]:
    """Warn about shapes that can be trained but are probably slow or a mistake."""
    model = context.config.model
    h = model.hidden_size
    layers = model.num_layers
    head = context.plan.shape.head_dim
    width = context.describe("model.hidden_size")
    if head % _HEAD_DIM_MULTIPLE:
        yield warning(
            f"head size {head} (--kv-channels, or {width} "
            f"/ {context.describe('model.num_attention_heads')}) is not a multiple "
            f"of {_HEAD_DIM_MULTIPLE}: attention runs slower on GPUs."
        )
    if (
        model.ffn_hidden_size is not None
        and not get_activation(model).gated
        and model.ffn_hidden_size != 4 * h
        and not context.is_from_preset("model.ffn_hidden_size")
    ):
        yield warning(
            f"{context.describe('model.ffn_hidden_size')} is not 4 x {width} = {4 * h}; a value "
            "that is left from another model changes the size of the network (a 104B run was 58B): "
            "check the number of parameters."
        )
    given = model.ffn_hidden_size or (model.num_experts and model.moe_ffn_hidden_size)
    if given is None and get_activation(model).gated:
        yield warning(
            f"{context.describe('model.glu_activation')} without --ffn-hidden-size uses 4 x hidden "
            "size in each of three matrices, 1.5 times the parameters of an MLP without a gate; "
            f"--ffn-hidden-size {round(h / 24) * 64 or 64} (8/3 x hidden size) has the same number."
        )
    # The bounds are wide. They find a digit too many or too few, and not unusual designs.
    low, high = _USUAL_HIDDEN_PER_LAYER
    if not low <= h / layers <= high:
        yield warning(
            f"{width} / {context.describe('model.num_layers')} = {h / layers:.0f} is an unusual "
            f"ratio of width to depth: {low} to {high} is common, large published models have 100 "
            "to 205."
        )
