"""The training loop. It reads top to bottom; nothing happens in an iteration that is not written here."""

import time

from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.code_version import get_code_version
from megatron.config.yaml_file import dump_yaml
from megatron.engine.base import StepResult
from megatron.errors import TrainingError
from megatron.model.flops import count_forward_flops_per_token
from megatron.observe.log_line import format_skipped_range_line, format_training_complete_line
from megatron.observe.timers import DATA_WAIT, SAVE
from megatron.plan import Plan
from megatron.schedule.skip import find_range
from megatron.training.evaluate import evaluate_test, evaluate_validation
from megatron.training.exits import StopReason
from megatron.training.report import StepRecord
from megatron.training.run import Run
from megatron.training.state import TrainState

_PAUSE_SECONDS = 5.0
"""Between two attempts to save the end of a run."""


def train(run: Run) -> StopReason:
    """Train until the end or until a reason to stop, which is returned; saves when due and at the end.

    Raises:
        TrainingError: too many iterations in a row were not finite, copies of a parameter are not
            equal any more, or a number that a save would store is not finite.
        CheckpointError: a checkpoint could not be written.
    """
    plan, state, first = run.plan, run.state, run.state.iteration
    try:
        stop, evaluated_at = train_until_stop(run)
        if state.iteration != first:
            save_at_end(run)
    except TrainingError:
        if run.saver is not None:
            run.saver.complete()  # what is being written was checked before
        raise
    if stop != StopReason.NO:
        run.reporter.say(run.exits.format_stop_line(stop, state.iteration))
        if is_finished(plan, state):
            run.reporter.say(f"{format_training_complete_line()} at iteration {state.iteration}")
        return stop
    if evaluated_at != state.iteration:
        evaluate_validation(
            run
        )  # after the save: a run that goes on from here later is not moved by it
    evaluate_test(run)
    run.reporter.say(f"{format_training_complete_line()} at iteration {state.iteration}")
    return stop


def train_until_stop(run: Run) -> tuple[StopReason, int]:
    """Iterate, and save when due. Return the reason to stop, and the last iteration that was
    evaluated (-1: none).

    Raises:
        As `train`.
    """
    plan, state = run.plan, run.state
    stop, evaluated_at = StopReason.NO, -1
    started = time.monotonic() - state.elapsed_seconds
    run.reporter.start(state.iteration)
    while stop == StopReason.NO and not is_finished(plan, state):
        before = state.iteration
        skipped = find_range(plan.skip_ranges, state.iteration + 1)
        if skipped is not None:
            skip_range(run, skipped)
        else:
            train_iteration(run)
        state.elapsed_seconds = time.monotonic() - started
        check_finite(plan, state)
        if skipped is None and is_due(
            plan.config.parallel.check_invariants_interval, before, state.iteration
        ):
            check_invariants(run)
        if skipped is None and is_due(plan.config.batch.eval_interval, before, state.iteration):
            evaluate_validation(run)
            evaluated_at = state.iteration
        stop = run.exits.decide(before, state.iteration)
        save_when_due(run, before)
    return stop, evaluated_at


def is_finished(plan: Plan, state: TrainState) -> bool:
    """The run's end: by iterations or samples (both are iterations to the plan), or by tokens, whichever comes first."""
    tokens = plan.config.batch.train_tokens
    return state.iteration >= plan.train_iters or (
        tokens is not None and state.consumed_tokens >= tokens
    )


def is_due(interval: int | None, before: int, after: int) -> bool:
    """A multiple of `interval` lies in (before, after]: a skipped range is one jump over several iterations."""
    return bool(interval) and after // interval > before // interval  # type: ignore[operator]


def train_iteration(run: Run) -> None:
    """One global batch: data, step, counters, report."""
    plan, state, timers = run.plan, run.state, run.timers
    start = time.perf_counter()
    seq_length = plan.get_seq_length(state.iteration + 1)
    batch_size = plan.batch_size.get_size(state.consumed_samples, state.consumed_tokens)
    with timers(DATA_WAIT):
        assert run.sources.train is not None, "the plan has train samples"
        microbatches = run.sources.train.read_batch(batch_size, seq_length)
    run.reporter.report_pipeline_schedule(batch_size)
    learning_rate = state.compute_learning_rate(plan.lr_schedule)
    result = run.engine.train_batch(microbatches, iteration=state.iteration + 1, lr=learning_rate)
    state.advance(batch_size, batch_size * seq_length)
    count_step(plan, state, result, batch_size, seq_length)
    params_norm = (
        run.engine.compute_parameter_norm() if plan.config.logging.log_params_norm else None
    )
    run.reporter.report_step(
        state,
        StepRecord(
            result=result,
            batch_size=batch_size,
            seq_length=seq_length,
            learning_rate=state.compute_learning_rate(plan.lr_schedule),
            seconds=time.perf_counter() - start,
            phase_seconds=timers.take(),
            params_norm=params_norm,
        ),
    )


def count_step(
    plan: Plan, state: TrainState, result: StepResult, batch_size: int, seq_length: int
) -> None:
    """What a step's outcome does to the counters."""
    tokens = batch_size * seq_length
    layers, _ = count_forward_flops_per_token(plan.shape, seq_length)
    state.gigaflops_without_embeddings += 3 * layers * tokens / 1e9
    if result.applied:
        state.advance_lr(plan.lr_schedule, batch_size, tokens)
        state.nan_iterations_in_a_row = 0
    else:
        state.nan_iterations_in_a_row += result.is_nan


def skip_range(run: Run, skipped: tuple[int, int]) -> None:
    """Jump to the end of a range: its batches are dropped, its iterations, samples and tokens go by, the learning rate does not."""
    plan, state = run.plan, run.state
    assert run.sources.train is not None, "the plan has train samples"
    first, last = skipped
    if first < state.iteration + 1:
        run.reporter.say(
            f"iterations {first} to {state.iteration} of the range {first}-{last} had been trained before this start and stay "
            "trained; roll back to before them to undo that"
        )
    before = state.iteration
    while state.iteration < last and not is_finished(plan, state):
        batch_size = plan.batch_size.get_size(state.consumed_samples, state.consumed_tokens)
        seq_length = plan.get_seq_length(state.iteration + 1)
        run.sources.train.advance(batch_size)
        state.advance(batch_size, batch_size * seq_length)
    run.reporter.jump(state.iteration - before)
    run.reporter.say(format_skipped_range_line(before + 1, state.iteration))


def check_finite(plan: Plan, state: TrainState) -> None:
    """
    Raises:
        TrainingError: so many iterations in a row were dropped that going on only burns the allocation.
    """
    limit = plan.config.batch.max_nan_iterations
    if state.nan_iterations_in_a_row >= limit:
        precision = plan.config.precision
        static = (
            f"; if it began with the run, leave out --loss-scale {precision.loss_scale}, which is static, or give a lower one"
            if precision.fp16 and precision.loss_scale is not None
            else ""
        )
        raise TrainingError(
            f"{limit} iterations in a row up to {state.iteration} had a loss or gradient that is not finite; none of them was "
            "trained on. Roll back to an earlier checkpoint, and skip the data with --skip-train-iteration-range or lower --lr"
            f"{static}"
        )


def check_invariants(run: Run) -> None:
    """Compare what ranks hold alike, unless --check-invariants-interval 0 turns that off or this
    iteration was checked already.

    Raises:
        TrainingError: it differs, and --sync-tp-duplicated-parameters was not given or cannot
            repair it.
    """
    parallel, iteration = run.plan.config.parallel, run.state.iteration
    if not parallel.check_invariants_interval or run.checked_at == iteration:
        return
    repair = parallel.sync_tp_duplicated_parameters
    for line in run.engine.check_invariants(
        repair=repair, iteration=iteration, last_good=run.checked_at
    ):
        run.reporter.say(
            f"warning: made equal to the first rank's after iteration {iteration}: {line}"
        )
    run.checked_at = iteration


def save_when_due(run: Run, before: int) -> None:
    """Go on with a save that is being written in the background, and begin one where it is time.

    Raises:
        As `begin_save`.
    """
    saver = run.saver
    if saver is None:
        return
    saver.poll()
    if saver.is_due(before, run.state.iteration):
        begin_save(run, saver)
        if not run.plan.config.checkpoint.async_save:
            with run.timers(SAVE):
                saver.complete()


def save_at_end(run: Run) -> None:
    """The last iteration is safe when this returns; there is no later chance, so a failure is tried again at once.

    Raises:
        As `begin_save`.
    """
    saver = run.saver
    if saver is None:
        run.data_files.check()
        return
    saver.end_of_run()
    with run.timers(SAVE):
        saver.complete()
    while saver.saved_iteration != run.state.iteration:
        begin_save(run, saver)
        with run.timers(SAVE):
            saver.complete()
        if saver.saved_iteration != run.state.iteration:
            time.sleep(_PAUSE_SECONDS)


def begin_save(run: Run, saver: Saver) -> None:
    """Hand the state as it is now to the saver.

    Copies are compared first: only the first rank's copy is stored, so a later start could not find
    that it was wrong.

    Raises:
        TrainingError: copies differ, or a number that would be stored is not finite; nothing was
            written.
        DataError: a file of the data, or an index, has changed since the start.
        CheckpointError: too many saves in a row have failed.
    """
    plan, state = run.plan, run.state
    check_invariants(run)
    run.data_files.check()  # what was trained on files that changed is not saved
    state.data = run.sources.state()
    state.data_digests = run.data_files.record()
    with_optimizer = plan.config.checkpoint.save_optim
    contents = CheckpointContents(
        state.iteration,
        scalars=run.engine.get_scalars() if with_optimizer else None,
        state=state.to_json(),
        config_yaml=dump_yaml(plan.config),
        version=get_code_version(),
        layout=str(run.mesh.grid),
    )
    run.reporter.flush()
    with run.timers(SAVE):
        saver.begin(contents, run.engine.shards(optimizer=with_optimizer))
