"""Rules about the length of training, the learning rate and the spike guard."""

import itertools
from collections.abc import Iterator

from megatron.base.errors import ConfigError
from megatron.config.fields import ConfigWithOrigin, all_fields
from megatron.config.tree import Config
from megatron.plan.rules.finding import Finding, PlanContext, error, warning
from megatron.schedule.clock import parse_duration

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
