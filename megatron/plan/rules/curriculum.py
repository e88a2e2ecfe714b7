"""Rules about the curriculum of sequence lengths."""

from collections.abc import Iterator

from megatron.config.curriculum import USED
from megatron.config.fields import ConfigWithOrigin, all_fields
from megatron.plan.rules.finding import Finding, PlanContext, error, warning
from megatron.schedule.batch_size import ConstantBatchSize


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
