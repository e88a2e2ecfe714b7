"""Rules about the model: its shape, attention, gated delta nets and mixtures of experts."""

from collections.abc import Callable, Iterator
from contextlib import suppress

from megatron.base.plain_text import format_alternatives
from megatron.config.fields import ConfigWithOrigin
from megatron.config.layer_choice import choose_layers, find_expert_layers, find_linear_layers
from megatron.config.model import ATTENTION_FIELDS, DROPOUT_STEPS
from megatron.model.layer_parts import NORMS, SOFTMAXES, get_activation
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


ATTENTION_GATE = "model.attention_output_gate"
LATENT_ATTENTION = ATTENTION_FIELDS["latent"]
LINEAR_ATTENTION = ATTENTION_FIELDS["gated_delta_net"]
LINEAR_FREQUENCY = "model.linear_attention_freq"
LATENT_WIDTHS = (
    *("model.q_lora_rank", "model.kv_lora_rank", "model.qk_head_dim", "model.v_head_dim"),
    *("model.qk_pos_emb_head_dim", "model.latent_norm_epsilon"),
)
"""Fields that have no effect without latent attention."""
YARN_SCALES = ("model.mscale", "model.mscale_all_dim")
"""Fields that also have no effect without YaRN."""
_NOT_LATENT = {
    "model.kv_channels": "--qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim are the widths",
    "model.rotary_percent": "--qk-pos-emb-head-dim is the number of rotary channels",
    "model.qk_norm": "the latent vectors have the norms",
    "model.softmax_type": "it was not compared with another softmax",
    "model.parametrization": "it has no rule there",
    ATTENTION_GATE: "it has no gate",
    LINEAR_ATTENTION: "it was not compared with gated delta nets",
    "kernels.rope_fusion": "the kernel rotates a projection to queries, keys and values",
    "precision.fp8_format": "its products have no float8 form",
}
"""Field that excludes latent attention -> why."""
_LINEAR_HEADS = "model.linear_num_key_heads"
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
    asked = settings.describe(LATENT_ATTENTION)
    for dotted, why in _NOT_LATENT.items():
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
    if not settings.is_changed(LINEAR_ATTENTION):
        return
    asked = settings.describe(LINEAR_ATTENTION)
    # `check_layer_choices` reports a text that cannot be read.
    with suppress(ValueError):
        text = model.linear_attention_freq
        if text and not find_linear_layers(text, model.num_layers):
            yield error(
                f"{settings.describe(LINEAR_FREQUENCY)} leaves no layer with {asked}; leave both "
                "out."
            )
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys >= 1 and values % keys:
        yield error(
            f"{settings.describe('model.linear_num_value_heads')} must be a multiple of "
            f"{settings.describe(_LINEAR_HEADS)}; use {values // keys * keys + keys}."
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
    if not context.is_changed(LINEAR_ATTENTION) or heads % (tensor * ranks) == 0:
        return
    asked = context.describe("parallel.tensor_model_parallel_size")
    if ranks > 1:
        asked += f" x {context.describe('parallel.context_parallel_size')}"
    possible = [n for n in range(1, heads + 1) if heads % n == 0]
    yield error(
        f"{asked} must divide {context.describe(_LINEAR_HEADS)}, because each rank computes "
        f"complete heads of a gated delta net; use {format_alternatives(possible)}."
    )


NUM_EXPERTS = "model.num_experts"
EXPERT_RANKS = "parallel.expert_model_parallel_size"
_TOPK = "model.moe_router_topk"
_GROUPS = "model.moe_router_num_groups"
_GROUP_TOPK = "model.moe_router_group_topk"
_SHARED_EXPERT = "model.moe_shared_expert_intermediate_size"
_EXPERT_BIAS = "model.moe_router_enable_expert_bias"
EXPERT_FIELDS = (
    *(_TOPK, _GROUPS, _GROUP_TOPK, _SHARED_EXPERT, _EXPERT_BIAS, EXPERT_RANKS),
    *("model.moe_layer_freq", "model.moe_ffn_hidden_size", "model.moe_router_score_function"),
    *("model.moe_router_pre_softmax", "model.moe_router_topk_scaling_factor"),
    *("model.moe_router_group_score", "model.moe_shared_expert_gate"),
    "loss.moe_router_load_balancing_type",
    *("loss.moe_aux_loss_coeff", "loss.moe_z_loss_coeff", "loss.moe_router_bias_update_rate"),
)
"""Fields that have no effect without experts."""


def check_experts(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the numbers of experts, groups and ranks fit, and that the layer can be built."""
    model = settings.config.model
    number = model.num_experts
    # `check_ranges` reports such values.
    if number is None or number < 2 or model.num_layers < 1:
        return
    asked = settings.describe(NUM_EXPERTS)
    try:
        if not find_expert_layers(model.moe_layer_freq, model.num_layers):
            yield error(
                f"{settings.describe('model.moe_layer_freq')} leaves no layer with experts; leave "
                f"out {asked}."
            )
    except ValueError as failure:
        yield error(f"{settings.describe('model.moe_layer_freq')}: {failure}.")
    if model.moe_router_topk > number:
        yield error(f"{settings.describe(_TOPK)} must be at most {asked}.")
    size = settings.config.parallel.expert_model_parallel_size
    if size >= 1 and number % size:
        possible = [n for n in range(1, number + 1) if number % n == 0]
        yield error(
            f"{settings.describe(EXPERT_RANKS)} must divide {asked}, because each rank has "
            f"complete experts; use {format_alternatives(possible)}."
        )
    yield from _check_expert_groups(settings)
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        yield error(
            f"{settings.describe(_EXPERT_BIAS)} needs --moe-router-score-function sigmoid: a bias "
            "on scores that are a softmax has no fixed meaning; use --moe-aux-loss-coeff instead."
        )
    # Megatron-LM refuses it too.
    spread = model.moe_router_pre_softmax or model.moe_router_score_function == "sigmoid"
    if model.moe_router_topk == 1 and not spread:
        # A checkpoint that was trained so needs it, because its weights fit no other router.
        kind = error if settings.config.checkpoint.load is None else warning
        yield kind(
            f"{settings.describe(_TOPK)} needs --moe-router-pre-softmax: the softmax over a single "
            "expert is 1, so the loss of the tokens gives the router no gradient, and only "
            "auxiliary losses do. Add --moe-router-pre-softmax to a new run."
        )
    yield from _check_expert_layer(settings)


def _check_expert_layer(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that experts and shared expert can be built."""
    model = settings.config.model
    asked = settings.describe(NUM_EXPERTS)
    if get_activation(model).parameters:
        yield error(
            f"{settings.describe('model.activation')} has weights of its own, which experts do not "
            "have; use another activation, or leave out --num-experts."
        )
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        yield error(
            f"{settings.describe('model.moe_shared_expert_gate')} needs "
            "--moe-shared-expert-intermediate-size, the width of the expert that it is for."
        )
    tensor = settings.config.parallel.tensor_model_parallel_size
    width = model.moe_shared_expert_intermediate_size
    if width is not None and tensor >= 1 and width % tensor:
        yield error(
            f"{settings.describe('parallel.tensor_model_parallel_size')} must divide "
            f"{settings.describe(_SHARED_EXPERT)}, which tensor-parallel ranks share."
        )
    if settings.config.recompute.checkpoint_keep_operators:
        yield error(
            f"{settings.describe('recompute.checkpoint_keep_operators')} is not possible with "
            f"{asked}: torch finds kept results by their order, and a recomputed router computes "
            "less than the first pass; leave it out."
        )
    if settings.config.precision.fp8_format is not None:
        yield error(
            f"{settings.describe('precision.fp8_format')} is not possible with {asked}: products "
            "of experts have no float8 form yet; leave it out."
        )


def _check_expert_groups(settings: ConfigWithOrigin) -> Iterator[Finding]:
    model = settings.config.model
    groups = model.moe_router_num_groups
    best = model.moe_router_group_topk
    number = model.num_experts or 0
    if groups is None and best is None:
        return
    if groups is None or best is None:
        given, missing = (_GROUPS, _GROUP_TOPK) if best is None else (_GROUP_TOPK, _GROUPS)
        flag = "--" + missing.rpartition(".")[2].replace("_", "-")
        yield error(f"{settings.describe(given)} needs {flag}; give both or none.")
        return
    # `check_ranges` reports such values.
    if groups < 1 or best < 1:
        return
    if number % groups:
        yield error(f"{settings.describe(_GROUPS)} must divide {settings.describe(NUM_EXPERTS)}.")
    if best > groups:
        yield error(f"{settings.describe(_GROUP_TOPK)} must be at most {groups}, the groups.")
    elif model.moe_router_group_score == "max":
        if model.moe_router_topk > best * (number // groups):
            yield error(
                f"{settings.describe(_TOPK)} must be at most {best * (number // groups)}, the "
                "experts of the groups that a token may use."
            )
    elif model.moe_router_topk % best or model.moe_router_topk // best > number // groups:
        yield error(
            f"{settings.describe(_GROUP_TOPK)} must divide {settings.describe(_TOPK)}, and a group "
            f"of {number // groups} experts must have that many."
        )


def check_expert_parallel(context: PlanContext) -> Iterator[Finding]:
    """Check that the ranks of a stage can be divided into groups that have all experts."""
    if context.config.model.num_experts is None:
        return
    size = context.config.parallel.expert_model_parallel_size
    tensor = context.config.parallel.tensor_model_parallel_size
    ranks = context.plan.weight_ranks * tensor
    if ranks % size:
        fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
        yield error(
            f"{context.describe(EXPERT_RANKS)} must divide the {ranks} ranks of a stage (tensor x "
            f"context x data); use {format_alternatives(fits)}."
        )
        return
    copy = context.plan.shard_size * tensor
    if copy % size and size % copy:
        yield error(
            f"{context.describe(EXPERT_RANKS)} must divide the {copy} ranks that share a copy of "
            "the model, or be a multiple of them; change --hsdp-shard-size or --zero-stage."
        )


def warn_about_balance(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn about routers that nothing balances, and about a loss that depends on microbatches."""
    loss = settings.config.loss
    if settings.config.model.num_experts is None:
        return
    kind = loss.moe_router_load_balancing_type
    balanced = loss.moe_aux_loss_coeff > 0 and kind != "none"
    if not balanced and not settings.config.model.moe_router_enable_expert_bias:
        yield warning(
            f"nothing balances the experts of {settings.describe(NUM_EXPERTS)}: some may get no "
            "tokens; OLMoE has --moe-aux-loss-coeff 0.01."
        )
    if balanced and kind == "global_aux_loss":
        yield warning(
            f"{settings.describe('loss.moe_router_load_balancing_type')} counts the microbatches "
            "of the step so far, so its value depends on their number."
        )
