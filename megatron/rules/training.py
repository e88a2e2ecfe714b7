"""Rules about fields and their combinations that need only the configuration.

This module has the lists of all rules, and those that belong to no other module. Rules that
need the number of processes or a derived number are in `rules/plan.py`.

Invariant: a rule raises nothing and reads nothing but the configuration. All rules run, and all
failures are reported together. Schedules check their own numbers when the plan builds them, so
those errors are not reported here. Examples are the steps of a ramp-up, --min-lr above --lr, and
skipped ranges.

The defaults, and what may be combined, follow Megatron-LM and Megatron-DeepSpeed.
"""

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.curriculum import USED
from megatron.config.fields import all_fields
from megatron.config.parallel import STRATEGY_STAGES
from megatron.config.profiling import check_profile
from megatron.config.recompute import OPERATORS
from megatron.config.tree import Config
from megatron.rules.data import (
    check_data_is_given,
    check_data_path_has_pairs,
    check_end_of_document_is_known,
    check_one_description_of_data,
    check_phases_are_the_training_data,
    check_split_weights,
    check_streamed_data,
)
from megatron.rules.declared import OneOf, Requires
from megatron.rules.float8 import check_float8
from megatron.rules.kernels import (
    check_attention_backend,
    check_gradient_accumulation_fusion,
    check_varlen_attention,
)
from megatron.rules.model import (
    check_heads_divide_hidden_size,
    check_layer_choices,
    check_positions_cover_sequence,
    check_query_key_norm,
    check_rope_scaling,
    check_rotary_dim_is_even,
)
from megatron.rules.ranges import check_ranges
from megatron.rules.spike_guard import (
    check_spike_guard_can_roll_back,
    check_spike_guard_sizes,
)
from megatron.rules.times import check_length_by_time, check_one_wsd_decay, check_times
from megatron.rules.warnings import WARNINGS

Rule = Callable[[ConfigWithOrigin], Iterator[str]]


def check_rules(config: Config, origin: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the errors and the warnings of all rules.

    Args:
        config: The configuration to check.
        origin: Where each field came from, as in `LoadedConfig`. It may be empty.
    """
    settings = ConfigWithOrigin(config, origin)
    return _run(ERRORS, settings), _run(WARNINGS, settings)


def list_missing_for_training(config: Config) -> list[str]:
    """Return an error for each setting that a run needs, although a plan does without it."""
    return _run(NEEDED_BY_RUNS, ConfigWithOrigin(config, {}))


def _run(rules: tuple[Rule, ...], settings: ConfigWithOrigin) -> list[str]:
    return [message for rule in rules for message in rule(settings)]


def check_no_empty_text(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that no value is an empty string.

    An empty path would mean the current folder, or no path at all.
    """
    for dotted, value in settings.list_values().items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            flag = all_fields()[dotted].flag
            yield (
                f"{flag} has an empty value; is a shell variable unset? Leave the flag out, or "
                "give a value."
            )


def check_one_training_length(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that one of --train-iters, --train-samples and --train-time gives the length."""
    batch = settings.config.batch
    lengths = ("batch.train_iters", "batch.train_samples", "batch.train_time")
    given = [dotted for dotted in lengths if settings[dotted] is not None]
    for first, second in itertools.pairwise(given):
        yield (
            f"{settings.describe(first, second)} both set the length of training; give one of them."
        )
    if not given and not batch.eval_only:
        yield (
            "the length of training is not given: use --train-iters or --train-samples "
            f"(or --train-time, or --eval-only).{_convert_tokens(settings)}"
        )


def _convert_tokens(settings: ConfigWithOrigin) -> str:
    """Return how many samples --train-tokens are. The flag alone does not give the length."""
    tokens = settings.config.batch.train_tokens
    length = settings.config.model.seq_length
    # Other rules report values that are too small.
    if tokens is None or tokens < length or length < 1:
        return ""
    return (
        f" {settings.describe('batch.train_tokens')} can only end it earlier. The same length "
        f"is --train-samples {tokens // length} with {length} tokens each."
    )


def check_one_unit_of_progress(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the learning rate is given in the unit that gives the length of training.

    With --train-samples, warm-up and decay are in samples. With --train-iters, they are in
    iterations.
    """
    batch = settings.config.batch
    # Without exactly one length there is no unit to compare with. `check_one_training_length`
    # reports that.
    if (batch.train_iters is None) == (batch.train_samples is None):
        return
    length, foreign, own = (
        ("batch.train_iters", "samples", "iters")
        if batch.train_samples is None
        else ("batch.train_samples", "iters", "samples")
    )
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        dotted = f"optimizer.{name}_{foreign}"
        if settings[dotted]:
            instead = all_fields()[f"optimizer.{name}_{own}"].flag
            yield (
                f"{settings.describe(dotted)} cannot be combined with "
                f"{settings.describe(length)}; use {instead}."
            )


def check_one_warmup(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the warm-up is given in one unit only.

    `check_one_unit_of_progress` reports iterations together with samples.
    """
    # 0 iterations, samples or tokens are the same as no flag. A fraction of 0 is a choice.
    given = [
        f"optimizer.lr_warmup_{unit}"
        for unit in ("fraction", "tokens", "iters", "samples")
        if settings[f"optimizer.lr_warmup_{unit}"]
        or (unit == "fraction" and settings.config.optimizer.lr_warmup_fraction is not None)
    ]
    for first, second in itertools.combinations(given, 2):
        if first in ("optimizer.lr_warmup_fraction", "optimizer.lr_warmup_tokens"):
            yield (
                f"{settings.describe(first, second)} both set the length of the warm-up; give one "
                "of them."
            )


def check_lr_is_given(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --lr is given, unless the run only evaluates."""
    if settings.config.optimizer.lr is None and not settings.config.batch.eval_only:
        yield "--lr is required: the peak learning rate, as in 6e-5."


def check_loss_scale_bounds(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the dynamic loss scale does not start below its minimum."""
    precision = settings.config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"{settings.describe('precision.min_loss_scale')} must not exceed "
            f"{settings.describe('precision.initial_loss_scale')}, the first value of the dynamic "
            "loss scale."
        )


def check_sharding_strategy(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --sharding-strategy, --zero-stage and --hsdp-shard-size do not contradict."""
    parallel = settings.config.parallel
    strategy = parallel.sharding_strategy
    size = parallel.hsdp_shard_size
    if strategy is not None and parallel.zero_stage != STRATEGY_STAGES[strategy]:
        yield (
            f"{settings.describe('parallel.sharding_strategy', 'parallel.zero_stage')} contradict: "
            f"{strategy} means --zero-stage {STRATEGY_STAGES[strategy]}. Give one of them; "
            "--zero-stage with --hsdp-shard-size shards less inside groups."
        )
    elif size is not None and strategy not in (None, "hsdp"):
        yield (
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.sharding_strategy')} "
            "contradict: only hsdp has groups. Use --sharding-strategy hsdp, or leave out "
            "--hsdp-shard-size."
        )
    elif size is not None and parallel.zero_stage == 0:
        yield (
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.zero_stage')} contradict: "
            "stage 0 shards nothing. Leave out --hsdp-shard-size, or use stage 1, 2 or 3."
        )


def check_grad_reduction(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --grad-reduce-in-bf16 is used with --bf16."""
    config = settings.config
    if config.parallel.grad_reduce_in_bf16 and not config.precision.bf16:
        yield (
            "--grad-reduce-in-bf16 needs --bf16: gradients of fp16 and fp32 would lose precision "
            "or range. Add --bf16, or leave out --grad-reduce-in-bf16."
        )


def check_curriculum_flags(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the curriculum's fields fit its type of schedule.

    A field that has no effect is an error here. If --curriculum-schedule-type was forgotten, the
    run would train with other sequence lengths than intended.
    """
    style = settings.config.curriculum.curriculum_schedule_type
    needed, taken = USED[style] if style is not None else (set(), set())
    for name in vars(settings.config.curriculum):
        dotted = f"curriculum.{name}"
        if name in needed and not settings.is_changed(dotted):
            yield (
                f"{settings.describe('curriculum.curriculum_schedule_type')} needs "
                f"{all_fields()[dotted].flag}."
            )
        elif name in {"curriculum_schedule_type", *needed, *taken} or not settings.is_changed(
            dotted
        ):
            continue
        elif style is None:
            yield (
                f"{settings.describe(dotted)} needs --curriculum-schedule-type; without it there "
                "is no curriculum."
            )
        else:
            yield (
                f"{settings.describe(dotted)} has no effect with "
                f"{settings.describe('curriculum.curriculum_schedule_type')}; leave it out."
            )


def check_one_partition_method(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that stages are not described by both a partition method and virtual stages."""
    method = "parallel.pp_partition_method"
    virtual = "parallel.num_layers_per_virtual_pipeline_stage"
    # Virtual stages divide layers uniformly, so the method "uniform" does not contradict them.
    if settings[virtual] is not None and (settings[method] or "uniform").lower() != "uniform":
        yield (
            f"{settings.describe(method, virtual)} both divide the layers into stages; give one "
            "of them."
        )


def check_recompute_fraction(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --checkpoint-fraction is a fraction above 0 and at most 1."""
    try:
        fraction = Fraction(settings.config.recompute.checkpoint_fraction)
    except (ValueError, ZeroDivisionError):
        # A text that is not a fraction counts as 0. 0 is out of range, so the message is the same.
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        yield (
            f"{settings.describe('recompute.checkpoint_fraction')} must be a fraction above 0 and "
            "at most 1: 1 for all layers, 1/3 for every third one, 0.5 for every other one."
        )


def check_kept_operators(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --checkpoint-keep-operators names operators, and that they can be kept."""
    kept = settings.config.recompute.checkpoint_keep_operators
    if not kept:
        return
    asked = settings.describe("recompute.checkpoint_keep_operators")
    if not set(kept) <= set(OPERATORS):
        yield f"{asked}: an operator must be one of {', '.join(OPERATORS)}."
    if not settings.config.recompute.checkpoint_activations:
        yield f"{asked} needs --checkpoint-activations, which recomputes the other operators."
    for dotted in ("recompute.recompute_attention_core", "kernels.use_torch_compile"):
        if settings[dotted]:
            yield (
                f"{asked} is not possible with {settings.describe(dotted)}, which hides the "
                "operators; give one of them."
            )


_LARGEST_BF16_DECAY = 1.0 - 2.0**-8
"""Largest decay rate with which each step without a gradient makes any number in bf16 smaller.

bf16 has 8 significant bits, so a step rounds away changes of less than 2^-8 of some numbers.
"""


def check_bf16_moments(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that moments in bf16 can fall."""
    optimizer = settings.config.optimizer
    rates = [("adam_beta1", "--exp-avg-dtype", optimizer.exp_avg_dtype)]
    rates.append(("adam_beta2", "--exp-avg-sq-dtype", optimizer.exp_avg_sq_dtype))
    if optimizer.optimizer == "muon":
        rates.append(("muon_momentum", "--exp-avg-dtype", optimizer.exp_avg_dtype))
    for name, flag, dtype in rates:
        if dtype == "bf16" and getattr(optimizer, name) > _LARGEST_BF16_DECAY:
            yield (
                f"{settings.describe(f'optimizer.{name}')} with {flag} bf16: a step would change "
                "the moment by less than bf16 can hold, so it would never fall; the rate must be "
                f"at most {_LARGEST_BF16_DECAY} (1 - 2^-8). Lower it, or give {flag} fp32."
            )


_DEEPSPEED_OPTIMIZERS = ("optimizer.cpu_optimizer", "optimizer.use_bnb_optimizer")

ERRORS: tuple[Rule, ...] = (
    check_no_empty_text,
    check_ranges,
    check_one_training_length,
    check_times,
    check_length_by_time,
    check_one_wsd_decay,
    check_one_unit_of_progress,
    check_one_warmup,
    check_lr_is_given,
    OneOf(
        (
            *("batch.rampup_batch_size", "batch.step_batch_size_schedule"),
            "batch.gradient_accumulation_steps",
        )
    ),
    OneOf(
        ("optimizer.override_lr_scheduler", "optimizer.use_checkpoint_lr_scheduler"),
        ": the schedule comes either from this configuration or from the checkpoint",
    ),
    OneOf(("precision.fp16", "precision.bf16")),
    check_loss_scale_bounds,
    check_heads_divide_hidden_size,
    check_rotary_dim_is_even,
    check_rope_scaling,
    check_layer_choices,
    OneOf(
        ("model.activation", "model.glu_activation"),
        ": the first is for an MLP without a gate",
    ),
    check_query_key_norm,
    check_positions_cover_sequence,
    check_split_weights,
    check_data_path_has_pairs,
    check_one_description_of_data,
    check_phases_are_the_training_data,
    check_streamed_data,
    Requires(
        "--save: the ids of the tracker's runs are stored there",
        lambda config: config.checkpoint.save is not None,
        ("logging.tracker",),
    ),
    # --save-interval is not in this list. Published scripts that measure speed have it without
    # --save, so it gives only a warning. A run with --async-save and no folder would train to its
    # end and leave no checkpoint.
    Requires(
        "--save: without it nothing would be saved",
        lambda config: config.checkpoint.save is not None,
        (
            *("checkpoint.save_at", "checkpoint.async_save"),
            *("checkpoint.keep_latest_checkpoints", "checkpoint.hf_export_interval"),
        ),
    ),
    Requires(
        "--keep-latest-checkpoints: without it all checkpoints are kept",
        lambda config: config.checkpoint.keep_latest_checkpoints is not None,
        ("checkpoint.keep_every",),
    ),
    # These flags have a meaning only for a checkpoint that is loaded.
    Requires(
        "--load, the folder of the checkpoint",
        lambda config: config.checkpoint.load is not None,
        (
            *("checkpoint.finetune", "checkpoint.require_load", "checkpoint.load_iteration"),
            "batch.eval_only",
        ),
    ),
    Requires(
        "--eval-tasks, the names of the tasks",
        lambda config: bool(config.batch.eval_tasks),
        tuple(
            f"batch.eval_tasks_{name}" for name in ("interval", "folder", "num_fewshot", "limit")
        ),
    ),
    # --eval-only evaluates the tasks once.
    Requires(
        "--eval-tasks-interval, the iterations between two evaluations",
        lambda config: config.batch.eval_tasks_interval is not None or config.batch.eval_only,
        ("batch.eval_tasks",),
    ),
    OneOf(("checkpoint.require_load", "checkpoint.allow_fresh_start")),
    check_spike_guard_can_roll_back,
    check_spike_guard_sizes,
    check_bf16_moments,
    OneOf(_DEEPSPEED_OPTIMIZERS),
    # The native engine (FSDP2) supports neither of them.
    Requires(
        "--deepspeed; without it, --zero-stage shards the optimizer's states over the ranks",
        lambda config: config.parallel.deepspeed,
        _DEEPSPEED_OPTIMIZERS,
    ),
    check_sharding_strategy,
    check_grad_reduction,
    check_curriculum_flags,
    check_end_of_document_is_known,
    check_one_partition_method,
    check_recompute_fraction,
    check_kept_operators,
    check_attention_backend,
    check_varlen_attention,
    check_gradient_accumulation_fusion,
    check_profile,
    check_float8,
)
"""All rules whose failure is an error, in the order in which their messages are reported."""

NEEDED_BY_RUNS: tuple[Rule, ...] = (check_data_is_given,)
"""Rules for a run that is about to start. A plan may be made before there is data."""
