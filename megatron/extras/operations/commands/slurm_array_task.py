r"""Run one array task of a Slurm job array. Check nodes, train, and act on how the training ended.

    python tools/slurm_array_task.py --save $CHECKPOINTS --main-log $LOGS/main_log.txt \
        -- pretrain_gpt.py $ARGUMENTS

The tool belongs in a job script with one task for each device. It starts the training by srun, and
the training writes to the main log. What follows depends on how the training ended.

- Stopped by --exit-duration-in-mins or a signal: the run was saved, and the next array task
  continues it.
- The training is complete, or the kill switch exists: pending array tasks are cancelled.
- Slurm ended it before it could save (scancel, a preemption): nothing follows. Slurm or the
  operator decides whether it is started again.
- The training explains the error (a wrong flag, NaNs in a row, no room for checkpoints): an alert
  is sent, and pending array tasks are cancelled. The same holds if this array task cannot run, or
  if more than half of its nodes fail the check.
- An I/O error of one host (EIO, a stale mount, a full local disk): an alert is sent. A spare node
  replaces it, or this array task is requeued. It and the pending ones exclude that host.
- A crash (a killed rank, a hang): the training starts again in the same job and resumes from the
  newest checkpoint. After --max-restarts of them within --restart-hours, or if too few good nodes
  are left, this array task is requeued.
- Too few good nodes are left, and --fewer-nodes allows it: the training goes on with fewer nodes in
  another layout. After lost nodes were healthy for --grow-after minutes, it saves, and this array
  task is requeued with all nodes.
- --check-nodes found a bad host, or a host hung twice: an alert is sent. A spare node replaces it
  (--train-nodes), or this array task is requeued. It and the pending ones exclude that host.
- Several starts in a row saved nothing: an alert is sent, and pending array tasks are cancelled.

Alerts go to the main log and to the outlets in ALERT_MAIL_TO, ALERT_SMTP and ALERT_WEBHOOK.

Exit code 0 means that the training ended in order. Exit code 1 means a crash, bad nodes, or an end
by Slurm. Exit code 2 means that a person is needed, and 3 a loop of crashes.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import tyro

from megatron.base.errors import ConfigError
from megatron.base.plain_text import print_to_stderr
from megatron.console.parse import parse_arguments, split_at_double_dash
from megatron.console.run_tool import run_tool
from megatron.console.standard_streams import protect_standard_streams
from megatron.extras.operations.monitor.alerts import Alert, Outlets, deliver
from megatron.extras.operations.slurm.array_task import run_array_task
from megatron.extras.operations.slurm.node_report import NodeLimits, check_limits
from megatron.extras.operations.slurm.start import EXIT_CODES, ArrayTask, ArrayTaskOptions
from megatron.plan.rules.finding import Finding, error, refuse_errors


@dataclass(frozen=True)
class ArrayTaskArguments(ArrayTaskOptions):
    """The options before '--'."""

    check_nodes: bool = False
    """Check every node first. See tools/node_check.py."""
    limits: tyro.conf.OmitArgPrefixes[NodeLimits] = field(default_factory=NodeLimits)
    srun: tuple[str, ...] = ()
    """More options of srun, as in --srun=--cpu-bind=none."""


def check_arguments(options: ArrayTaskArguments) -> Iterator[Finding]:
    """Check that the array would start, and that its nodes can pass."""
    yield from check_limits(options.limits)
    if options.max_failed_starts < 1:
        yield error(f"--max-failed-starts {options.max_failed_starts} must be 1 or more")
    if options.max_restarts < 0:
        yield error(f"--max-restarts {options.max_restarts} must be 0 or more")
    # NaN fails this comparison as well.
    if not options.restart_hours > 0:
        yield error(f"--restart-hours {options.restart_hours:g} must be above 0")
    if options.train_nodes is not None and options.train_nodes < 1:
        yield error(f"--train-nodes {options.train_nodes} must be 1 or more")
    if options.handover_steps is not None and options.handover_steps < 1:
        yield error(f"--handover-steps {options.handover_steps} must be 1 or more")
    if options.handover_required and options.handover_steps is None:
        yield error("--handover-required needs --handover-steps")


def check_fewer_nodes(options: ArrayTaskArguments, command: Sequence[str]) -> Iterator[Finding]:
    """Check the options of a training with fewer nodes."""
    least = options.fewer_nodes
    if least == "never":
        if options.plan:
            yield error(f"--plan {options.plan[0]} needs --fewer-nodes")
        return
    if least < 1:
        yield error(f"--fewer-nodes {least} must be 1 or more, or never")
    if options.train_nodes is not None and least >= options.train_nodes:
        yield error(f"--fewer-nodes {least} must be below --train-nodes {options.train_nodes}")
    if not options.grow_after >= 0:
        yield error(f"--grow-after {options.grow_after:g} must be 0 or more")
    if options.max_restarts == 0:
        yield error("--fewer-nodes needs --max-restarts above 0: it is a restart in the same job")
    if "--deepspeed" in command:
        yield error(
            "--fewer-nodes is not possible with --deepspeed, whose configuration file has the "
            "micro-batch of one layout; leave out one of them"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the array task and return the exit code."""
    own, command = split_at_double_dash(argv)
    options = parse_arguments(
        ArrayTaskArguments, args=own, prog="slurm_array_task.py", description=__doc__
    )
    return run_tool(lambda: _run(options, tuple(command or ())))


def _run(options: ArrayTaskArguments, command: tuple[str, ...]) -> int:
    """Run the array task and return the exit code.

    Raises:
        MegatronError: An option is wrong, or this is no Slurm job.
        OSError: A file cannot be read or written.
    """
    if not command:
        raise ConfigError(
            "nothing to train: put -- pretrain_gpt.py and its arguments after the options"
        )
    refuse_errors([*check_arguments(options), *check_fewer_nodes(options, command)])

    # An alert that cannot be sent must not stop the actions that follow, such as requeueing.
    def send_alert(text: str) -> None:
        for trouble in deliver(
            [Alert("array task", text)], Outlets(main_log=options.main_log), runs=[options.save]
        ).troubles:
            print_to_stderr(f"error: {trouble}")

    shared = {each.name: getattr(options, each.name) for each in fields(ArrayTaskOptions)}
    outcome = run_array_task(
        ArrayTask(
            **shared,
            command=command,
            nodes=options.limits if options.check_nodes else None,
            srun=options.srun,
            alert=send_alert,
        )
    )
    # Slurm records this code. The actions themselves are done already.
    return EXIT_CODES[outcome]


def run_command() -> int:
    """Run the command line and return the exit code."""
    # A full disk under the output must not stop the actions that follow the training.
    protect_standard_streams()
    return main()


if __name__ == "__main__":
    sys.exit(run_command())
