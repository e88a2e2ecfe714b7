"""Rules about attention: its softmax, norms and gate, latent attention, and gated delta nets."""

from collections.abc import Iterator
from contextlib import suppress

from megatron.base.plain_text import format_alternatives
from megatron.config.fields import ConfigWithOrigin
from megatron.config.layer_choice import find_linear_layers
from megatron.config.model import ATTENTION_FIELDS
from megatron.model.layer_parts import NORMS, SOFTMAXES
from megatron.plan.rules.finding import Finding, PlanContext, error, warning

GATE = "model.attention_output_gate"
LATENT = ATTENTION_FIELDS["latent"]
VARIANT = ATTENTION_FIELDS["gated_delta_net"]
FREQUENCY = "model.linear_attention_freq"
WIDTHS = (
    *("model.q_lora_rank", "model.kv_lora_rank", "model.qk_head_dim", "model.v_head_dim"),
    *("model.qk_pos_emb_head_dim", "model.latent_norm_epsilon"),
)
"""Fields that have no effect without latent attention."""
SCALES = ("model.mscale", "model.mscale_all_dim")
"""Those that have none without YaRN either."""
_FORBIDDEN = {
    "model.kv_channels": "--qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim are the widths",
    "model.rotary_percent": "--qk-pos-emb-head-dim is the number of rotary channels",
    "model.qk_norm": "the latent vectors have the norms",
    "model.softmax_type": "it was not compared with another softmax",
    "model.parametrization": "it has no rule there",
    GATE: "it has no gate",
    VARIANT: "it was not compared with gated delta nets",
    "kernels.rope_fusion": "the kernel rotates a projection to queries, keys and values",
    "precision.fp8_format": "its products have no float8 form",
}
"""Field that excludes latent attention -> why."""
_KEY_HEADS = "model.linear_num_key_heads"
_SOFTMAX_KERNELS = {"auto", "by-gpu", "flash", "unfused"}
"""Values of --attention-backend that have a way to compute another softmax than "vanilla"."""


def check_softmax(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the kernels and the parametrization can have this softmax of attention."""
    if SOFTMAXES.require(settings.config.model.softmax_type).weigh is None:
        return
    asked = settings.describe("model.softmax_type")
    if not _SOFTMAX_KERNELS & {*settings.config.kernels.attention_backend}:
        yield error(
            f"{asked} is computed by the kernels flash and unfused, and "
            f"{settings.describe('kernels.attention_backend')} has none of them; add one, or give "
            "auto."
        )
    if settings.is_changed("model.parametrization"):
        yield error(
            f"{asked} has no rule in {settings.describe('model.parametrization')}: logits shrink "
            "with the width of a head, and nothing says whether its own numbers do. Leave one out."
        )


def check_query_key_norm(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --qk-norm full is used with a norm that has a form over all heads."""
    model = settings.config.model
    if model.qk_norm == "full" and not NORMS.require(model.normalization).spans_heads:
        able = " or ".join(name for name, row in NORMS.list_rows() if row.spans_heads)
        yield error(
            f"{settings.describe('model.qk_norm')} needs --normalization {able}, not "
            f"{model.normalization}; use it, or --qk-norm head."
        )


def check_latent_attention(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the other settings fit, and that rotary channels are pairs."""
    model = settings.config.model
    if "latent" not in model.attention_kinds:
        return
    asked = settings.describe(LATENT)
    for dotted, why in _FORBIDDEN.items():
        if settings.is_changed(dotted):
            yield error(f"{asked}: {why}; leave out {settings.describe(dotted)}.")
    groups = model.num_query_groups
    if groups is not None and groups != model.num_attention_heads:
        yield error(
            f"{asked} gives each head keys of its own; leave out "
            f"{settings.describe('model.num_query_groups')}."
        )
    if model.position_embedding_type != "rotary":
        yield error(
            f"{asked} needs --position-embedding-type rotary, not {model.position_embedding_type}."
        )
    if model.add_bias_linear or model.add_attention_bias or model.add_qkv_bias:
        yield error(
            f"{asked} has no biases; add --no-add-bias-linear, and leave out --add-attention-bias "
            "and --add-qkv-bias."
        )
    # `check_ranges` reports values below 1.
    if model.qk_pos_emb_head_dim % 2:
        yield error(
            f"{settings.describe('model.qk_pos_emb_head_dim')} must be even, because channels are "
            f"rotated in pairs; use {model.qk_pos_emb_head_dim + 1}."
        )


def check_linear_attention(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that a layer is chosen, and that the keys share the values equally."""
    model = settings.config.model
    if not settings.is_changed(VARIANT):
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
    if not context.is_changed(VARIANT) or heads % (tensor * ranks) == 0:
        return
    asked = context.describe("parallel.tensor_model_parallel_size")
    if ranks > 1:
        asked += f" x {context.describe('parallel.context_parallel_size')}"
    possible = [n for n in range(1, heads + 1) if heads % n == 0]
    yield error(
        f"{asked} must divide {context.describe(_KEY_HEADS)}, because each rank computes complete "
        f"heads of a gated delta net; use {format_alternatives(possible)}."
    )
