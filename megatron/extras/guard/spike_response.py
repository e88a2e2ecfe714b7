"""What the training loop does after a spike: log, record, roll back or end the run."""

import math
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, TrainingError
from megatron.checkpoint.lease import Lease
from megatron.engine.base import Accept, StepResult
from megatron.extras.guard.interventions import (
    GuardRecords,
    build_record,
    decide_rollback,
    execute_rollback,
)
from megatron.extras.guard.spike_guard import Response, Spike, SpikeGuard
from megatron.parallel.mesh import Mesh
from megatron.parallel.ranks import build_ranks
from megatron.plan.plan import Plan
from megatron.run.run import Run
from megatron.run.start.join import make_printer
from megatron.run.state import TrainState


def build_guard(
    plan: Plan, state: TrainState, rank: int
) -> tuple[SpikeGuard | None, GuardRecords | None]:
    """Return the guard and the writer of its records. See `Run`."""
    config = plan.config
    if not config.guard.is_on or config.batch.eval_only:
        return None, None
    records = None
    if rank == 0 and config.checkpoint.save is not None:
        records = GuardRecords(Path(config.checkpoint.save))
    untrained_loss = math.log(plan.padded_vocab_size)
    return SpikeGuard(config.guard, state.spike_guard, untrained_loss), records


def choose_accept(run: Run) -> Accept | None:
    """Return the function that drops the step of a spike, or None if no step is dropped."""
    if run.guard is None or not run.plan.config.guard.drops_steps:
        return None
    return run.guard.accepts


def respond_to_step(run: Run, result: StepResult, learning_rate: float) -> None:
    """Pass a step to the guard, and carry out its decision.

    If the guard decides on a rollback, this sets `Run.rollback`. Then the loop ends, and the run
    goes back to a checkpoint.

    Args:
        run: The run, whose state is that after the step.
        result: The step.
        learning_rate: The learning rate of the step.

    Raises:
        TrainingError: The run has diverged.
        CheckpointError: A save in progress failed, or the rollback cannot be recorded.
    """
    if run.guard is None:
        return
    spike = run.guard.observe(result, run.state.iteration)
    if spike is None:
        return
    # All ranks reach this point with the same numbers, so they decide alike.
    record = build_record(spike, learning_rate)
    if spike.response == Response.ROLLBACK:
        run.rollback = _decide(run, spike, record)
        if run.rollback is not None:
            return
        record["decision"] = (Response.SKIP_STEP if spike.dropped else Response.LOG).value
    # The reason is on the disk before an error ends the run.
    _write(run, record)
    if spike.response == Response.STOP:
        raise TrainingError(
            f"the spike guard ends the run at iteration {spike.iteration}, because the run has "
            f"diverged: {spike.reason}. An untrained model has a loss of "
            f"{math.log(run.plan.padded_vocab_size):.4g}. Roll back with tools/rollback.py to an "
            "earlier checkpoint, and change what caused it: the data, a hyperparameter or the code"
        )
    done = "it was dropped" if spike.dropped else "it was applied"
    run.reporter.say(
        f"warning: spike guard: iteration {spike.iteration} is a spike and {done}: {spike.reason}"
    )
    if spike.response == Response.SWITCH_TO_LOG:
        run.reporter.say(_explain_switch(run, spike))


def _decide(run: Run, spike: Spike, record: dict[str, Any]) -> dict[str, Any] | None:
    """Decide on a rollback on all ranks. Return its record, or None if there is no checkpoint."""
    assert run.saver is not None, "a rule requires --save"
    assert run.guard is not None, "it has found the spike"
    # The save of an iteration before the spike may be the checkpoint to go back to.
    run.saver.complete()
    lineage = run.saver.lineage
    windows = run.guard.windows

    def decide() -> dict[str, Any] | None:
        assert run.guard_records is not None, "rank 0 writes the records"
        # Nothing was saved yet, so there is nothing to go back to.
        if not lineage:
            return None
        try:
            return decide_rollback(run.plan, lineage, spike, windows, record, run.guard_records)
        except OSError as error:
            raise CheckpointError(f"the rollback cannot be prepared: {error}") from error

    decided: dict[str, Any] | None = build_ranks(run.mesh).call_on_rank_0(
        decide, "deciding on a rollback", run.reporter.say
    )
    if decided is None:
        run.reporter.say(
            f"warning: spike guard: there is no checkpoint from before iteration {spike.first} to "
            "go back to; the steps of the spike are dropped"
        )
        return None
    first, last = decided["skip"]
    run.reporter.say(
        f"spike guard: {spike.reason} at iteration {spike.iteration}. The run goes back to "
        f"global_step{decided['to']} and skips the iterations {first}-{last}. This is rollback "
        f"{run.guard.count_rollbacks(spike.iteration) + 1} of at most "
        f"{run.plan.config.guard.spike_guard_max_rollbacks}"
    )
    return decided


def _write(run: Run, record: dict[str, Any]) -> None:
    """Write a record on rank 0. A failure does not end the run, because the log has it too."""
    if run.guard_records is None:
        return
    try:
        run.guard_records.append(record)
    except OSError as error:
        run.reporter.say(f"warning: spike guard: the decision could not be recorded: {error}")


def _explain_switch(run: Run, spike: Spike) -> str:
    """Return why the guard intervenes no more."""
    guard = run.plan.config.guard
    assert run.guard is not None, "it has found the spike"
    rollbacks = run.guard.count_rollbacks(spike.iteration)
    if guard.spike_guard == "rollback" and rollbacks >= guard.spike_guard_max_rollbacks:
        often = f"has rolled back {rollbacks} times"
        flag = "--spike-guard-max-rollbacks"
    else:
        often = f"has dropped {guard.spike_guard_max_skips} steps"
        flag = "--spike-guard-max-skips"
    return (
        f"warning: the spike guard {often} within {guard.spike_guard_reach} iterations ({flag}). "
        "More would not help, so it only logs from now on, and the run continues"
    )


def roll_back_run(record: dict[str, Any], plan: Plan, mesh: Mesh, lease: Lease | None) -> None:
    """Roll the run's folder back. All ranks call it, after the files of the run were closed.

    Raises:
        MegatronError: On every rank, as `execute_rollback`.
    """
    say = make_printer(mesh.rank)

    def execute() -> None:
        assert lease is not None, "rank 0 holds the lease"
        execute_rollback(Path(str(plan.config.checkpoint.save)), record, lease, say)

    build_ranks(mesh).call_on_rank_0(execute, "rolling back", say)
