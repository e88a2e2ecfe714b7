"""The training loop.

It reads from top to bottom. Every action of an iteration is visible here.
"""

import time
from collections.abc import Callable, Sequence

from megatron.base.code_version import get_code_version
from megatron.base.errors import TrainingError
from megatron.checkpoint.save import CheckpointContents, Saver
from megatron.config.yaml_file import dump_yaml
from megatron.data.batches import compute_digest
from megatron.engine.base import StepOutcome, StepResult, UpdateSettings
from megatron.model.flops import count_forward_flops_per_token
from megatron.observe.log_line import format_skipped_range_line, format_training_complete_line
from megatron.observe.timers import DATA_WAIT, SAVE
from megatron.parallel.rank_progress import TRAINING, Phase
from megatron.plan.run_plan import Plan
from megatron.run.evaluate import (
    evaluate_tasks,
    evaluate_test,
    evaluate_validation,
    wait_for_batch,
)
from megatron.run.exits import StopReason
from megatron.run.forecast import report_end, report_forecast
from megatron.run.report import StepRecord
from megatron.run.run import QueuedStep, Run
from megatron.run.state import TrainState
from megatron.schedule.clock import is_due
from megatron.schedule.skip import find_range

_PAUSE_SECONDS = 5.0
"""Seconds between two attempts to save at the end of a run."""


def train(run: Run) -> StopReason:
    """Train until the end, or until there is a reason to stop. Save when due and at the end.

    Returns:
        The reason to stop. `StopReason.NONE` means that training is complete. With
        `StopReason.ROLLBACK`, nothing was saved, and the caller makes the rollback.

    Raises:
        TrainingError: Too many iterations in a row were not finite, replicas of a parameter differ,
            a number to be stored is not finite, the spike guard finds that the run has diverged, or
            a replay differs and must end the run.
        DataError: A data file or an index has changed since the start, or a batch cannot be read.
        CheckpointError: A checkpoint could not be written.
    """
    state = run.state
    first = run.state.iteration
    try:
        with run.profiling:
            stop = train_until_stop(run)
        if stop == StopReason.ROLLBACK:
            return stop
        # If no iteration was trained or skipped, there is nothing new to save.
        if state.iteration != first:
            save_at_end(run)
    except TrainingError as error:
        if run.saver is not None and run.saver.in_flight:
            # A save in progress has a good state, which was checked when the save began. So the
            # save is completed. The error is printed first, because a file system may be slow or
            # hang.
            run.reporter.log(f"{error}\nthe run ends when the save in progress is complete")
            run.saver.complete()
        raise
    completes = is_finished(run.plan, state) and not state.pending
    if stop == StopReason.NONE:
        with run.mesh.progress.allow_stop():
            complete(run, first)
            return stop
        # A signal has interrupted an evaluation. The next start repeats it.
        stop = StopReason.SIGNAL
        completes = False
    run.reporter.log(run.exits.format_stop_line(stop, state.iteration))
    if completes:
        run.reporter.log(f"{format_training_complete_line()} at iteration {state.iteration}")
    return stop


def complete(run: Run, first: int) -> None:
    """Evaluate and export the model at the end of training.

    Args:
        run: The run.
        first: The iteration after which this launch began.

    Raises:
        MegatronError: See `train`.
    """
    state = run.state
    if state.validated_at == state.iteration == first:
        # Another validation would read other samples, and its result would replace the first one.
        run.reporter.log(
            f"the validation of iteration {first} is in the log of an earlier start; "
            "--eval-only evaluates the checkpoint again"
        )
    elif state.validated_at != state.iteration:
        # This evaluation comes after the save, so the last checkpoint does not have the validation
        # samples that it reads. A run that is continued later with more iterations then evaluates
        # the same samples as a run that was never interrupted.
        evaluate_validation(run)
    evaluate_test(run)
    evaluate_tasks(run)
    # Only rank 0 may have to wait for an export. The others leave the phase immediately.
    with run.mesh.progress.enter(Phase("the export", is_limited=False)):
        run.exporter.finish(lambda: run.mesh.progress.stop_signal > 0)
    run.reporter.log(f"{format_training_complete_line()} at iteration {state.iteration}")
    report_end(run)


def train_until_stop(run: Run) -> StopReason:
    """Iterate and save when due, until the end or a reason to stop.

    Returns:
        The reason to stop.

    Raises:
        TrainingError: See `train`.
        DataError: See `train`.
        CheckpointError: See `train`.
    """
    plan = run.plan
    state = run.state
    run.stop = StopReason.NONE
    run.clock.start()
    run.step_clock.start()
    run.reporter.start(state.iteration)
    if not is_finished(plan, state):
        complete_pending(run)
    while run.stop == StopReason.NONE and not is_finished(plan, state):
        before = state.iteration
        run.mesh.progress.iteration = before + 1
        # A skipped range counts as one step of the loop, but passes several iterations. Everything
        # below that is due at an interval is therefore given `before` as well.
        skipped = find_range(plan.skip_ranges, state.iteration + 1)
        # It computes nothing, so the step after it may still be the first one.
        tokens = 0
        if skipped is None:
            batch_size = plan.batch_size.get_size(state.consumed_samples, state.consumed_tokens)
            tokens = batch_size * plan.get_seq_length(before + 1)
        run.mesh.progress.begin_step(TRAINING, before + 1, tokens)
        with run.mesh.progress.allow_stop():
            wait_for_data(run, skips=skipped is not None)
        if run.mesh.progress.stopped:
            # The checkpoint that follows needs the numbers of this step.
            finish_queued_step(run)
            if run.rollback is not None:
                return StopReason.ROLLBACK
            return StopReason.SIGNAL
        announce_phase(run)
        if skipped is not None:
            phase = Phase("the skip of iterations")
            with run.step_clock.pause(), run.mesh.progress.enter(phase):
                skip_range(run, skipped)
        else:
            with run.profiling.record(before + 1):
                train_iteration(run)
        # The run goes back, so nothing of this iteration is kept.
        if run.rollback is not None:
            return StopReason.ROLLBACK
        # The next iteration finishes a queued step when it reads it.
        if run.queued is None:
            finish_iteration(run, before, trained=skipped is None)
    return run.stop


def finish_queued_step(run: Run) -> None:
    """Read the step that is queued, if there is one, and do what is due after it."""
    step = run.queued
    if step is None:
        return
    read_step(run, step)
    if run.rollback is None:
        finish_iteration(run, step.iteration - 1, trained=True)


def finish_iteration(run: Run, before: int, *, trained: bool) -> None:
    """Do what is due after an iteration or a skipped range, and agree on a reason to stop.

    Args:
        run: The run.
        before: The iteration before it.
        trained: Whether an iteration was trained. After a skipped range there is nothing new to
            verify or evaluate.

    Raises:
        MegatronError: See `train`.
    """
    plan = run.plan
    state = run.state
    run.clock.finish_step()
    state.elapsed_seconds = run.clock.read()
    check_nan_iterations(plan, state)
    if trained and is_due(plan.config.parallel.check_invariants_interval, before, state.iteration):
        with run.step_clock.pause():
            check_invariants(run)
    if trained:
        evaluate_when_due(run, before)
    # A reason to stop does not prevent the save. `train` saves the last iteration if it was not due
    # here.
    save_when_due(run, before)
    # The decision comes last, because the time of evaluation and save counts in the decision about
    # the next step.
    run.stop = max(run.stop, decide(run, before))
    run.exporter.poll()


def must_read(run: Run) -> bool:
    """Return whether the last step must be read now, and not while the next one computes.

    All ranks get the same answer. Whatever reads the state of the engine or may end the run needs
    the numbers of the step first.
    """
    plan = run.plan
    config = plan.config
    now = run.state.iteration
    before = now - 1
    if not run.engine.reads_late or run.stop != StopReason.NONE or is_finished(plan, run.state):
        return True
    if run.saver is not None and (run.saver.in_flight or run.saver.is_due(before, now)):
        return True
    planned = run.clock.next_step
    intervals = (
        run.clock.eval_interval,
        config.batch.eval_tasks_interval,
        config.batch.exit_interval,
        config.parallel.check_invariants_interval,
        config.parallel.straggler_interval,
    )
    following = config.parallel.replay_interval, config.logging.log_layer_stats_interval
    return (
        planned.save_is_due
        or planned.evaluation_is_due
        or any(is_due(interval, before, now) for interval in intervals)
        # What follows is no ordinary step of the same data.
        or any(is_due(interval, now, now + 1) for interval in following)
        or find_range(plan.skip_ranges, now + 1) is not None
        or any(phase.first_iteration == now + 1 for phase in plan.data_phases)
    )


def decide(run: Run, before: int) -> StopReason:
    """Agree with all ranks on the reason to stop, and on rank 0's decision about the next step.

    If it is due, the ranks also compare how fast they compute.
    """
    iteration = run.state.iteration
    save_is_due = run.saver is not None and run.saver.is_due(iteration, iteration + 1)
    eval_is_due = is_due(run.clock.eval_interval, iteration, iteration + 1)
    proposed = run.clock.propose(eval_is_due=eval_is_due, save_is_due=save_is_due)
    own_time = run.stragglers.take_report(before, iteration)
    stop, decided, times = run.exits.decide(
        before,
        iteration,
        proposed,
        own_time,
        ask_again=run.step_clock.has_paused,
        waits=list_waits(run),
    )
    run.clock.accept(decided)
    run.reporter.report_rank_times(iteration, run.stragglers.compare(times))
    return stop


def evaluate_when_due(run: Run, before: int) -> None:
    """Do the evaluations that are due. See `complete_pending`."""
    state = run.state
    is_due_by_time = run.clock.next_step.evaluation_is_due
    if is_due_by_time or is_due(run.clock.eval_interval, before, state.iteration):
        state.pending.append("validation")
    if is_due(run.plan.config.batch.eval_tasks_interval, before, state.iteration):
        state.pending.append("tasks")
    complete_pending(run)


def complete_pending(run: Run) -> None:
    """Do the evaluations that the state names, until a signal interrupts one.

    The state keeps that one and the later ones, so that the next start repeats them.

    Raises:
        TrainingError: See `evaluate_tasks`.
    """
    pending = run.state.pending
    progress = run.mesh.progress
    evaluations = {"validation": evaluate_validation, "tasks": evaluate_tasks}
    while pending and not progress.stopped:
        with run.step_clock.pause(), progress.allow_stop():
            evaluations[pending[0]](run)
            del pending[0]
    if pending:
        run.reporter.log(f"a signal interrupts the {pending[0]}, which the next start repeats")


def wait_for_data(run: Run, *, skips: bool) -> None:
    """Wait until all ranks have the data of the next step, unless it is a jump.

    A step would wait as long, but could not stop. The order of the training data is extended first
    if a run by time reaches its end.

    Raises:
        DataError: An index cannot be built.
        StopRequested: A rank has received a signal.
    """
    state = run.state
    train = run.sources.train
    batch_size = run.plan.batch_size.get_size(state.consumed_samples, state.consumed_tokens)
    if train is not None and train.must_extend(batch_size):
        # Building an index takes long. The ranks wait for each other outside of other collectives.
        with run.step_clock.pause():
            run.mesh.ranks.work(
                lambda: train.extend(batch_size), "building the next data index", run.reporter.log
            )
        for note in run.sources.take_notes():
            run.reporter.log(note)
    sizes = (batch_size, run.plan.get_seq_length(state.iteration + 1))
    # A batch that was read ahead follows the last one and has its sizes. If a step is queued, the
    # ranks' votes on this batch are not read yet.
    is_ahead = run.queued is None and run.exits.has_batch and sizes == run.sizes_ahead
    run.sizes_ahead = None if skips else sizes
    if train is not None and not skips and not is_ahead:
        with run.timers(DATA_WAIT):
            wait_for_batch(run, train, *sizes)


def announce_phase(run: Run) -> None:
    """Log that the next iteration is the first one of a phase of the data.

    The losses of the phase have another level, so the spike guard forgets its estimates.
    """
    phases = run.plan.data_phases
    for number, planned in enumerate(phases, 1):
        if planned.first_iteration == run.state.iteration + 1 > 1:
            run.reporter.log(f"data phase {number} of {len(phases)} begins")
            run.guard.start_phase()


def is_finished(plan: Plan, state: TrainState) -> bool:
    """Return whether the run is at its end, by iterations, samples, tokens or time.

    Whichever comes first ends the run. The plan has converted samples to iterations already.
    """
    if plan.train_seconds is not None:
        return state.used_train_time >= plan.train_seconds
    tokens = plan.config.batch.train_tokens
    return state.iteration >= plan.train_iters or (
        tokens is not None and state.consumed_tokens >= tokens
    )


def train_iteration(run: Run) -> None:
    """Train one global batch, and read the step before if it was not read yet."""
    plan = run.plan
    state = run.state
    # Size and length depend on the counters before this step. They must be read before `advance`.
    seq_length = plan.get_seq_length(state.iteration + 1)
    batch_size = plan.batch_size.get_size(state.consumed_samples, state.consumed_tokens)
    with run.timers(DATA_WAIT):
        assert run.sources.train is not None, "the plan has train samples"
        microbatches = run.sources.train.read_batch(batch_size, seq_length)
    run.reporter.report_pipeline_schedule(batch_size)
    iteration = state.iteration + 1

    at = run.mesh.coordinate
    digest = 0
    # Other ranks of the same data rank read the same samples.
    if not (at.pipeline or at.context or at.tensor):
        digest = compute_digest(microbatches, state.consumed_samples, at.data, run.mesh.grid.data)

    def vote() -> Sequence[float]:
        return (*run.exits.vote(iteration - 1, iteration, list_waits(run)), digest)

    def plan_update() -> UpdateSettings | None:
        finish_queued_step(run)
        # The gradients are of weights that the rollback gives up.
        if run.rollback is not None:
            return None
        # These are the rates that the step uses. The reported rates are those after the step, as in
        # Megatron. With --train-time the next rate is not known yet, and both are the same.
        return UpdateSettings(
            state.compute_learning_rate(plan.lr_schedule),
            state.compute_decoupled_learning_rate(plan.lr_schedule),
            run.guard.find_accept(),
        )

    if is_due(plan.config.parallel.replay_interval, state.iteration, iteration):
        phase = Phase("the replay of a microbatch")
        with run.step_clock.pause(), run.timers.pause(), run.mesh.progress.enter(phase):
            run.replay.check(microbatches, iteration)
    with_statistics = is_due(
        plan.config.logging.log_layer_stats_interval, state.iteration, iteration
    )
    with run.stragglers.measure(iteration):
        # Few steps have statistics, so `queue_batch` has none.
        if run.engine.reads_late and not with_statistics:
            read = run.engine.queue_batch(
                microbatches, iteration=iteration, plan_update=plan_update, vote=vote
            )
        else:
            settings = plan_update()
            assert settings is not None, "`must_read` leaves no step to read"
            result = run.engine.train_batch(
                microbatches,
                iteration=iteration,
                lr=settings.lr,
                decoupled_lr=settings.decoupled_lr,
                with_layer_statistics=with_statistics,
                accept=run.guard.accept,
                vote=vote,
            )
            read = _make_reader(result)
    # The step before goes back to a checkpoint, and this one has changed nothing.
    if read is None:
        return
    rate = state.compute_learning_rate(plan.lr_schedule)
    run.queued = QueuedStep(read, iteration, rate, batch_size, seq_length)
    state.advance(batch_size, batch_size * seq_length)
    if must_read(run):
        read_step(run, run.queued)


def _make_reader(result: StepResult) -> Callable[[], StepResult]:
    """Return the function that reads a step whose numbers are known."""
    return lambda: result


def read_step(run: Run, step: QueuedStep) -> None:
    """Read the numbers of a step, count it and report it."""
    plan = run.plan
    state = run.state
    result = step.read()
    # What follows may write files, which takes longer than a part of the step.
    run.mesh.progress.begin_part("")
    run.queued = None
    run.exits.count_votes(result.votes, step.iteration)
    count_step(plan, state, result, step.batch_size, step.seq_length)
    params_norm: float | None = None
    if plan.config.logging.log_params_norm:
        params_norm = run.engine.compute_parameter_norm()
    # The time is that since the same line of the iteration before, see `StepClock`.
    seconds = run.step_clock.finish_iteration()
    run.clock.costs.record_step(seconds, step.batch_size * step.seq_length)
    run.exits.warn_about_slow_step(step.iteration, seconds)
    report_forecast(run)
    run.reporter.report_step(
        state,
        StepRecord(
            result=result,
            batch_size=step.batch_size,
            seq_length=step.seq_length,
            learning_rate=state.compute_learning_rate(plan.lr_schedule),
            decoupled_learning_rate=state.compute_decoupled_learning_rate(plan.lr_schedule),
            seconds=seconds,
            phase_seconds=run.timers.take(),
            params_norm=params_norm,
            train_iters=run.clock.estimate_iterations(),
        ),
    )
    for line in result.warnings:
        run.reporter.log(f"warning: {line}")
    if result.applied:
        warning = run.divergence.observe(result.loss, state.iteration)
        if warning is not None:
            run.reporter.log(warning)
    if result.outcome is StepOutcome.EMPTY:
        run.reporter.log(
            f"warning: no token of iteration {step.iteration} counts in the loss, so it changes no "
            "weights. Its samples are consumed"
        )
    else:
        # With a rollback, the loop ends, and the run goes back to a checkpoint.
        run.rollback = run.guard.respond(result, step.learning_rate, state, run.saver)


def count_step(
    plan: Plan, state: TrainState, result: StepResult, batch_size: int, seq_length: int
) -> None:
    """Update the counters with the outcome of a step.

    A step that was not applied does not move the learning rate. Its samples stay consumed.
    """
    tokens = batch_size * seq_length
    layers, _ = count_forward_flops_per_token(plan.shape, seq_length)
    # A backward pass costs twice the forward pass, so a step costs three times the forward pass.
    state.gigaflops_without_embeddings += 3 * layers * tokens / 1e9
    if result.applied:
        state.advance_lr(plan.lr_schedule, batch_size, tokens)
        state.nan_iterations_in_a_row = 0
    elif result.outcome is StepOutcome.NOT_FINITE:
        state.nan_iterations_in_a_row += 1


def skip_range(run: Run, skipped: tuple[int, int]) -> None:
    """Jump to the end of a range of iterations.

    The batches of the range are dropped. Its iterations, samples and tokens are counted, and the
    learning rate does not advance.
    """
    plan = run.plan
    state = run.state
    assert run.sources.train is not None, "the plan has train samples"
    before = state.iteration
    # The run may end inside the range. A launch that continues it later skips the rest.
    # Each iteration is counted separately, because the batch size and the sequence length may
    # change within the range.
    while state.iteration < skipped[1] and not is_finished(plan, state):
        batch_size = plan.batch_size.get_size(state.consumed_samples, state.consumed_tokens)
        seq_length = plan.get_seq_length(state.iteration + 1)
        run.sources.train.advance(batch_size)
        state.advance(batch_size, batch_size * seq_length)
    run.reporter.jump(state.iteration - before)
    windows = state.spike_guard.get("windows", [])
    by_guard = any(first <= state.iteration and last > before for first, last in windows)
    run.reporter.log(format_skipped_range_line(before + 1, state.iteration, by_guard=by_guard))


def check_nan_iterations(plan: Plan, state: TrainState) -> None:
    """Raise an error if too many iterations in a row were not finite.

    Steps that fp16 drops in the search for a loss scale do not count. Without this error, the run
    would use compute time and train nothing.

    Raises:
        TrainingError: The number reached --max-nan-iterations.
    """
    limit = plan.config.batch.max_nan_iterations
    if state.nan_iterations_in_a_row >= limit:
        precision = plan.config.precision
        static = ""
        # A static loss scale never decreases. If it is too high, every step overflows.
        if precision.fp16 and precision.loss_scale is not None:
            static = (
                "; if this happens from the start of the run, leave out "
                f"--loss-scale {precision.loss_scale}, which is static, or give a lower one"
            )
        raise TrainingError(
            f"{limit} iterations in a row up to {state.iteration} had a loss or gradient that is "
            "not finite. None of them changed the weights. Roll back to an earlier checkpoint, and "
            f"skip the data with --skip-train-iteration-range or lower --lr{static}"
        )


def check_invariants(run: Run) -> None:
    """Verify that parameters which several ranks hold are equal on these ranks.

    Nothing is done if --check-invariants-interval is 0, or if this iteration was verified already.

    Raises:
        TrainingError: Replicas differ, and --sync-tp-duplicated-parameters was not given or cannot
            repair them.
    """
    parallel = run.plan.config.parallel
    iteration = run.state.iteration
    if not parallel.check_invariants_interval or run.checked_at == iteration:
        return
    repair = parallel.sync_tp_duplicated_parameters
    with run.mesh.progress.enter(Phase("the comparison of replicas")):
        lines = run.engine.check_invariants(
            repair=repair, iteration=iteration, last_good=run.checked_at
        )
    for line in lines:
        run.reporter.log(
            "warning: overwritten with the first rank's replica after iteration "
            f"{iteration}: {line}"
        )
    run.checked_at = iteration


def save_when_due(run: Run, before: int) -> None:
    """Start the next stage of a save in progress, and start a new save when it is due.

    Raises:
        TrainingError: See `save`.
        DataError: See `save`.
        CheckpointError: See `save`.
    """
    saver = run.saver
    if saver is None:
        return
    # The ranks have agreed on how far the save is. This must therefore run on every rank in every
    # iteration, also when no save is due.
    save_is_due = saver.poll(
        before, run.state.iteration, stage_is_done=run.exits.take_stage_is_done()
    )
    if save_is_due or run.clock.next_step.save_is_due:
        with run.step_clock.pause():
            save(run, saver)
    if not saver.in_flight:
        run.clock.end_save()


def list_waits(run: Run) -> tuple[bool, bool]:
    """Return whether this rank works on a stage of a save, and whether it lacks the next batch."""
    works_on_save = run.saver is not None and run.saver.is_working
    return works_on_save, run.sources.train is None or not run.sources.train.has_batch


def save_at_end(run: Run) -> None:
    """Save the last iteration, and return when the checkpoint is complete.

    There is no later chance. A save that failed is therefore repeated until it succeeds or too many
    have failed.

    Raises:
        TrainingError: See `save`.
        DataError: See `save`.
        CheckpointError: See `save`.
    """
    saver = run.saver
    if saver is None:
        # Without a save, this is the only place where a changed data file would be noticed.
        run.data_files.check()
        train = run.sources.train
        if train is not None and train.has_filters:
            # The ranks gather what was left out together with their positions.
            train.state()
            report_filters(run)
        return
    saver.mark_end_of_run()
    # A save in flight may already be the one of the last iteration. If it fails, the loop below
    # starts another one.
    with run.timers(SAVE):
        saver.complete()
    while saver.saved_iteration != run.state.iteration:
        save(run, saver)
        with run.timers(SAVE):
            saver.complete()
        if saver.saved_iteration != run.state.iteration:
            time.sleep(_PAUSE_SECONDS)


def report_filters(run: Run) -> None:
    """Report what the filters of the data had left out at the last `Sources.state`."""
    if run.sources.train is not None:
        reports = run.sources.train.take_filter_reports()
        run.reporter.report_filters(run.state.iteration, reports)


def save(run: Run, saver: Saver) -> None:
    """Pass the current state to the saver.

    Replicas are compared first. Only the first rank's replica is stored, so a later start could not
    detect that they had differed.

    Raises:
        TrainingError: Replicas differ, or a number to be stored is not finite. Nothing was written.
        DataError: A data file or an index has changed since the start.
        CheckpointError: Too many saves in a row have failed.
    """
    plan = run.plan
    state = run.state
    check_invariants(run)
    # Weights that were trained on files that changed must not become a checkpoint.
    run.data_files.check()
    state.data = run.sources.state()
    if "validation" in state.pending:
        # An interrupted evaluation has moved the position of its data.
        state.data["valid"] = run.valid_data
    report_filters(run)
    state.data_digests = run.data_files.record()
    run.guard.record(state)
    state.elapsed_seconds = run.clock.begin_save()
    with_optimizer = plan.config.checkpoint.save_optim
    contents = CheckpointContents(
        state.iteration,
        scalars=run.engine.get_scalars() if with_optimizer else None,
        state=state.to_json(),
        config_yaml=dump_yaml(plan.config),
        version=get_code_version(),
        layout=str(run.mesh.grid),
    )
    # TensorBoard events and emissions are flushed with each save, so that a killed run loses at
    # most those after its last checkpoint.
    run.reporter.flush()
    with run.timers(SAVE):
        saver.save(contents, run.engine.shards(optimizer=with_optimizer))
