"""Rules about the spike guard."""

from collections.abc import Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.rules.finding import Finding, error

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
