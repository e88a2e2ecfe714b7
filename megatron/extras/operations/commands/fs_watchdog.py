r"""Watch disks and raise an alert before a run cannot save. Run it from cron, every hour.

    python tools/fs_watchdog.py --main-log $LOGS/disks.txt --run $CHECKPOINTS \
        --watch $SCRATCH=90% --watch $WORK=2TB,500k-inodes

PATH=90% limits the bytes and inodes of the file system that holds PATH. PATH=2TB,500k-inodes limits
what the folder itself holds, as quotas count it. Each watched path gets a PULSE line with its
growth and the days left until it is full.

An ALERT line is due if a limit is exceeded, if few days are left, or if fewer than two more
checkpoints of a --run fit. Growth is measured over the last 3 days. The history is a file next to
the log. Alerts are also sent by mail or webhook if --mail-to and --webhook are given, or
ALERT_MAIL_TO, ALERT_SMTP and ALERT_WEBHOOK are set.

Exit code 0 means that all is well, and 1 that an alert is due. Exit code 2 means that something
could not be checked or sent.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron.base.errors import OperationsError
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.operations.monitor.alerts import Outlets, check_outlets, deliver
from megatron.extras.operations.monitor.disk_watch import check_disks, parse_watch
from megatron.plan.rules.finding import refuse_errors


@dataclass(frozen=True)
class WatchdogArguments:
    """The command line."""

    outlets: tyro.conf.OmitArgPrefixes[Outlets]
    watch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """PATH=90%, PATH=2TB or PATH=500k-inodes. Separate several limits by commas. Repeat the flag
    for each path. kB to PB count in 1000s, KiB to PiB in 1024s."""
    run: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A run's --save folder. Reports the size of its checkpoints and how many more fit. Repeat the
    flag for each run."""
    days_left: float = 3.0
    """Alert if something is full in fewer days, at the growth of the last 3 days."""


def main(argv: list[str] | None = None) -> int:
    """Check all disks, deliver the alerts, and return the exit code."""
    given = parse_arguments(WatchdogArguments, args=argv, description=__doc__)
    return run_tool(lambda: _watch(given))


def _watch(given: WatchdogArguments) -> int:
    if not given.watch and not given.run:
        raise OperationsError(
            "nothing to watch: give --watch PATH=90%, --watch PATH=2TB,500k-inodes, or --run with "
            "a --save folder"
        )
    refuse_errors(check_outlets(given.outlets))
    # NaN fails this comparison as well.
    if not given.days_left >= 0:
        raise OperationsError(f"--days-left {given.days_left:g} must be at least 0")
    # A typing error in a limit ends the tool before anything is checked. Otherwise cron would watch
    # only some of the paths.
    watches = [parse_watch(text) for text in given.watch]
    found = check_disks(
        watches, given.run, Path(f"{given.outlets.main_log}.disk.json"), days_left=given.days_left
    )
    delivery = deliver(
        found.alerts, given.outlets, watched=found.watched, pulses=found.pulses, runs=given.run
    )
    return delivery.report(found.troubles, alert=bool(found.alerts))


if __name__ == "__main__":
    sys.exit(main())
