"""Rules about the length of training, batch sizes, learning rate, curriculum and spike guard."""

import itertools
from collections.abc import Iterator

from megatron.base.errors import ConfigError
from megatron.base.plain_text import format_alternatives
from megatron.config.curriculum import USED
from megatron.config.fields import ConfigWithOrigin, all_fields
from megatron.config.tree import Config
from megatron.plan.rules.finding import Finding, PlanContext, error, warning
from megatron.schedule.batch_size import (
    ConstantBatchSize,
    RampupBatchSize,
    StepBatchSize,
    bare_thresholds_as_samples,
    step_entries,
)
from megatron.schedule.clock import parse_duration
from megatron.schedule.position import Steps

_ROLLBACK = "--spike-guard rollback"


def check_spike_guard_can_roll_back(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --spike-guard rollback has checkpoints from which the run can start again."""
    config = settings.config
    checkpoint = config.checkpoint
    if config.guard.spike_guard != "rollback" or config.batch.eval_only:
        return
    if not checkpoint.resumes_itself:
        yield error(
            f"{_ROLLBACK} needs the same folder for --save and --load, because the run starts from "
            "its own checkpoints again; give both."
        )
    if checkpoint.save_interval is None and checkpoint.save_interval_time is None:
        yield error(f"{_ROLLBACK} needs checkpoints to go back to; give --save-interval.")
    # These flags choose the checkpoint of a start. A rollback is a start too.
    for dotted in ("checkpoint.load_iteration", "checkpoint.finetune"):
        if settings[dotted]:
            yield error(
                f"{settings.describe(dotted)} cannot be combined with {_ROLLBACK}, because it "
                "would apply again after each rollback; leave one of them out."
            )
    if not (checkpoint.save_optim and checkpoint.load_optim):
        yield error(
            f"{_ROLLBACK} needs the optimizer's state in the checkpoints; leave out "
            "--no-save-optim and --no-load-optim."
        )
    # A loss of nan is a spike, and both limits count it.
    if config.guard.spike_guard_patience > config.batch.max_nan_iterations:
        both = settings.describe("guard.spike_guard_patience", "batch.max_nan_iterations")
        yield error(
            f"{both}: the run would end before the guard rolls back; the first must not be larger "
            "than the second."
        )


def check_spike_guard_sizes(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --spike-guard-min-steps is at most --spike-guard-window."""
    guard = settings.config.guard
    if guard.spike_guard_min_steps > guard.spike_guard_window:
        both = settings.describe("guard.spike_guard_min_steps", "guard.spike_guard_window")
        yield error(f"{both}: the first must not be larger than the second.")


TIMES = ("batch.train_time", "batch.eval_interval_time", "checkpoint.save_interval_time")
"""Fields that hold a time."""
_LONG_ITERATIONS = 5_000
_LONG_TOKENS = 5_000_000_000
"""A run of this length is expected to warm up."""
_BY_TIME = "the learning rate follows the time; leave it out"
_WSD_BY_TIME = "give --lr-wsd-decay-fraction"
_NEEDS_KNOWN_LENGTH = {
    "batch.train_tokens": "the time ends the run; give one of them",
    "optimizer.lr_decay_iters": _BY_TIME,
    "optimizer.lr_decay_samples": _BY_TIME,
    "optimizer.lr_decay_tokens": _BY_TIME,
    "optimizer.lr_wsd_decay_iters": _WSD_BY_TIME,
    "optimizer.lr_wsd_decay_samples": _WSD_BY_TIME,
}
"""Field that contradicts --train-time -> what to do."""


def check_no_empty_text(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that no value is an empty string.

    An empty path would mean the current folder, or no path at all.
    """
    for dotted, value in settings.list_values().items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            flag = all_fields()[dotted].flag
            yield error(
                f"{flag} has an empty value; is a shell variable unset? Leave the flag out, or "
                "give a value."
            )


def check_one_training_length(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that one of --train-iters, --train-samples and --train-time gives the length."""
    batch = settings.config.batch
    lengths = ("batch.train_iters", "batch.train_samples", "batch.train_time")
    given = [dotted for dotted in lengths if settings[dotted] is not None]
    for first, second in itertools.pairwise(given):
        yield error(
            f"{settings.describe(first, second)} both set the length of training; give one of them."
        )
    if not given and not batch.eval_only:
        yield error(
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


def check_one_unit_of_progress(settings: ConfigWithOrigin) -> Iterator[Finding]:
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
            yield error(
                f"{settings.describe(dotted)} cannot be combined with "
                f"{settings.describe(length)}; use {instead}."
            )


def check_one_warmup(settings: ConfigWithOrigin) -> Iterator[Finding]:
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
            yield error(
                f"{settings.describe(first, second)} both set the length of the warm-up; give one "
                "of them."
            )


def check_lr_is_given(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --lr is given, unless the run only evaluates."""
    if settings.config.optimizer.lr is None and not settings.config.batch.eval_only:
        yield error("--lr is required: the peak learning rate, as in 6e-5.")


def warn_ramp_by_iterations(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if the batch size changes in a run whose length is given in iterations.

    The learning rate's schedule counts samples. It converts iterations with the final batch size.
    """
    batch = settings.config.batch
    changing = "batch.step_batch_size_schedule"
    if batch.rampup_batch_size is not None:
        changing = "batch.rampup_batch_size"
    if batch.train_iters is not None and settings[changing] is not None:
        yield warning(
            f"{settings.describe(changing)} with {settings.describe('batch.train_iters')}: the "
            "learning rate's warm-up and decay count each iteration with the final batch size, "
            "so they last longer than the given iterations; --train-samples and --lr-*-samples "
            "are exact."
        )


def warn_warmup_tokens_with_curriculum(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if a warm-up in tokens is converted to samples, but sequences start short."""
    curriculum = settings.config.curriculum.curriculum_schedule_type
    if settings.config.optimizer.lr_warmup_tokens and curriculum is not None:
        yield warning(
            f"{settings.describe('optimizer.lr_warmup_tokens')} is inexact with a curriculum: it "
            "is divided by the full --seq-length, and the first sequences are shorter; use "
            "--lr-warmup-samples for an exact length."
        )


def has_no_warmup(config: Config) -> bool:
    """Return whether no length of a warm-up is given. A length of 0 is none."""
    units = ("fraction", "iters", "samples", "tokens")
    return not any(getattr(config.optimizer, f"lr_warmup_{unit}") for unit in units)


def warn_missing_warmup(context: PlanContext) -> Iterator[Finding]:
    """Warn about a long run without a warm-up. Published runs of this length warm up.

    Source: https://arxiv.org/abs/2302.13971, section 2.3 (2,000 iterations).
    """
    plan = context.plan
    # The length of a run by time is not known, and a resume is warm.
    starts = plan.train_seconds is None and context.start.iteration == 0
    is_long = plan.train_iters >= _LONG_ITERATIONS or plan.train_tokens >= _LONG_TOKENS
    if starts and is_long and has_no_warmup(context.config):
        yield warning(
            f"{context.describe('optimizer.lr')} applies from the first iteration on, without a "
            "warm-up, and large models then often diverge. Published runs warm up over about 2,000 "
            "iterations: give --lr-warmup-iters, -samples, -tokens or -fraction."
        )


def warn_decay_of_missing_warmup(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if the decay depends on the length of the warm-up, and no warm-up is given."""
    style = settings.config.optimizer.lr_decay_style
    if style == "inverse-square-root" and has_no_warmup(settings.config):
        yield warning(
            f"{settings.describe('optimizer.lr_decay_style')} without a warm-up: --lr is the rate "
            "at the first sample, and falls to a tenth of it in 100 samples; give "
            "--lr-warmup-samples, -iters, -tokens or -fraction."
        )


def warn_about_skipped_end(context: PlanContext) -> Iterator[Finding]:
    """Warn about skipped iterations that reach the end of training."""
    ranges = context.plan.skip_ranges
    train_iters = context.plan.train_iters
    if ranges and ranges[-1][1] >= train_iters > 0:
        yield warning(
            f"{context.describe('batch.skip_train_iteration_range')} reaches the end of training "
            f"at iteration {train_iters}."
        )


def check_times(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that each time is a number with its unit."""
    for dotted in TIMES:
        # `check_no_empty_text` reports an empty text.
        if not settings[dotted]:
            continue
        try:
            parse_duration(settings[dotted])
        except ConfigError as failure:
            yield error(f"{settings.describe(dotted)}: {failure}.")


def check_length_by_time(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that with --train-time no other flag gives the end of the run or of the decay.

    The warm-up may be given in one unit only.
    """
    if settings.config.batch.train_time is None:
        return
    time = settings.describe("batch.train_time")
    for dotted, instead in _NEEDS_KNOWN_LENGTH.items():
        if settings[dotted] is not None:
            yield error(f"{settings.describe(dotted)} cannot be combined with {time}; {instead}.")
    if settings["optimizer.lr_warmup_iters"] and settings["optimizer.lr_warmup_samples"]:
        both = settings.describe("optimizer.lr_warmup_iters", "optimizer.lr_warmup_samples")
        yield error(f"{both} both set the length of the warm-up; give one of them.")


def check_one_wsd_decay(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that the length of WSD's final decay is given in one unit only."""
    for unit in ("iters", "samples"):
        dotted = f"optimizer.lr_wsd_decay_{unit}"
        if (
            settings[dotted] is not None
            and settings.config.optimizer.lr_wsd_decay_fraction is not None
        ):
            both = settings.describe("optimizer.lr_wsd_decay_fraction", dotted)
            yield error(f"{both} both set the length of the final decay; give one of them.")


def warn_about_bare_thresholds(context: PlanContext) -> Iterator[Finding]:
    """Warn about thresholds without a unit if it is not known whether the run is a resume."""
    # The plan assumes that it resumes a checkpoint whose bare thresholds were samples.
    entries = context.config.batch.step_batch_size_schedule
    if entries is None or context.position is not None:
        return
    spelled = bare_thresholds_as_samples(entries)
    if spelled != step_entries(entries):
        yield warning(
            f"{context.describe('batch.step_batch_size_schedule')} has a threshold without a "
            f"unit. It is planned as '{' '.join(spelled)}', as the resume of an older run "
            "reads it; a new run is refused."
        )


def check_final_step(context: PlanContext) -> Iterator[Finding]:
    """Check that --global-batch-size equals the last size of the schedule, if both are given."""
    size = context.config.batch.global_batch_size
    schedule = context.plan.batch_size
    if isinstance(schedule, StepBatchSize) and size not in (None, schedule.final):
        yield error(
            f"{context.describe('batch.global_batch_size')} "
            f"contradicts {context.describe('batch.step_batch_size_schedule')}, which ends "
            f"with {schedule.final}; leave --global-batch-size out."
        )


def check_first_batch(context: PlanContext) -> Iterator[Finding]:
    """Check that --train-samples is at least one batch."""
    # Fewer samples would end the run before its first step.
    if context.config.batch.train_samples is not None and context.plan.train_iters < 1:
        yield error(
            f"{context.describe('batch.train_samples')} is less than one batch; give at least "
            f"{context.plan.batch_size.get_size(0, 0)}, the first batch size."
        )


def warn_about_last_batch(context: PlanContext) -> Iterator[Finding]:
    """Warn if Megatron-LM makes one iteration more for --train-samples with several batch sizes.

    Its `update_train_iters` counts while samples are left, and in a ramp-up also when none is left.
    """
    schedule = context.plan.batch_size
    samples = context.config.batch.train_samples
    if samples is None or isinstance(schedule, ConstantBatchSize):
        return
    last = schedule.ramp_samples if isinstance(schedule, RampupBatchSize) else samples - 1
    count = context.plan.train_iters
    end = Steps(schedule, context.config.model.seq_length).find_iteration(context.start, count)
    if end.samples <= last:
        size = schedule.get_size(end.samples, end.tokens)
        yield warning(
            f"{context.describe('batch.train_samples')} gives {count:,} iterations. Megatron-LM "
            f"makes {count + 1:,}, with a last batch that goes beyond it. Here each batch must be "
            f"complete; --train-samples {end.samples + size} gives {count + 1:,} too."
        )


def check_batch_sizes(context: PlanContext) -> Iterator[Finding]:
    """Check that every batch size that is left in the run fits the ranks.

    A size must be divisible by micro-batch size x data-parallel size.

    The position may be unknown. If the first size of the schedule does not fit then, the run cannot
    have started on this number of processes, so it is assumed to be a resume. In this case, sizes
    that do not fit give a warning and not an error, if the final size fits.
    """
    # If the layout does not fit, the data-parallel size is a placeholder. An error about batch
    # sizes would only mislead.
    if not context.config.parallel.divides(context.plan.world_size):
        return
    # Every data-parallel rank must get the same number of complete microbatches.
    share = context.config.batch.micro_batch_size * context.plan.data_parallel_size
    seq_length = context.config.model.seq_length
    start = context.start.samples
    sizes = list(context.plan.batch_size.iterate_upcoming(start, start * seq_length, seq_length))
    bad = [size for size in sizes if size % share]
    if bad:
        yield from _explain_batch_sizes(context, share, bad, is_first=bad[0] == sizes[0])


def _explain_batch_sizes(
    context: PlanContext, share: int, bad: list[int], *, is_first: bool
) -> Iterator[Finding]:
    """Yield the finding about sizes that `share` does not divide."""
    config = context.config
    schedule = context.plan.batch_size
    is_unknown = context.position is None
    resumed = is_unknown and is_first and schedule.final % share == 0
    rule = (
        f"must be divisible by {context.describe('batch.micro_batch_size')} x data-parallel "
        f"size {context.plan.data_parallel_size} = {share}"
    )
    if isinstance(schedule, ConstantBatchSize):
        # The largest size below and the smallest size above that fit.
        low = bad[0] // share * share
        fits = format_alternatives([n for n in (low, low + share) if n > 0])
        yield error(f"{context.describe('batch.global_batch_size')} {rule}; use {fits}.")
        return
    name = "batch.step_batch_size_schedule"
    if config.batch.rampup_batch_size:
        name = "batch.rampup_batch_size"
    # One message about the first size is enough. A ramp-up may have hundreds of sizes.
    first = f"{context.describe(name)}: batch size {bad[0]} {rule}"
    if resumed:
        yield warning(
            f"{first}; this can only be a resume past batch size {bad[-1]}: a start from the first "
            "sample would be refused. tools/plan.py --consumed-samples N plans from the "
            "checkpoint's position."
        )
    else:
        passed = ""
        if config.checkpoint.load is not None and is_unknown:
            passed = (
                f" If the run of --load is past batch size {bad[-1]}, tools/plan.py "
                "--consumed-samples N plans from its position."
            )
        yield error(
            f"{first}; it is the first size that does not fit. Choose sizes that are multiples of "
            f"{share}.{passed}"
        )


def check_curriculum_flags(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that each flag that begins with --curriculum- fits --curriculum-schedule-type.

    A field that has no effect is an error here. If --curriculum-schedule-type was forgotten, the
    run would train with other sequence lengths than intended.
    """
    style = settings.config.curriculum.curriculum_schedule_type
    needed, taken = USED[style] if style is not None else (set(), set())
    for name in vars(settings.config.curriculum):
        dotted = f"curriculum.{name}"
        if name in needed and not settings.is_changed(dotted):
            yield error(
                f"{settings.describe('curriculum.curriculum_schedule_type')} needs "
                f"{all_fields()[dotted].flag}."
            )
        elif name in {"curriculum_schedule_type", *needed, *taken} or not settings.is_changed(
            dotted
        ):
            continue
        elif style is None:
            yield error(
                f"{settings.describe(dotted)} needs --curriculum-schedule-type; without it there "
                "is no curriculum."
            )
        else:
            yield error(
                f"{settings.describe(dotted)} has no effect with "
                f"{settings.describe('curriculum.curriculum_schedule_type')}; leave it out."
            )


def check_curriculum(context: PlanContext) -> Iterator[Finding]:
    """Check the settings that curriculum learning needs.

    The end of the run and the decay must be given in tokens. The batch size must be constant. The
    lengths must be ones that the model supports.
    """
    curriculum = context.plan.curriculum
    if curriculum is None:
        return
    config = context.config
    yield from map(warning, curriculum.list_warnings())
    if config.batch.rampup_batch_size or config.batch.step_batch_size_schedule:
        yield error(
            "curriculum learning already changes the tokens of a batch: leave out "
            "--rampup-batch-size and --step-batch-size-schedule; examples/curriculum_learning has "
            "what else changes."
        )
    # The number of tokens in an iteration changes with the length. Iterations and samples are
    # therefore no measure of progress.
    missing = [
        flag
        for flag, value in (
            ("--train-tokens", config.batch.train_tokens),
            ("--lr-decay-tokens", config.optimizer.lr_decay_tokens),
        )
        if value is None and config.batch.train_time is None
    ]
    if missing:
        yield error(f"curriculum learning counts in tokens: give {' and '.join(missing)}.")
    if curriculum.max_difficulty > config.model.seq_length:
        yield error(
            f"curriculum learning: max_difficulty {curriculum.max_difficulty} must not "
            f"exceed {context.describe('model.seq_length')}."
        )


def check_cut_sequences(context: PlanContext) -> Iterator[Finding]:
    """Check that the ranks that share a sequence can divide each length that will be trained."""
    parallel = context.config.parallel
    curriculum = context.plan.curriculum
    unit = parallel.length_unit
    ahead = context.iterations_ahead
    if curriculum is None or not ahead or unit == 1:
        return
    for iteration, length in curriculum.iterate_stages(ahead[0], ahead[-1]):
        if length % unit == 0:
            continue
        if parallel.context_parallel_size == 1:
            cut = "--sequence-parallel"
            needs = f"{context.describe('parallel.tensor_model_parallel_size')} must divide"
        else:
            cut = context.describe("parallel.context_parallel_size")
            needs = f"{unit} must divide"
        yield error(
            f"{cut} with curriculum learning: {needs} every sequence length, but iteration "
            f"{iteration} has {length}; make the lengths and their steps multiples of {unit}."
        )
        return


def warn_about_curriculum_end(context: PlanContext) -> Iterator[Finding]:
    """Warn if tokens do not end the run, or if it ends before the full length."""
    batch = context.config.batch
    curriculum = context.plan.curriculum
    schedule = context.plan.batch_size
    ahead = context.iterations_ahead
    if curriculum is None or not ahead or batch.train_tokens is None:
        return
    if not isinstance(schedule, ConstantBatchSize):
        return
    full = context.config.model.seq_length
    # The number of iterations until the tokens are reached depends on the lengths in between.
    tokens = batch.train_tokens - context.start.tokens
    end = curriculum.find_iteration_reaching(tokens, schedule.size, ahead[0], ahead[-1])
    if end is None:
        length_flag = "batch.train_iters"
        if batch.train_samples is not None:
            length_flag = "batch.train_samples"
        yield warning(
            f"curriculum learning: {context.describe(length_flag)} ends the run "
            f"before {context.describe('batch.train_tokens')}, because short sequences have fewer "
            "tokens; double the former, so that the tokens end the run."
        )
    last = curriculum.get_seq_length(ahead[-1] if end is None else max(end, ahead[0]))
    if last < full:
        yield warning(
            f"curriculum learning: the run ends at sequences of {last} tokens and never "
            f"reaches {context.describe('model.seq_length')}."
        )
