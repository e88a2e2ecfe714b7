"""Derives the plan of a run, and finds everything that is wrong with its configuration.

Invariant: a plan is a function of the configuration, the number of processes and the position in
the data. It needs no process group and no device. It is always returned complete: all failures are
collected in `Plan.errors` and none is raised.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from megatron.base.errors import ConfigError, MegatronError
from megatron.base.plain_text import format_alternatives, format_count
from megatron.config.data import DataConfig
from megatron.config.fields import ConfigWithOrigin
from megatron.config.loss import LOSS_MEAN
from megatron.config.optimizer import OptimizerConfig
from megatron.config.tree import Config
from megatron.data.phases import PlannedPhase, check_phase_data, plan_phases, read_phases
from megatron.model import flops
from megatron.model.partition import (
    Stage,
    count_layers_per_rank,
    make_single_stage,
    partition,
)
from megatron.model.shape import ModelShape
from megatron.plan.rules.finding import (
    PlanContext,
    apply_rules,
    list_errors,
    list_warnings,
    warning,
)
from megatron.plan.rules.lists import CONFIG_RULES, PLAN_RULES
from megatron.plan.rules.numbers import replace_wrong_values
from megatron.plan.run_plan import Plan
from megatron.schedule.batch_size import (
    BatchSizeSchedule,
    ConstantBatchSize,
    RampupBatchSize,
    bare_thresholds_as_samples,
    count_iterations_for_samples,
    parse_step_schedule,
)
from megatron.schedule.clock import parse_optional_duration
from megatron.schedule.curriculum import FOREVER
from megatron.schedule.lr import LRSchedule
from megatron.schedule.position import Progress, Steps
from megatron.schedule.skip import SkipRange, parse_ranges
from megatron.tokenizer.vocabulary import (
    check_same_vocab_size,
    compute_padded_vocab_size,
    find_vocab_size,
)

T = TypeVar("T")

RANKS_PER_NODE = 8
"""Ranks of a node, if the caller does not know the number."""


def resolve(
    config: Config,
    world_size: int,
    origin: dict[str, str] | None = None,
    *,
    consumed_samples: int | None = 0,
    consumed_tokens: int = 0,
    iteration: int = 0,
    vocab_size: int | None = None,
    ranks_per_node: int = RANKS_PER_NODE,
) -> Plan:
    """Derive the plan of `config` on `world_size` processes.

    Nothing is raised for the user's mistakes. They are in `Plan.errors`.

    Args:
        config: The configuration as the user gave it.
        world_size: Number of processes.
        origin: Where each dotted field came from (`LoadedConfig.origin`), for the messages.
        consumed_samples: The position from which the run starts, with `consumed_tokens` and
            `iteration`. Batch sizes before it need not fit. The end is counted from it, so a run
            whose batch size changes still trains all its samples. None means that the position is
            not known, as for a plan of --load without access to the checkpoints. See
            `check_batch_sizes`.
        consumed_tokens: Tokens before the start.
        iteration: Iterations before the start.
        vocab_size: Number of real token ids, if another rank has found it. No file is read then,
            neither for this number nor for the data phases nor for a warning.
        ranks_per_node: Ranks of a node, which --sharding-strategy hsdp shards over.
    """
    # Rules report wrong values. They are replaced in `usable`, so that the rest of the plan can be
    # derived and its errors are reported in the same run. The plan keeps `config`.
    given = ConfigWithOrigin(config, origin or {})
    findings = apply_rules(CONFIG_RULES, given)
    settings = replace_wrong_values(given)
    usable = settings.config
    failures: list[str] = []

    def attempt(make: Callable[[], T], otherwise: T) -> T:
        """Return `make()`. If it fails, note the failure and return `otherwise`."""
        try:
            return make()
        except MegatronError as failure:
            # An error may list several mistakes, one on each line.
            failures.extend(str(failure).splitlines())
            return otherwise

    position = None
    if consumed_samples is not None:
        position = Progress(iteration, consumed_samples, consumed_tokens)
    start = position or Progress()
    parallel = usable.parallel
    tensor = parallel.tensor_model_parallel_size
    # At least 1, so that the numbers below exist even if the layout does not fit.
    data_parallel_size = max(1, world_size // parallel.replica_size)
    shard_size = weight_ranks = data_parallel_size * parallel.context_parallel_size
    if parallel.divides(world_size):
        shard_size = attempt(
            lambda: _choose_shard_size(settings, weight_ranks, ranks_per_node), weight_ranks
        )
    # A vocabulary size of 0 means that it could not be determined.
    tokens = vocab_size or 0
    padded = 0
    note: str | None = None
    if vocab_size is None:
        tokens, note = attempt(lambda: _find_vocab_size(settings), (0, note))
        findings += [warning(note)] if note else []
    if tokens:
        padded = attempt(lambda: _pad_vocab_size(usable, tokens), tokens)
    shape = ModelShape(usable.model, tokens, padded)
    # If the model cannot be partitioned, one stage with all layers is the placeholder.
    uncut: tuple[Stage, ...] = (make_single_stage(shape),)
    stages = attempt(lambda: partition(shape, parallel), uncut)
    # If the batch sizes do not give a valid schedule, a constant size is the placeholder.
    stand_in: BatchSizeSchedule = ConstantBatchSize(
        usable.batch.global_batch_size or data_parallel_size
    )
    batch_size = attempt(
        lambda: _build_batch_size(settings, data_parallel_size, position is not None), stand_in
    )
    train_seconds = attempt(lambda: parse_optional_duration(usable.batch.train_time), None)
    train_iters, train_samples = _find_train_end(usable, batch_size, start)
    # After the end of training, because the default end of the decay is the end of the run.
    lr_schedule = attempt(
        lambda: _build_lr_schedule(
            usable, batch_size.final, train_iters, train_samples, train_seconds
        ),
        LRSchedule(0.0, 0.0, "constant", 0, 1),
    )
    no_ranges: tuple[SkipRange, ...] = ()
    skip_ranges = attempt(lambda: parse_ranges(usable.batch.skip_train_iteration_range), no_ranges)
    curriculum = None
    if usable.curriculum.curriculum_schedule_type is not None:
        curriculum = attempt(lambda: usable.curriculum.build(usable.model.seq_length), None)
    data_phases: tuple[PlannedPhase, ...] = ()
    file = usable.data.data_phases
    if vocab_size is None and file is not None and not usable.data.mock_data:
        steps = Steps(batch_size, usable.model.seq_length, curriculum)
        plan_of_file = partial(_plan_data_phases, file, usable.data, steps, start)
        data_phases = attempt(plan_of_file, data_phases)
    ranks = parallel.pipeline_model_parallel_size
    plan = Plan(
        config=usable,
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        vocab_size=tokens,
        padded_vocab_size=padded,
        shape=shape,
        parameters=flops.count_parameters(shape),
        stages=stages,
        stage_parameters=flops.count_stage_parameters(
            shape,
            tensor,
            count_layers_per_rank(stages, ranks),
            count_layers_per_rank(stages, ranks, shape.expert_layers),
            parallel.expert_model_parallel_size,
            count_layers_per_rank(stages, ranks, shape.linear_layers),
        ),
        batch_size=batch_size,
        train_iters=train_iters,
        train_samples=train_samples,
        lr_schedule=lr_schedule,
        curriculum=curriculum,
        skip_ranges=skip_ranges,
        data_phases=data_phases,
        errors=(),
        warnings=(),
        train_seconds=train_seconds,
        shard_size=shard_size,
        start_iteration=iteration,
        assumes_vocab_size=note is not None,
        loss_mean_origin=settings.origin.get(LOSS_MEAN, "default"),
    )
    context = PlanContext(
        usable, settings.origin, plan, position, may_read_files=vocab_size is None
    )
    findings += apply_rules(PLAN_RULES, context)
    return replace(
        plan,
        config=config,
        # Several rules may report the same mistake. `dict.fromkeys` removes duplicates in order.
        errors=tuple(dict.fromkeys([*list_errors(findings), *failures])),
        warnings=tuple(dict.fromkeys(list_warnings(findings))),
    )


def _choose_shard_size(
    settings: ConfigWithOrigin, data_parallel_size: int, ranks_per_node: int
) -> int:
    """Return the number of data-parallel ranks that share one copy of the model.

    Context-parallel ranks have the same weights and other tokens, so they count as data-parallel
    ranks here.

    What the ZeRO stage shards is sharded over them. At stage 0 each rank has its own copy.

    Args:
        settings: The configuration.
        data_parallel_size: Number of data x context ranks.
        ranks_per_node: Ranks of a node.

    Raises:
        ConfigError: The ranks cannot be divided into such groups.
    """
    parallel = settings.config.parallel
    # DeepSpeed runs stage 0 as stage 1.
    if parallel.zero_stage == 0 and not parallel.deepspeed:
        return 1
    if parallel.hsdp_shard_size is None and parallel.sharding_strategy != "hsdp":
        return data_parallel_size
    return _choose_hsdp_size(settings, data_parallel_size, ranks_per_node)


def _choose_hsdp_size(
    settings: ConfigWithOrigin, data_parallel_size: int, ranks_per_node: int
) -> int:
    """Return the size of the groups of HSDP. See `_choose_shard_size`."""
    parallel = settings.config.parallel
    size = parallel.hsdp_shard_size
    if size is not None:
        asked = settings.describe("parallel.hsdp_shard_size")
    else:
        tensor = parallel.tensor_model_parallel_size
        asked = (
            f"{settings.describe('parallel.sharding_strategy')} on nodes of {ranks_per_node} "
            f"ranks with --tensor-model-parallel-size {tensor}"
        )
        if ranks_per_node % tensor or ranks_per_node == tensor > 1:
            raise ConfigError(
                f"{asked}: a node has no whole group of data-parallel ranks to shard over. "
                "Give --hsdp-shard-size, or use --sharding-strategy fsdp."
            )
        # A run on a part of a node has one copy of the model.
        size = min(ranks_per_node // tensor, data_parallel_size)
    if data_parallel_size % size:
        fits = [n for n in range(2, data_parallel_size + 1) if data_parallel_size % n == 0]
        raise ConfigError(
            f"{asked}: the group of {size} must divide the "
            f"{format_count(data_parallel_size, 'data-parallel rank')}; use "
            f"--hsdp-shard-size {format_alternatives(fits or [1])}."
        )
    return size


def _find_vocab_size(settings: ConfigWithOrigin) -> tuple[int, str | None]:
    """Return the number of real token ids, and a warning if there is one.

    Raises:
        ConfigError: The size is not known, or a preset's size is not that of the tokenizer.
    """
    tokenizer = settings.config.tokenizer
    # A size from the user may be larger on purpose. Data with too many ids are refused later.
    if settings.is_from_preset("tokenizer.vocab_size"):
        check_same_vocab_size(tokenizer, settings.describe("tokenizer.vocab_size"))
    return find_vocab_size(tokenizer)


def _pad_vocab_size(config: Config, vocab_size: int) -> int:
    """Return the size of the padded vocabulary."""
    # Every tensor-parallel rank must get the same number of rows.
    tokenizer = config.tokenizer
    tensor = config.parallel.tensor_model_parallel_size
    return compute_padded_vocab_size(
        vocab_size, tokenizer.make_vocab_size_divisible_by, tensor, tokenizer.pad_vocab_size_to
    )


def _build_batch_size(
    settings: ConfigWithOrigin, data_parallel_size: int, at_known_position: bool
) -> BatchSizeSchedule:
    """Build the schedule of batch sizes: steps, a ramp-up, or a constant size.

    Raises:
        ConfigError: The flags do not give a valid schedule.
    """
    batch = settings.config.batch
    if batch.step_batch_size_schedule is not None:
        entries = batch.step_batch_size_schedule
        # Without the position it is not known whether the run resumes a checkpoint whose bare
        # thresholds were samples. The plan assumes so, and `warn_about_bare_thresholds` says it.
        if not at_known_position:
            entries = bare_thresholds_as_samples(entries)
        return parse_step_schedule(entries, settings.config.model.seq_length)
    if batch.rampup_batch_size is None:
        return ConstantBatchSize(_find_constant_size(settings, data_parallel_size))
    if batch.global_batch_size is None:
        raise ConfigError(
            f"{settings.describe('batch.rampup_batch_size')} needs --global-batch-size, the size "
            "that it ends with."
        )
    return RampupBatchSize(*batch.rampup_batch_size, batch.global_batch_size)


def _find_constant_size(settings: ConfigWithOrigin, data_parallel_size: int) -> int:
    """Return the batch size of a run whose batch size does not change.

    Raises:
        ConfigError: The flags give two batch sizes.
    """
    batch = settings.config.batch
    steps = batch.gradient_accumulation_steps
    # The smallest global batch is one microbatch for each data-parallel rank.
    size = batch.micro_batch_size * data_parallel_size * (steps or 1)
    if batch.global_batch_size is None:
        return size
    if steps is not None and size != batch.global_batch_size:
        raise ConfigError(
            f"{settings.describe('batch.gradient_accumulation_steps')} x "
            f"{settings.describe('batch.micro_batch_size')} x data-parallel size "
            f"{data_parallel_size} is {size}, and {settings.describe('batch.global_batch_size')} "
            "contradicts it; leave one of them out."
        )
    return batch.global_batch_size


def _find_train_end(
    config: Config, schedule: BatchSizeSchedule, start: Progress
) -> tuple[int, int]:
    """Return (iterations, samples) of the complete run, or (0, 0) if it has no end.

    Both are counted from the run's current position. If a time ends the run, both are FOREVER.
    """
    batch = config.batch
    if batch.train_time is not None:
        return FOREVER, FOREVER
    seq_length = config.model.seq_length
    if batch.train_samples is None:
        iterations = batch.train_iters or 0
        # A run that is resumed at or after its end trains no more iterations.
        return iterations, Steps(schedule, seq_length).find_iteration(start, iterations).samples
    left = count_iterations_for_samples(
        schedule, batch.train_samples, seq_length, start.samples, start.tokens
    )
    return start.iteration + left, batch.train_samples


def _build_lr_schedule(
    config: Config,
    global_batch_size: int,
    train_iters: int,
    train_samples: int,
    train_seconds: float | None,
) -> LRSchedule:
    """Build the learning-rate schedule, which counts in samples.

    An iteration counts as `global_batch_size` samples, the final size, as in Megatron-LM.

    Raises:
        ConfigError: The flags do not give a valid schedule.
    """
    optimizer = config.optimizer
    batch = config.batch
    # An evaluation does not train, so its flags need no schedule.
    if batch.eval_only:
        return LRSchedule(0.0, 0.0, "constant", 0, 1)

    def convert_to_samples(samples: int | None, iterations: int | None) -> int | None:
        if samples is None and iterations is not None:
            return iterations * global_batch_size
        return samples

    decay = convert_to_samples(optimizer.lr_decay_samples, optimizer.lr_decay_iters)
    # With a decay by time, this number is not used. It is the same for every launch.
    if train_seconds is not None:
        decay = 1
    elif decay is None:
        # A ramp-up is ignored here. Each iteration counts with the final size, as for the decay.
        decay = train_samples
        if config.batch.train_samples is None:
            decay = train_iters * global_batch_size
        # `LRSchedule` rejects a decay of less than one sample. A plan without an end has none.
        decay = max(1, decay)
    warmup: float = (
        # --lr-warmup-samples 0 is the same as leaving it out.
        convert_to_samples(optimizer.lr_warmup_samples or None, optimizer.lr_warmup_iters) or 0
    )
    # The schedule counts samples, so tokens may be a fraction of them.
    if optimizer.lr_warmup_tokens is not None:
        warmup = optimizer.lr_warmup_tokens / config.model.seq_length
    wsd_decay = convert_to_samples(optimizer.lr_wsd_decay_samples, optimizer.lr_wsd_decay_iters)
    # Without a time, a fraction refers to the decay in samples. A rule reports it if a number is
    # given as well.
    if train_seconds is None and optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    if train_seconds is None and optimizer.lr_wsd_decay_fraction is not None:
        wsd_decay = round(optimizer.lr_wsd_decay_fraction * decay)
    schedule = LRSchedule(
        max_lr=optimizer.lr or 0.0,
        min_lr=optimizer.min_lr if optimizer.lr is not None else 0.0,
        style=optimizer.lr_decay_style,
        warmup_steps=warmup,
        decay_steps=decay,
        decay_tokens=optimizer.lr_decay_tokens,
        wsd_decay_steps=wsd_decay,
        wsd_decay_style=optimizer.lr_wsd_decay_style,
        warmup_init=optimizer.lr_warmup_init if optimizer.lr is not None else 0.0,
        warmup_style=optimizer.lr_warmup_style,
        decay_from_start=optimizer.lr_decay_from_start,
        decoupled_max_lr=optimizer.decoupled_lr,
        decoupled_min_lr=_find_decoupled_minimum(optimizer),
        train_seconds=train_seconds,
        warmup_fraction=None if train_seconds is None else optimizer.lr_warmup_fraction,
        wsd_decay_fraction=None if train_seconds is None else optimizer.lr_wsd_decay_fraction,
    )
    schedule.check_decay_after_warmup()
    return schedule


def _plan_data_phases(
    file: str, config: DataConfig, steps: Steps, position: Progress
) -> tuple[PlannedPhase, ...]:
    """Read the file of --data-phases and find where each phase begins.

    Raises:
        ConfigError: The file cannot be read or has errors.
    """
    phases = read_phases(file, streamed=config.dataset_format is not None)
    for phase in phases:
        check_phase_data(config, phase)
    return plan_phases(phases, steps, position)


def _find_decoupled_minimum(optimizer: OptimizerConfig) -> float | None:
    """Return the minimum rate of the word embedding and the output matrix, or None."""
    # A minimum without a peak has no effect, which a warning reports.
    if optimizer.decoupled_lr is None:
        return None
    if optimizer.decoupled_min_lr is None:
        return optimizer.min_lr
    return optimizer.decoupled_min_lr
