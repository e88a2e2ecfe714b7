"""The data that the spike guard's rollbacks skip, besides those of --skip-train-iteration-range.

They are stored apart from the ranges of that flag. The flag on the command line replaces the
checkpoint's ranges, and must not bring back the data of a spike.
"""

from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.load import Checkpoint
from megatron.extras.training.guard.interventions import find_guard_windows
from megatron.plan.run_plan import Plan
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
    windows = find_guard_windows(Path(str(plan.config.checkpoint.save)), checkpoint)
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
