"""Rules about mixtures of experts and the ranks that divide them."""

from collections.abc import Iterator

from megatron.base.plain_text import format_alternatives
from megatron.config.fields import ConfigWithOrigin
from megatron.config.layer_choice import find_expert_layers
from megatron.model.layer_parts import get_activation
from megatron.plan.rules.finding import Finding, PlanContext, error, warning

NUMBER = "model.num_experts"
SIZE = "parallel.expert_model_parallel_size"
_TOPK = "model.moe_router_topk"
_GROUPS = "model.moe_router_num_groups"
_GROUP_TOPK = "model.moe_router_group_topk"
_SHARED = "model.moe_shared_expert_intermediate_size"
_BIAS = "model.moe_router_enable_expert_bias"
FIELDS = (
    *(_TOPK, _GROUPS, _GROUP_TOPK, _SHARED, _BIAS, SIZE),
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
    asked = settings.describe(NUMBER)
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
            f"{settings.describe(SIZE)} must divide {asked}, because each rank has complete "
            f"experts; use {format_alternatives(possible)}."
        )
    yield from _check_groups(settings)
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        yield error(
            f"{settings.describe(_BIAS)} needs --moe-router-score-function sigmoid: a bias on "
            f"scores that are a softmax has no fixed meaning; use --moe-aux-loss-coeff instead."
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
    yield from _check_layer(settings)


def _check_layer(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that experts and shared expert can be built."""
    model = settings.config.model
    asked = settings.describe(NUMBER)
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
            f"{settings.describe(_SHARED)}, which tensor-parallel ranks share."
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


def _check_groups(settings: ConfigWithOrigin) -> Iterator[Finding]:
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
        yield error(f"{settings.describe(_GROUPS)} must divide {settings.describe(NUMBER)}.")
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
            f"{context.describe(SIZE)} must divide the {ranks} ranks of a stage (tensor x context "
            f"x data); use {format_alternatives(fits)}."
        )
        return
    copy = context.plan.shard_size * tensor
    if copy % size and size % copy:
        yield error(
            f"{context.describe(SIZE)} must divide the {copy} ranks that share a copy of the "
            "model, or be a multiple of them; change --hsdp-shard-size or --zero-stage."
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
            f"nothing balances the experts of {settings.describe(NUMBER)}: some may get no tokens; "
            "OLMoE has --moe-aux-loss-coeff 0.01."
        )
    if balanced and kind == "global_aux_loss":
        yield warning(
            f"{settings.describe('loss.moe_router_load_balancing_type')} counts the microbatches "
            "of the step so far, so its value depends on their number."
        )
