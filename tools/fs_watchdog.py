"""Watches disks: alerts before a run cannot save. For cron, every hour.

    python tools/fs_watchdog.py --main-log $LOGS/disks.txt --run $CHECKPOINTS --watch $SCRATCH=90% --watch $WORK=2TB,500k-inodes

PATH=90% is about the bytes and inodes of the file system that PATH lies on; PATH=2TB,500k-inodes about what the folder itself
holds, as quotas count. Each is told in a PULSE line, with its growth and the days left until it is full; an ALERT is due over the
limit, with few days left, and where fewer than two more checkpoints of a --run fit. Growth is that of the last 3 days, remembered
beside the log. Alerts are also sent by mail or webhook where --mail-to and --webhook, or ALERT_MAIL_TO, ALERT_SMTP and
ALERT_WEBHOOK, say so. Exit code: 0 all is well, 1 an alert is due, 2 something could not be looked at or told.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron.errors import MegatronError, OperationsError
from megatron.operations.alerts import Outlets, deliver
from megatron.operations.disk_watch import check_disks, parse_watch


@dataclass(frozen=True)
class WatchdogArguments:
    outlets: tyro.conf.OmitArgPrefixes[Outlets]
    watch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """PATH=90%, PATH=2TB or PATH=500k-inodes, limits apart by commas; give it once for each path. kB to PB count in 1000s,
    KiB to PiB in 1024s."""
    run: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A run's --save folder: what its checkpoints take, and how many more fit; give it once for each run."""
    days_left: float = 3.0
    """Alert when something is full in fewer days, at the growth of the last 3 days."""


def main(argv: list[str] | None = None) -> int:
    given = tyro.cli(WatchdogArguments, args=argv, description=__doc__)
    try:
        if not given.watch and not given.run:
            raise OperationsError(
                "nothing to watch: give --watch PATH=90%, --watch PATH=2TB,500k-inodes, or --run with a --save folder"
            )
        watches = [parse_watch(text) for text in given.watch]
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = check_disks(
        watches, given.run, Path(f"{given.outlets.main_log}.disk.json"), days_left=given.days_left
    )
    told = deliver(found.alerts, given.outlets, watched=found.watched, pulses=found.pulses)
    return told.report(found.troubles, alert=bool(found.alerts))


if __name__ == "__main__":
    sys.exit(main())
