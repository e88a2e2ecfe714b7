"""What an array task runs, its limits, and how it can end."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron.base import exit_codes
from megatron.extras.operations.slurm.node_report import NodeLimits


class TaskOutcome(Enum):
    """Reason why an array task ended. The value is written to the log and to attempts.jsonl."""

    LEFT = "left in order"
    """The training saved and stopped by a time limit or a signal. The next array task continues."""
    COMPLETE = "training is complete"
    KILL_SWITCH = "kill switch"
    ENDED_BY_SLURM = "ended by Slurm"
    """The job was cancelled, preempted or out of time before the training could save.

    Slurm or the operator decides whether it is started again.
    """
    NEEDS_PEOPLE = "error that needs a person"
    BAD_NODES = "bad nodes"
    CRASHED = "crashed"
    CRASH_LOOP = "crash loop"


IN_ORDER = frozenset(
    outcome.value
    for outcome in (
        TaskOutcome.LEFT,
        TaskOutcome.COMPLETE,
        TaskOutcome.KILL_SWITCH,
        TaskOutcome.ENDED_BY_SLURM,
    )
)
"""Recorded outcomes that do not count as failed starts."""
EXIT_CODES = {
    TaskOutcome.LEFT: exit_codes.SUCCESS,
    TaskOutcome.COMPLETE: exit_codes.SUCCESS,
    TaskOutcome.KILL_SWITCH: exit_codes.SUCCESS,
    TaskOutcome.ENDED_BY_SLURM: exit_codes.FOUND,
    TaskOutcome.CRASHED: exit_codes.FOUND,
    TaskOutcome.BAD_NODES: exit_codes.FOUND,
    TaskOutcome.NEEDS_PEOPLE: exit_codes.USER_ERROR,
    TaskOutcome.CRASH_LOOP: exit_codes.NOT_DONE,
}
"""Outcome -> exit code of the batch script."""


@dataclass(frozen=True)
class ArrayTask:
    """What one array task runs, and its limits."""

    save: Path
    """The run's --save folder."""
    main_log: Path
    """Log that all launches append to."""
    command: tuple[str, ...]
    """Path of pretrain_gpt.py and its arguments, or `-m megatron.commands.pretrain` and them."""
    kill_switch: Path | None
    """File that stops the run while it exists. None: there is no kill switch."""
    max_failed_starts: int
    """Number of failed starts in a row that ends the array."""
    max_restarts: int
    """Number of restarts in the same allocation within `restart_hours`. After more crashes, or with
    0, the array task is requeued."""
    restart_hours: float
    """Length of the time in which restarts are counted, in hours."""
    train_nodes: int | None
    """Number of nodes that the training needs. The other nodes of the job are spares. None: all."""
    nodes: NodeLimits | None
    """What each node must achieve in the check before training. None: nodes are not checked."""
    srun: tuple[str, ...]
    """Additional options of srun."""
    alert: Callable[[str], None]
    """Function that sends a text to an operator."""
