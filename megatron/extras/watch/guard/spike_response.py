"""The spike guard as a part of a run: what follows a spike is a record, a rollback or the end.

The data that its rollbacks skip are stored apart from the ranges of --skip-train-iteration-range.
That flag replaces the checkpoint's ranges, and must not bring back the data of a spike.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.base.errors import TrainingError
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.load import Checkpoint
from megatron.checkpoint.save import Saver
from megatron.engine.base import AcceptOnDevice, StepResult
from megatron.extras.watch.guard.interventions import (
    GuardRecords,
    build_record,
    decide_rollback,
    execute_rollback,
    find_guard_windows,
    finish_interrupted_rollback,
)
from megatron.extras.watch.guard.spike_guard import Response, Spike, SpikeGuard
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan
from megatron.run.parts import Guard, GuardKind
from megatron.run.state import TrainState
from megatron.schedule.skip import merge_ranges


def add_guard_windows(
    plan: Plan, state: TrainState, checkpoint: Checkpoint
) -> tuple[Plan, list[str]]:
    """Add the ranges of the guard's rollbacks to those that the plan skips. Rank 0 calls it.

    They are added even if the guard is off now. Otherwise the run would train on the data of the
    spike that it was rolled back for.

    Returns:
        The plan with these ranges, and the warnings to print. The state has the ranges too.

    Raises:
        CheckpointError: The file of interventions cannot be read.
    """
    if not plan.config.checkpoint.resumes_itself or plan.config.batch.eval_only:
        return plan, []
    windows = find_guard_windows(Path(str(plan.config.checkpoint.save_folder)), checkpoint)
    if windows is not None:
        state.keep_guard_windows(windows)
    ranges = [(first, last) for first, last in state.spike_guard.get("windows", [])]
    # Ranges that the run has passed need no message.
    ahead = [f"{first}-{last}" for first, last in ranges if last > state.iteration]
    if not ahead:
        return plan, []
    return replace(plan, skip_ranges=merge_ranges([*plan.skip_ranges, *ranges])), [
        f"the iterations {' '.join(ahead)} are skipped, because the spike guard has rolled back"
    ]


class SpikeGuardKind(GuardKind):
    """See `GuardKind`."""

    finish_interrupted_rollback = staticmethod(finish_interrupted_rollback)
    add_windows = staticmethod(add_guard_windows)

    def build(self, plan: Plan, state: TrainState, mesh: Mesh, log: Callable[[str], None]) -> Guard:
        """See `GuardKind`."""
        return RunGuard(plan, state, mesh, log)

    def roll_back(
        self, record: dict[str, Any], plan: Plan, mesh: Mesh, lease: Lease | None
    ) -> None:
        """See `GuardKind`."""
        log = mesh.ranks.log

        def execute() -> None:
            assert lease is not None, "rank 0 holds the lease"
            execute_rollback(Path(str(plan.config.checkpoint.save_folder)), record, lease, log)

        mesh.ranks.call_on_rank_0(execute, "rolling back", log)


class RunGuard(Guard):
    """The spike guard of a run, and its records. See `Guard`."""

    def __init__(
        self, plan: Plan, state: TrainState, mesh: Mesh, log: Callable[[str], None]
    ) -> None:
        """Continue from the state of a checkpoint.

        Args:
            plan: The plan of the run.
            state: The state of the run, with that of the guard.
            mesh: The ranks of the run.
            log: Prints a line of the log on rank 0.
        """
        self._plan = plan
        self._mesh = mesh
        self._log = log
        save = plan.config.checkpoint.save_folder
        self._records: GuardRecords | None = None
        if mesh.rank == 0 and save is not None:
            self._records = GuardRecords(Path(save))
        untrained_loss = math.log(plan.padded_vocab_size)
        self._guard = SpikeGuard(plan.config.guard, state.spike_guard, untrained_loss)
        if plan.config.guard.drops_steps:
            self.accept = self._guard.accepts

    def record(self, state: TrainState) -> None:
        """See `Guard`."""
        state.spike_guard = self._guard.state()

    def find_accept(self) -> AcceptOnDevice | None:
        """See `Guard`."""
        if self.accept is None:
            return None
        return self._guard.find_limits().accept

    def start_phase(self) -> None:
        """See `Guard`."""
        self._guard.start_phase()

    def respond(
        self, result: StepResult, learning_rate: float, state: TrainState, saver: Saver | None
    ) -> dict[str, Any] | None:
        """See `Guard`."""
        spike = self._guard.observe(result, state.iteration)
        if spike is None:
            return None
        # All ranks reach this point with the same numbers, so they decide alike.
        record = build_record(spike, learning_rate)
        if spike.response == Response.ROLLBACK:
            assert saver is not None, "a rule requires --save"
            rollback = self._decide(spike, record, saver)
            if rollback is not None:
                return rollback
            record["decision"] = (Response.SKIP_STEP if spike.dropped else Response.LOG).value
        # The reason is on the disk before an error ends the run.
        self._write(record)
        if spike.response == Response.STOP:
            raise TrainingError(
                f"the spike guard ends the run at iteration {spike.iteration}, because the run has "
                f"diverged: {spike.reason}. An untrained model has a loss of "
                f"{math.log(self._plan.padded_vocab_size):.4g}. Roll back with tools/rollback.py "
                "to an earlier checkpoint, and change what caused it: the data, a hyperparameter "
                "or the code"
            )
        done = "it was dropped" if spike.dropped else "it was applied"
        self._log(
            f"warning: spike guard: iteration {spike.iteration} is a spike and {done}: "
            f"{spike.reason}"
        )
        if spike.response == Response.SWITCH_TO_LOG:
            self._log(self._explain_switch(spike))
        return None

    def _decide(self, spike: Spike, record: dict[str, Any], saver: Saver) -> dict[str, Any] | None:
        """Decide on a rollback on all ranks. Return its record, or None if it is not possible."""
        # The save of an iteration before the spike may be the checkpoint to go back to.
        saver.complete()
        lineage = saver.lineage

        def decide() -> dict[str, Any] | None:
            assert self._records is not None, "rank 0 writes the records"
            decided = None
            reason = f"there is no checkpoint from before iteration {spike.first} to go back to"
            try:
                # Without a lineage, nothing was saved yet.
                if lineage:
                    decided = decide_rollback(
                        self._plan, lineage, spike, self._guard.windows, record, self._records
                    )
            # A run that trains without the guard must not end because of it.
            except OSError as error:
                reason = f"a rollback cannot be prepared: {error}"
            if decided is None:
                self._log(f"warning: spike guard: {reason}; the steps of the spike are dropped")
            return decided

        decided: dict[str, Any] | None = self._mesh.ranks.call_on_rank_0(
            decide, "deciding on a rollback", self._log
        )
        if decided is None:
            return None
        first, last = decided["skip"]
        self._log(
            f"spike guard: {spike.reason} at iteration {spike.iteration}. The run goes back to "
            f"global_step{decided['to']} and skips the iterations {first}-{last}. This is rollback "
            f"{self._guard.count_rollbacks(spike.iteration) + 1} of at most "
            f"{self._plan.config.guard.spike_guard_max_rollbacks}"
        )
        return decided

    def _write(self, record: dict[str, Any]) -> None:
        """Write a record on rank 0. A failure does not end the run: the log has it too."""
        if self._records is None:
            return
        try:
            self._records.append(record)
        except OSError as error:
            self._log(f"warning: spike guard: the decision could not be recorded: {error}")

    def _explain_switch(self, spike: Spike) -> str:
        """Return why the guard intervenes no more."""
        guard = self._plan.config.guard
        rollbacks = self._guard.count_rollbacks(spike.iteration)
        if guard.spike_guard == "rollback" and rollbacks >= guard.spike_guard_max_rollbacks:
            often = f"has rolled back {rollbacks} times"
            flag = "--spike-guard-max-rollbacks"
        else:
            often = f"has dropped {guard.spike_guard_max_skips} steps"
            flag = "--spike-guard-max-skips"
        return (
            f"warning: the spike guard {often} within {guard.spike_guard_reach} iterations "
            f"({flag}). More would not help, so it only logs from now on, and the run continues"
        )
