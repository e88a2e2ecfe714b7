"""Rules about the batch sizes of a plan."""

from collections.abc import Iterator

from megatron.base.plain_text import format_alternatives
from megatron.plan.rules.finding import Finding, PlanContext, error, warning
from megatron.schedule.batch_size import (
    ConstantBatchSize,
    RampupBatchSize,
    StepBatchSize,
    bare_thresholds_as_samples,
    step_entries,
)
from megatron.schedule.position import Steps


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
