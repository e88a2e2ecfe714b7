"""Rules about the layout of the ranks, and about what each of them recomputes."""

from collections.abc import Iterator
from fractions import Fraction

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.parallel import STRATEGY_STAGES
from megatron.config.recompute import OPERATORS
from megatron.rules.finding import Finding, error


def check_sharding_strategy(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --sharding-strategy, --zero-stage and --hsdp-shard-size do not contradict."""
    parallel = settings.config.parallel
    strategy = parallel.sharding_strategy
    size = parallel.hsdp_shard_size
    if strategy is not None and parallel.zero_stage != STRATEGY_STAGES[strategy]:
        yield error(
            f"{settings.describe('parallel.sharding_strategy', 'parallel.zero_stage')} contradict: "
            f"{strategy} means --zero-stage {STRATEGY_STAGES[strategy]}. Give one of them; "
            "--zero-stage with --hsdp-shard-size shards less inside groups."
        )
    elif size is not None and strategy not in (None, "hsdp"):
        yield error(
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.sharding_strategy')} "
            "contradict: only hsdp has groups. Use --sharding-strategy hsdp, or leave out "
            "--hsdp-shard-size."
        )
    elif size is not None and parallel.zero_stage == 0:
        yield error(
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.zero_stage')} contradict: "
            "stage 0 shards nothing. Leave out --hsdp-shard-size, or use stage 1, 2 or 3."
        )


def check_one_partition_method(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that stages are not described by both a partition method and virtual stages."""
    method = "parallel.pp_partition_method"
    virtual = "parallel.num_layers_per_virtual_pipeline_stage"
    # Virtual stages divide layers uniformly, so the method "uniform" does not contradict them.
    if settings[virtual] is not None and (settings[method] or "uniform").lower() != "uniform":
        yield error(
            f"{settings.describe(method, virtual)} both divide the layers into stages; give one "
            "of them."
        )


def check_recompute_fraction(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --checkpoint-fraction is a fraction above 0 and at most 1."""
    try:
        fraction = Fraction(settings.config.recompute.checkpoint_fraction)
    except (ValueError, ZeroDivisionError):
        # A text that is not a fraction counts as 0. 0 is out of range, so the message is the same.
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        yield error(
            f"{settings.describe('recompute.checkpoint_fraction')} must be a fraction above 0 and "
            "at most 1: 1 for all layers, 1/3 for every third one, 0.5 for every other one."
        )


def check_kept_operators(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --checkpoint-keep-operators names operators, and that they can be kept."""
    kept = settings.config.recompute.checkpoint_keep_operators
    if not kept:
        return
    asked = settings.describe("recompute.checkpoint_keep_operators")
    if not set(kept) <= set(OPERATORS):
        yield error(f"{asked}: an operator must be one of {', '.join(OPERATORS)}.")
    if not settings.config.recompute.checkpoint_activations:
        yield error(
            f"{asked} needs --checkpoint-activations, which recomputes the other operators."
        )
    for dotted in ("recompute.recompute_attention_core", "kernels.use_torch_compile"):
        if settings[dotted]:
            yield error(
                f"{asked} is not possible with {settings.describe(dotted)}, which hides the "
                "operators; give one of them."
            )
