"""Runs one element of a Slurm job array: checks, trains, and does what follows from how it ended.

    python tools/slurm_element.py --save $CHECKPOINTS --main-log $LOGS/main_log.txt -- pretrain_gpt.py $ARGUMENTS

In a job script with one task for each device. The training is started by srun, and writes to the main log. Then:

- stopped by --exit-duration-in-mins or a signal: saved; the next element goes on
- training is complete, or the kill switch is there: pending elements are cancelled
- ended by Slurm before it could save (scancel, a preemption): nothing; Slurm, or you, decide whether it comes back
- an error that the training explains (a wrong flag, NaNs in a row, no room for checkpoints): alert, pending elements are cancelled;
  so where this element cannot run, or more than half of its nodes fail the check
- an I/O error of a host's own (EIO, a stale mount, a full local disk): alert, this element is requeued, it and the pending ones
  without that host
- a crash (a killed rank, a lost node): this element is requeued, and goes on from the newest checkpoint
- --check-nodes found a bad host: alert, this element is requeued, it and the pending ones without that host
- so many starts in a row that trained nothing: alert, pending elements are cancelled

Alerts go to the main log and where ALERT_MAIL_TO, ALERT_SMTP and ALERT_WEBHOOK say. Exit code: 0 in order, 1 crashed, bad nodes,
or ended by Slurm, 2 a person is needed, 3 a loop of crashes.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from megatron.errors import MegatronError
from megatron.operations.alerts import Alert, Outlets, deliver
from megatron.operations.array_task import EXIT_CODES, ArrayTask, run_array_task
from megatron.operations.node_report import NodeLimits
from megatron.standard_streams import protect_standard_streams


@dataclass(frozen=True)
class SlurmElementArguments:
    save: Path
    """The run's --save folder."""
    main_log: Path
    """All elements append to it."""
    kill_switch: Path | None = None
    """The file of --kill-switch-path: while it is there, nothing starts."""
    max_failed_starts: int = 3
    """Starts in a row that train nothing, after which the array ends."""
    check_nodes: bool = False
    """Probe every node first: see tools/node_check.py."""
    limits: tyro.conf.OmitArgPrefixes[NodeLimits] = field(default_factory=NodeLimits)
    srun: tuple[str, ...] = ()
    """More options of srun, as in --srun=--cpu-bind=none."""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    own, command = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    options = tyro.cli(
        SlurmElementArguments, args=own, prog="slurm_element.py", description=__doc__
    )
    if not command:
        print(
            "error: nothing to train: put -- pretrain_gpt.py and its arguments behind the options",
            file=sys.stderr,
        )
        return 2

    def send_alert(text: str) -> None:
        for trouble in deliver(
            [Alert("element", text)], Outlets(main_log=options.main_log)
        ).troubles:
            print(f"error: {trouble}", file=sys.stderr)

    try:
        outcome = run_array_task(
            ArrayTask(
                save=options.save,
                main_log=options.main_log,
                command=tuple(command),
                kill_switch=options.kill_switch,
                max_failed_starts=options.max_failed_starts,
                nodes=options.limits if options.check_nodes else None,
                srun=options.srun,
                alert=send_alert,
            )
        )
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return EXIT_CODES[outcome]


if __name__ == "__main__":
    protect_standard_streams()  # a full disk under the output must not keep the array from what follows
    sys.exit(main())
