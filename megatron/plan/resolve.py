"""Derives the plan of a run, and finds everything that is wrong with its configuration.

Invariant: a plan is a function of the configuration, the number of processes and the position in
the data. It needs no process group and no device. It is always returned complete: all failures are
collected in `Plan.errors` and none is raised.
"""

from megatron.base.errors import ConfigError
from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.loss import LOSS_MEAN
from megatron.config.optimizer import OptimizerConfig
from megatron.config.tree import Config
from megatron.data.phases import check_phase_data, plan_phases, read_phases
from megatron.data.planned_phase import PlannedPhase
from megatron.model import flops
from megatron.model.partition import Stage, count_layers_per_rank, make_single_stage, partition
from megatron.model.shape import ModelShape
from megatron.plan.run_plan import Plan
from megatron.rules.lists import check_rules
from megatron.rules.plan import (
    PlanReport,
    check_batch_sizes,
    check_context_parallel,
    check_curriculum,
    check_grid,
    check_muon,
    check_profile,
    check_tensor_parallel,
    choose_shard_size,
    replace_wrong_values,
    warn_of_files,
    warn_of_phases,
    warn_of_pipeline,
    warn_of_shape,
)
from megatron.rules.widths import warn_of_widths
from megatron.schedule.batch_size import (
    BatchSizeSchedule,
    ConstantBatchSize,
    RampupBatchSize,
    bare_thresholds_as_samples,
    count_iterations_for_samples,
    parse_step_schedule,
    step_entries,
)
from megatron.schedule.clock import parse_duration
from megatron.schedule.curriculum import FOREVER, Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.position import Progress, Steps
from megatron.schedule.skip import SkipRange, parse_ranges
from megatron.tokenizer import (
    check_same_vocab_size,
    compute_padded_vocab_size,
    find_vocab_size,
)

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
    # `check_rules` reports wrong values. They are replaced in `usable`, so that the rest of the
    # plan can be derived and its errors are reported in the same run. The plan keeps `config`.
    errors, warnings = check_rules(config, origin or {})
    report = PlanReport(
        replace_wrong_values(ConfigWithOrigin(config, origin or {})), errors, warnings
    )
    usable = report.config
    tensor = usable.parallel.tensor_model_parallel_size
    pipeline = usable.parallel.pipeline_model_parallel_size

    grid_fits = check_grid(world_size, report)
    # At least 1, so that the numbers below exist even if the grid does not fit.
    context = usable.parallel.context_parallel_size
    data_parallel_size = max(1, world_size // (tensor * pipeline * context))
    shard_size = data_parallel_size * context
    if grid_fits:
        shard_size = choose_shard_size(shard_size, ranks_per_node, report)

    # `attempt` notes a failure and returns the placeholder, so that the later rules still run. A
    # vocabulary size of 0 means that it could not be determined.
    if vocab_size is None:
        tokens = report.attempt(lambda: _find_vocab_size(report), 0)
    else:
        tokens = vocab_size
    if tokens:
        padded = report.attempt(lambda: _pad_vocab_size(usable, tokens), tokens)
    else:
        padded = 0
    shape = ModelShape(usable.model, tokens, padded)
    check_tensor_parallel(shape, report)
    check_context_parallel(report)
    check_muon(shape, report)
    # If the model cannot be partitioned, one stage with all layers is the placeholder.
    uncut: tuple[Stage, ...] = (make_single_stage(shape),)
    stages = report.attempt(lambda: partition(shape, usable.parallel), uncut)

    # If the batch sizes do not give a valid schedule, a constant size is the placeholder.
    stand_in: BatchSizeSchedule = ConstantBatchSize(
        usable.batch.global_batch_size or data_parallel_size
    )
    at_known_position = consumed_samples is not None
    batch_size = report.attempt(
        lambda: _build_batch_size(report, data_parallel_size, at_known_position), stand_in
    )
    # On a grid that does not fit, the data-parallel size is a placeholder. An error about batch
    # sizes would only mislead.
    if grid_fits:
        check_batch_sizes(batch_size, data_parallel_size, consumed_samples, report)
    train_seconds = report.attempt(lambda: _parse_train_time(usable), None)
    train_iters, train_samples = _find_train_end(
        batch_size, iteration, consumed_samples or 0, consumed_tokens, report
    )
    # After the end of training, because the default end of the decay is the end of the run.
    lr_schedule = report.attempt(
        lambda: _build_lr_schedule(
            usable, batch_size.final, train_iters, train_samples, train_seconds
        ),
        LRSchedule(0.0, 0.0, "constant", 0, 1),
    )
    skip_ranges = _parse_skip_ranges(train_iters, report)

    curriculum = report.attempt(lambda: build_curriculum(report.config), None)
    check_curriculum(
        curriculum, batch_size, range(iteration + 1, train_iters + 1), consumed_tokens, report
    )
    check_profile(world_size, train_iters, report)
    no_phases: tuple[PlannedPhase, ...] = ()
    data_phases = no_phases
    if vocab_size is None:
        steps = Steps(batch_size, usable.model.seq_length, curriculum)
        position = Progress(iteration, consumed_samples or 0, consumed_tokens)
        data_phases = report.attempt(lambda: _plan_data_phases(usable, steps, position), no_phases)
        warn_of_phases(data_phases, train_iters, report)
    warn_of_shape(shape, report)
    warn_of_widths(shape, report)
    warn_of_pipeline(stages, batch_size, data_parallel_size, report)
    if vocab_size is None:
        warn_of_files(report, data_phases)
    return Plan(
        config=config,
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        vocab_size=tokens,
        padded_vocab_size=padded,
        shape=shape,
        parameters=flops.count_parameters(shape),
        stages=stages,
        stage_parameters=flops.count_stage_parameters(
            shape, tensor, count_layers_per_rank(stages, pipeline)
        ),
        batch_size=batch_size,
        train_iters=train_iters,
        train_samples=train_samples,
        lr_schedule=lr_schedule,
        curriculum=curriculum,
        skip_ranges=skip_ranges,
        data_phases=data_phases,
        # Several rules may report the same mistake. `dict.fromkeys` removes duplicates in order.
        errors=tuple(dict.fromkeys(report.errors)),
        warnings=tuple(dict.fromkeys(report.warnings)),
        train_seconds=train_seconds,
        shard_size=shard_size,
        loss_mean_origin=(origin or {}).get(LOSS_MEAN, "default"),
    )


def _find_vocab_size(report: PlanReport) -> int:
    """Return the number of real token ids, and add a warning to the report if there is one.

    Raises:
        ConfigError: The size is not known, or a preset's size is not that of the tokenizer.
    """
    tokenizer = report.config.tokenizer
    # A size from the user may be larger on purpose. Data with too many ids are refused later.
    if report.asked.is_from_preset("tokenizer.vocab_size"):
        check_same_vocab_size(tokenizer, report.describe("tokenizer.vocab_size"))
    size, warning = find_vocab_size(tokenizer)
    if warning:
        report.warnings.append(warning)
    return size


def _pad_vocab_size(config: Config, vocab_size: int) -> int:
    """Return the size of the padded vocabulary."""
    # Every tensor-parallel rank must get the same number of rows.
    tokenizer = config.tokenizer
    tensor = config.parallel.tensor_model_parallel_size
    return compute_padded_vocab_size(
        vocab_size, tokenizer.make_vocab_size_divisible_by, tensor, tokenizer.pad_vocab_size_to
    )


def _build_batch_size(
    report: PlanReport, data_parallel_size: int, at_known_position: bool
) -> BatchSizeSchedule:
    """Build the schedule of batch sizes: steps, a ramp-up, or a constant size.

    Raises:
        ConfigError: The flags do not give a valid schedule.
    """
    batch = report.config.batch
    if batch.step_batch_size_schedule is not None:
        entries = batch.step_batch_size_schedule
        # Without the position it is not known whether the run resumes a checkpoint whose bare
        # thresholds were samples. The plan assumes so and warns.
        spelled = bare_thresholds_as_samples(entries)
        if not at_known_position and spelled != step_entries(entries):
            report.warnings.append(
                f"{report.describe('batch.step_batch_size_schedule')} has a threshold without a "
                f"unit. It is planned as '{' '.join(spelled)}', as the resume of an older run "
                "reads it; a new run is refused."
            )
            entries = spelled
        steps = parse_step_schedule(entries, report.config.model.seq_length)
        if batch.global_batch_size not in (None, steps.final):
            report.errors.append(
                f"{report.describe('batch.global_batch_size')} "
                f"contradicts {report.describe('batch.step_batch_size_schedule')}, which ends "
                f"with {steps.final}; leave --global-batch-size out."
            )
        return steps
    if batch.rampup_batch_size is None:
        return ConstantBatchSize(_find_constant_size(report, data_parallel_size))
    if batch.global_batch_size is None:
        raise ConfigError(
            f"{report.describe('batch.rampup_batch_size')} needs --global-batch-size, the size "
            "that it ends with."
        )
    return RampupBatchSize(*batch.rampup_batch_size, batch.global_batch_size)


def _find_constant_size(report: PlanReport, data_parallel_size: int) -> int:
    """Return the batch size of a run whose batch size does not change.

    Raises:
        ConfigError: The flags give two batch sizes.
    """
    batch = report.config.batch
    steps = batch.gradient_accumulation_steps
    # The smallest global batch is one microbatch for each data-parallel rank.
    size = batch.micro_batch_size * data_parallel_size * (steps or 1)
    if batch.global_batch_size is None:
        return size
    if steps is not None and size != batch.global_batch_size:
        raise ConfigError(
            f"{report.describe('batch.gradient_accumulation_steps')} x "
            f"{report.describe('batch.micro_batch_size')} x data-parallel size "
            f"{data_parallel_size} is {size}, and {report.describe('batch.global_batch_size')} "
            "contradicts it; leave one of them out."
        )
    return batch.global_batch_size


def build_curriculum(config: Config) -> Curriculum | None:
    """Build the curriculum that the flags describe.

    Returns:
        The curriculum, or None if the flags describe none or only a part of one. `megatron.rules`
        reports the latter.

    Raises:
        ConfigError: The numbers do not give a valid schedule.
    """
    settings = config.curriculum
    style = settings.curriculum_schedule_type
    if settings.curriculum_max_difficulty is None:
        longest = config.model.seq_length
    else:
        longest = settings.curriculum_max_difficulty
    # This style lists its lengths. The others compute them from minimum, maximum and steps.
    if style == "fixed_discrete" and settings.curriculum_difficulties:
        lengths = settings.curriculum_difficulties
        return Curriculum(
            style,
            min(lengths),
            max(lengths),
            difficulties=lengths,
            max_steps=settings.curriculum_max_steps,
        )
    if (
        style in (None, "fixed_discrete")
        or settings.curriculum_min_difficulty is None
        or settings.curriculum_total_step is None
    ):
        return None
    if style == "fixed_root" and settings.curriculum_root_degree is None:
        return None
    return Curriculum(
        style,
        settings.curriculum_min_difficulty,
        longest,
        total_curriculum_step=settings.curriculum_total_step,
        difficulty_step=settings.curriculum_difficulty_step,
        root_degree=settings.curriculum_root_degree,
    )


def _parse_train_time(config: Config) -> float | None:
    """Return the seconds of --train-time, or None without it.

    Raises:
        ConfigError: The value is not a duration.
    """
    # `megatron.rules` reports an empty text.
    if not config.batch.train_time:
        return None
    return parse_duration(config.batch.train_time)


def _find_train_end(
    schedule: BatchSizeSchedule,
    iteration: int,
    consumed_samples: int,
    consumed_tokens: int,
    report: PlanReport,
) -> tuple[int, int]:
    """Return (iterations, samples) of the complete run, or (0, 0) if it has no end.

    Both are counted from the run's current position. If a time ends the run, both are FOREVER.
    """
    batch = report.config.batch
    if batch.train_time is not None:
        return FOREVER, FOREVER
    seq_length = report.config.model.seq_length
    if batch.train_samples is None:
        iterations = batch.train_iters or 0
        # A run that is resumed at or after its end trains no more iterations.
        position = Progress(iteration, consumed_samples, consumed_tokens)
        return iterations, Steps(schedule, seq_length).find_iteration(position, iterations).samples
    iterations = iteration + count_iterations_for_samples(
        schedule, batch.train_samples, seq_length, consumed_samples, consumed_tokens
    )
    # Fewer samples than one batch would end the run before its first step.
    if iterations < 1:
        report.errors.append(
            f"{report.describe('batch.train_samples')} is less than one batch; give at least "
            f"{schedule.get_size(0, 0)}, the first batch size."
        )
    return iterations, batch.train_samples


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
        decay = _count_training_samples(config, global_batch_size, train_iters, train_samples)
    warmup: float = (
        # --lr-warmup-samples 0 is the same as leaving it out.
        convert_to_samples(optimizer.lr_warmup_samples or None, optimizer.lr_warmup_iters) or 0
    )
    # The schedule counts samples, so tokens may be a fraction of them.
    if optimizer.lr_warmup_tokens is not None:
        warmup = optimizer.lr_warmup_tokens / config.model.seq_length
    wsd_decay = convert_to_samples(optimizer.lr_wsd_decay_samples, optimizer.lr_wsd_decay_iters)
    # Without a time, a fraction refers to the decay in samples. `megatron.rules` reports it if a
    # number is given as well.
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


def _count_training_samples(
    config: Config, global_batch_size: int, train_iters: int, train_samples: int
) -> int:
    """Return the samples at which the decay of the learning rate ends by default."""
    if config.batch.train_samples is not None:
        training = train_samples
    else:
        # A ramp-up is ignored here. Each iteration counts with the final size, as for the decay.
        training = train_iters * global_batch_size
    # `LRSchedule` rejects a decay of less than one sample. A plan without an end has none.
    return max(1, training)


def _plan_data_phases(config: Config, steps: Steps, position: Progress) -> tuple[PlannedPhase, ...]:
    """Read --data-phases and find where each phase begins. There are none without the flag.

    Raises:
        ConfigError: The file cannot be read or has errors.
    """
    path = config.data.data_phases
    if path is None or config.data.mock_data:
        return ()
    phases = read_phases(path, streamed=config.data.dataset_format is not None)
    for phase in phases:
        check_phase_data(config.data, phase)
    return plan_phases(phases, steps, position)


def _find_decoupled_minimum(optimizer: OptimizerConfig) -> float | None:
    """Return the minimum rate of the word embedding and the output matrix, or None."""
    # A minimum without a peak has no effect, which a warning reports.
    if optimizer.decoupled_lr is None:
        return None
    if optimizer.decoupled_min_lr is None:
        return optimizer.min_lr
    return optimizer.decoupled_min_lr


def _parse_skip_ranges(train_iters: int, report: PlanReport) -> tuple[SkipRange, ...]:
    """Return the merged ranges to skip. Warn if they reach the end of training."""
    none: tuple[SkipRange, ...] = ()
    ranges = report.attempt(
        lambda: parse_ranges(report.config.batch.skip_train_iteration_range), none
    )
    if ranges and ranges[-1][1] >= train_iters > 0:
        report.warnings.append(
            f"{report.describe('batch.skip_train_iteration_range')} reaches the end of training at "
            f"iteration {train_iters}."
        )
    return ranges
