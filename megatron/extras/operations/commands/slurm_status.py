r"""Write the state of a run's jobs into its main log and raise alerts.

    python tools/slurm_status.py --job-name tr8-104B --main-log $LOGS/main_log.txt \
        --run $CHECKPOINTS

Run it from cron, every hour. Each call writes one PULSE line. It gives how long the job has been
running, what it is waiting for (the previous array task or a dependency), or when it is scheduled
to start.

An ALERT line is written if nothing runs or is scheduled, the log stopped growing, the loss is not
finite, throughput dropped, or the newest checkpoint is too old. A RECOVERED line follows when that
ends. Alerts are also sent by mail or webhook if --mail-to and --webhook are given, or
ALERT_MAIL_TO, ALERT_SMTP and ALERT_WEBHOOK are set. An alert that could not be sent is sent by the
next call.

Exit code 0 means that all is well, and 1 that an alert is due. Exit code 2 means that something
could not be checked or sent.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.operations.monitor.alerts import Outlets, check_outlets
from megatron.extras.operations.monitor.status import StatusLimits, WatchedRun, check_run
from megatron.plan.rules.finding import refuse_errors


@dataclass(frozen=True)
class SlurmStatusArguments:
    """The command line."""

    job_name: str
    """As in #SBATCH --job-name."""
    outlets: tyro.conf.OmitArgPrefixes[Outlets]
    run: Path | None = None
    """The run's --save folder. An alert is due if no checkpoint was saved there for too long."""
    user: str | None = None
    """Owner of the jobs. Default: the current user."""
    limits: tyro.conf.OmitArgPrefixes[StatusLimits] = field(default_factory=StatusLimits)


def main(argv: list[str] | None = None) -> int:
    """Check the run, deliver the alerts, and return the exit code."""
    given = parse_arguments(SlurmStatusArguments, args=argv, description=__doc__)
    return run_tool(lambda: _report_status(given))


def _report_status(given: SlurmStatusArguments) -> int:
    refuse_errors(check_outlets(given.outlets))
    found = check_run(
        WatchedRun(given.job_name, given.outlets.main_log, given.run, given.user, given.limits)
    )
    return found.deliver(given.outlets, [given.run] if given.run else [])


if __name__ == "__main__":
    sys.exit(main())
