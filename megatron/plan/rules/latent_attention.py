"""Rules about latent attention."""

from collections.abc import Iterator

from megatron.config.fields import ConfigWithOrigin
from megatron.plan.rules.finding import Finding, error

LATENT = "model.multi_latent_attention"
WIDTHS = (
    *("model.q_lora_rank", "model.kv_lora_rank", "model.qk_head_dim", "model.v_head_dim"),
    *("model.qk_pos_emb_head_dim", "model.latent_norm_epsilon"),
)
"""Fields that have no effect without it."""
SCALES = ("model.mscale", "model.mscale_all_dim")
"""Those that have none without YaRN either."""
_FORBIDDEN = {
    "model.kv_channels": "--qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim are the widths",
    "model.rotary_percent": "--qk-pos-emb-head-dim is the number of rotary channels",
    "model.qk_norm": "the latent vectors have the norms",
    "model.softmax_type": "it was not compared with another softmax",
    "model.parametrization": "it has no rule there",
    "model.attention_output_gate": "it has no gate",
    "model.experimental_attention_variant": "it was not compared with gated delta nets",
    "kernels.rope_fusion": "the kernel rotates a projection to queries, keys and values",
    "precision.fp8_format": "its products have no float8 form",
}
"""Field that excludes latent attention -> why."""


def check_latent_attention(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the other settings fit, and that rotary channels are pairs."""
    model = settings.config.model
    if not model.multi_latent_attention:
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
