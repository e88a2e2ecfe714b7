"""Tells in a run's main log how its jobs stand, and alerts: for cron, every hour.

    python tools/slurm_status.py --job-name tr8-104B --main-log $LOGS/main_log.txt --run $CHECKPOINTS

One PULSE line: running for, waiting for the previous array element or on a dependency, scheduled to start in. An ALERT line where
nothing runs or is scheduled, the log stopped growing, the loss is not finite, throughput dropped, or the newest checkpoint is too
old; RECOVERED when that ends. Alerts are also sent by mail or webhook where --mail-to and --webhook, or ALERT_MAIL_TO, ALERT_SMTP
and ALERT_WEBHOOK, say so; what could not be sent is sent by the next call. Exit code: 0 all is well, 1 an alert is due, 2 something
could not be looked at or told.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from megatron.errors import MegatronError
from megatron.operations.alerts import Outlets, deliver
from megatron.operations.status import StatusLimits, WatchedRun, check_run


@dataclass(frozen=True)
class SlurmStatusArguments:
    job_name: str
    """As in #SBATCH --job-name."""
    outlets: tyro.conf.OmitArgPrefixes[Outlets]
    run: Path | None = None
    """The run's --save folder: alerts when no checkpoint was saved there for too long."""
    user: str | None = None
    """Whose jobs. Default: the current user's."""
    limits: tyro.conf.OmitArgPrefixes[StatusLimits] = field(default_factory=StatusLimits)


def main(argv: list[str] | None = None) -> int:
    given = tyro.cli(SlurmStatusArguments, args=argv, description=__doc__)
    try:
        found = check_run(
            WatchedRun(given.job_name, given.outlets.main_log, given.run, given.user, given.limits)
        )
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    pulses = [] if found.pulse is None else [found.pulse]
    told = deliver(found.alerts, given.outlets, watched=found.watched, pulses=pulses)
    return told.report(found.troubles, alert=bool(found.alerts))


if __name__ == "__main__":
    sys.exit(main())
