"""Run one array task of a Slurm job array, from its start to its end.

The task checks that it may start, checks its nodes, trains, and decides what follows. One srun step
starts the processes of the training and writes to the main log. After a crash or a hang, the task
starts the training again in the same job, within a budget. A task that stops for a reason that
needs a person cancels the rest of the array.

Invariant: a task ends with exactly one `TaskOutcome`, and so does each start of the training. Only
`run_array_task` cancels or requeues jobs, and it records the outcome first.
"""

import os
import signal
import time
from typing import Any

from megatron.base.errors import OperationsError
from megatron.extras.operations.slurm import attempts, client
from megatron.extras.operations.slurm.client import Signals, log
from megatron.extras.operations.slurm.exclusion import HostExclusion
from megatron.extras.operations.slurm.fewer_nodes import CHANGE
from megatron.extras.operations.slurm.start import (
    IN_ORDER,
    ArrayTask,
    StartEnd,
    TaskOutcome,
    TrainingStarts,
)
from megatron.observe.log_line import format_kill_switch_line


def run_array_task(array_task: ArrayTask) -> TaskOutcome:
    """Run one array task and return how it ended.

    After a crash, or if nodes are bad, the training is started again in this job. If that is not
    possible, the job is requeued before the return, if Slurm allows it.

    Args:
        array_task: What to run, and its limits.

    Raises:
        OperationsError: This is not a Slurm job.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise OperationsError(
            "SLURM_JOB_ID is not set: this tool runs inside a Slurm job; submit the script with "
            "sbatch"
        )
    # The handlers come first. A signal would otherwise end this script before anything is recorded.
    signals = Signals()
    exclusion = HostExclusion(array_task.save, array_task.alert)
    starts = TrainingStarts(array_task, signals, exclusion)
    restart = 0
    end = _start(starts, restart)
    while _may_restart(starts, end):
        restart += 1
        end = _start(starts, restart)
    outcome = end.outcome
    log(
        array_task.main_log,
        f"array task {client.describe_job()} ended at iteration "
        f"{attempts.read_reached_iteration(array_task.save)}: {outcome.value}",
    )
    if outcome in (
        TaskOutcome.COMPLETE,
        TaskOutcome.KILL_SWITCH,
        TaskOutcome.NEEDS_PEOPLE,
        TaskOutcome.CRASH_LOOP,
    ):
        _cancel_pending(array_task, outcome)
    # Only these two can succeed on another try. The limit on failed starts ends a crash loop.
    elif outcome in (TaskOutcome.CRASHED, TaskOutcome.BAD_NODES):
        _requeue(starts, outcome)
    # The job gets the nodes that it has lost only by a new allocation.
    elif outcome is TaskOutcome.LEFT and starts.has_lost_hosts_back and client.is_running():
        complete = starts.allocation.complete
        reason = f"the training takes back the nodes that it has lost, and has {complete} again"
        exclusion.record("restart", {"reason": reason, CHANGE: complete})
        _requeue(starts, outcome)
    return outcome


def _start(starts: TrainingStarts, restart: int) -> StartEnd:
    """Start the training once, and record the start and its end.

    Args:
        starts: The starts in this job.
        restart: Number of earlier starts in this job.
    """
    array_task = starts.task
    attempt: attempts.Attempt | None = None
    try:
        array_task.main_log.parent.mkdir(parents=True, exist_ok=True)
        # The start is recorded before anything can fail. A start that is killed counts as failed,
        # because nothing records its end.
        attempt = attempts.begin(array_task.save, is_restart=restart > 0)
        end = _find_obstacle(array_task, attempt) or starts.start(restart)
    except (OperationsError, OSError) as error:
        # A task that cannot run would fail the same way again. It is not requeued.
        array_task.alert(f"array task {client.describe_job()} cannot run: {error}")
        end = StartEnd(TaskOutcome.NEEDS_PEOPLE, str(error))
    try:
        if attempt is not None:
            # The end is recorded before the requeue, because the requeue ends this script.
            attempts.end(array_task.save, attempt, end.outcome.value)
    except OSError as error:
        # A start without a recorded end counts as failed, so this is safe and only logged.
        log(array_task.main_log, f"the end of this start could not be recorded: {error}")
    return end


def _find_obstacle(array_task: ArrayTask, attempt: attempts.Attempt) -> StartEnd | None:
    """Return None if the training may start, otherwise the end that this start has already."""
    if array_task.kill_switch is not None and array_task.kill_switch.exists():
        text = format_kill_switch_line(str(array_task.kill_switch), before_start=True)
        log(array_task.main_log, text)
        return StartEnd(TaskOutcome.KILL_SWITCH, text)
    # The last entry of the list is this attempt. It has no outcome yet and does not count.
    failed = attempts.list_failed_in_a_row(array_task.save, attempt.job, IN_ORDER)[:-1]
    if len(failed) < array_task.max_failed_starts:
        return None
    outcomes = "; ".join(
        f"{past.attempt.nodes}: {past.outcome or 'no recorded end'}" for past in failed
    )
    text = (
        f"{len(failed)} starts in a row saved nothing after iteration {attempt.iteration} "
        f"({outcomes})"
    )
    array_task.alert(
        f"{text}; the array ends here. "
        f"Fix the cause and submit again; {array_task.main_log} has the reasons"
    )
    return StartEnd(TaskOutcome.CRASH_LOOP, text)


def _may_restart(starts: TrainingStarts, end: StartEnd) -> bool:
    """Decide whether the training starts again in this job, and record it.

    Args:
        starts: The starts in this job.
        end: How the last start ended.
    """
    array_task = starts.task
    if end.outcome not in (TaskOutcome.CRASHED, TaskOutcome.BAD_NODES):
        return False
    # A step cannot start in a job that Slurm is ending. It would look like another crash.
    if array_task.max_restarts == 0 or starts.signals.received or not client.is_running():
        return False
    allocation = starts.allocation
    allocation.refresh()
    window = f"{array_task.restart_hours:g} h"
    since = time.time() - 3600 * array_task.restart_hours
    try:
        used = attempts.count_restarts(array_task.save, since)
    except OSError as error:
        # Without the count the budget cannot be kept. A requeue may give nodes that can read it.
        log(array_task.main_log, f"no restart in this job: {error}")
        return False
    if used >= array_task.max_restarts:
        array_task.alert(
            f"array task {client.describe_job()} ends, because it has used its {used} restarts "
            f"within {window}: {end.reason}"
        )
        return False
    # The budget comes before the search, which takes some seconds for each number of nodes.
    details: dict[str, Any] = {"reason": end.reason}
    if not allocation.is_large_enough:
        try:
            details |= starts.shrink()
        except OperationsError as error:
            log(array_task.main_log, f"no restart in this job: {error}")
            return False
    number = f"restart {used + 1} of {array_task.max_restarts} within {window}"
    hosts = list(allocation.train_hosts)
    log(
        array_task.main_log,
        f"array task {client.describe_job()} starts the training again, {number}: {end.reason}",
    )
    starts.exclusion.record("restart", {**details, "restart": number, "hosts": hosts})
    return True


def _cancel_pending(array_task: ArrayTask, outcome: TaskOutcome) -> None:
    """Cancel the pending tasks of the array, because they would end the same way."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is None:
        return
    # Without the filter by state, scancel would end this running task as well.
    if client.try_command("scancel", "--state=PENDING", array) is None:
        array_task.alert(
            f"the pending tasks of array {array} could not be cancelled and would end the same "
            f"way; run scancel --state=PENDING {array}"
        )
    else:
        log(
            array_task.main_log,
            f"the pending tasks of array {array} are cancelled: {outcome.value}",
        )


def _requeue(starts: TrainingStarts, outcome: TaskOutcome) -> None:
    """Requeue this array task, and exclude the hosts that were bad in this job."""
    main_log, bad = starts.task.main_log, sorted(starts.allocation.bad)
    job = client.get_job_name()
    excluded: list[str] = []
    if bad:
        excluded = starts.exclusion.add_to_excluded(job, bad)
    # The requeue sends SIGTERM to this script too. The script ignores it, because the hosts are
    # excluded after the requeue. Slurm's KillWait (30 s by default) limits the time for that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if client.try_command("scontrol", "requeue", job) is None:
        log(
            main_log,
            f"job {job} could not be requeued (is --requeue missing?); the next array task "
            "continues the training",
        )
    else:
        log(main_log, f"job {job} is requeued: {outcome.value}")
    if bad:
        starts.exclusion.exclude_after_requeue(job, bad, excluded)
