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

import contextlib
import json
import os
import re
import stat
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from megatron.base.errors import CheckpointError, OperationsError
from megatron.base.plain_text import format_bytes
from megatron.checkpoint.folder import find_stored_folder, list_saved_iterations
from megatron.checkpoint.manifest import MANIFEST, read_manifest
from megatron.console.parse import parse_arguments
from megatron.console.run_tool import run_tool
from megatron.extras.operations.monitor.alerts import (
    CheckFindings,
    Outlets,
    check_outlets,
    read_record,
    write_record,
)
from megatron.plan.rules.finding import refuse_errors

_DAY = 86_400.0
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_SPEC = (
    "write PATH=90% for the file system, PATH=2TB or PATH=500k-inodes for the folder; separate "
    "limits by commas"
)
_HISTORY_DAYS = 7.0
"""Age at which a point is dropped from the history."""
_GROWTH_DAYS = 3.0
"""Growth is estimated over these days. One checkpoint that comes or goes is then no trend."""
_GROWTH_SPAN_DAYS = 0.25
"""Shortest history from which growth is estimated."""
_APART_SECONDS = 600.0
"""Shortest time between two points of the history, so that the file stays small."""
_CHECKPOINTS_OF_ROOM = 2
"""If there is room for fewer checkpoints, an alert is sent. The next save could be the last one."""


FILE_SYSTEM = "file system"
FOLDER = "folder"
BYTES = "bytes"
INODES = "inodes"
History = dict[str, list[tuple[float, float]]]
"""Path, kind and unit of a gauge -> points (seconds since the epoch, used)."""


@dataclass(frozen=True)
class DiskWatch:
    """One path and its limits."""

    path: Path
    percent: float | None = None
    """Limit of the file system's bytes, and of its inodes, in percent."""
    limit_bytes: int | None = None
    """Limit of the folder's bytes."""
    limit_inodes: int | None = None
    """Limit of the folder's inodes, which are files, folders and links."""


@dataclass(frozen=True)
class Gauge:
    """One number that grows towards a limit."""

    of: str
    """FILE_SYSTEM or FOLDER."""
    unit: str
    """BYTES or INODES."""
    used: int
    full: int
    """Number at which nothing more fits. For a folder this is its limit."""
    limit: int
    """Number from which on an alert is sent."""

    def format_amount(self, number: float) -> str:
        """Return a number with this gauge's unit."""
        if self.unit == BYTES:
            return format_bytes(number)
        return f"{number:,.0f} inodes"

    def describe(self) -> str:
        """Return what is used, of how much, and the percentage."""
        # Some file systems report a size of 0, for example /proc.
        part = f" ({100 * self.used / self.full:.1f} %)" if self.full else ""
        return f"{self.format_amount(self.used)} of {self.format_amount(self.full)}{part}"


@dataclass
class FolderUsage:
    """Space and inodes that a folder uses, with everything in it."""

    bytes: int
    inodes: int
    unread: int = 0
    """Number of folders that could not be read. If there are any, the sums are too small."""
    first_error: str = ""
    """Path and reason of the first of these."""


def parse_watch(text: str) -> DiskWatch:
    """Parse `PATH=LIMIT[,LIMIT]`.

    Raises:
        OperationsError: The text has another form, or a limit is given twice.
    """
    # Split at the last equals sign, because a path may contain others.
    path, equals, limits = text.rpartition("=")
    if not equals or not path:
        raise OperationsError(f"--watch {text!r} has no limit; {_SPEC}")
    found: dict[str, Any] = {}
    for limit in limits.split(","):
        key, value = _limit(limit.strip(), text)
        if key in found:
            unit = key.removeprefix("limit_")
            raise OperationsError(f"--watch {text!r} has two limits in {unit}; {_SPEC}")
        found[key] = value
    return DiskWatch(Path(path), **found)


def _limit(limit: str, text: str) -> tuple[str, float | int]:
    """Parse one limit.

    Args:
        limit: The limit, for example `90%`, `2TB` or `500k-inodes`.
        text: The complete argument, for messages.

    Returns:
        The field of `DiskWatch` to set, and its value.
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?) ?(?:(%)|([kmgtp]?)-?inodes|([kmgtp]i?)?b)", limit, re.IGNORECASE
    )
    if match is None:
        raise OperationsError(f"--watch {text!r}: {limit!r} is not a limit; {_SPEC}")
    number = float(match[1])
    if match[2]:
        if not 0 < number <= 100:
            raise OperationsError(f"--watch {text!r}: {limit} must be above 0% and at most 100%")
        return "percent", number
    if number <= 0:
        raise OperationsError(f"--watch {text!r}: {limit} must be above 0")
    # The group is empty for plain `inodes`, and None for bytes.
    if match[3] is not None:
        return "limit_inodes", round(number * _UNITS[match[3].lower()])
    unit = (match[4] or "").lower()
    return "limit_bytes", round(number * (_UNITS | _BINARY_UNITS)[unit])


def check_disks(
    watches: Sequence[DiskWatch],
    runs: Sequence[Path],
    history_file: Path,
    *,
    days_left: float,
    now: float | None = None,
) -> CheckFindings:
    """Check all paths and the folders of runs. If one fails, the others are still checked.

    Args:
        watches: Paths with their limits.
        runs: `--save` folders of runs, whose checkpoints are counted.
        history_file: File of earlier measurements, from which growth is estimated.
        days_left: If a path will be full in fewer days at the present growth, an alert is made.
        now: Time of the check, in seconds since the epoch. Default: the present time.
    """
    if now is None:
        now = time.time()
    report = CheckFindings()
    history = _read_history(history_file, report)
    rooms: dict[Path, int] = {}
    for watch in watches:
        try:
            gauges = measure(watch, report)
        except OSError as error:
            _alert_unseen(
                report,
                f"disk {watch.path}",
                f"--watch {watch.path} cannot be checked: {error.strerror}; give a path that "
                "exists",
            )
            continue
        # The room that is left under folders' limits also bounds the checkpoints of runs in them.
        for gauge in gauges:
            if gauge.of == FOLDER and gauge.unit == BYTES:
                rooms[watch.path.resolve()] = gauge.full - gauge.used
        _check_gauges(watch, gauges, history, report, days_left, now)
    for run in runs:
        try:
            _check_run(run, rooms, report)
        except OSError as error:
            _alert_unseen(
                report,
                f"checkpoints {run}",
                f"--run {run} cannot be checked: {error.strerror}; give a run's --save folder",
            )
    _write_history(history_file, history, now, report)
    return report


def _alert_unseen(report: CheckFindings, kind: str, text: str) -> None:
    """Add an alert about a path that cannot be checked.

    Without it, an unreadable path would look like a path without problems.
    """
    report.troubles.append(text)
    report.add_alert(f"{kind} unseen", text)


# Counting


def measure(watch: DiskWatch, report: CheckFindings) -> list[Gauge]:
    """Measure a path for each of its limits. What could not be read is added to the report.

    Raises:
        OSError: The path does not exist.
    """
    gauges = []
    # Called only for its error, before anything is added to the report.
    os.stat(watch.path)
    if watch.percent is not None:
        gauges += measure_file_system(watch.path, watch.percent)
    kind = f"disk {watch.path} unseen"
    report.watched.add(kind)
    if watch.limit_bytes is not None or watch.limit_inodes is not None:
        found = measure_folder(watch.path)
        for unit, used, limit in (
            (BYTES, found.bytes, watch.limit_bytes),
            (INODES, found.inodes, watch.limit_inodes),
        ):
            if limit is not None:
                gauges.append(Gauge(FOLDER, unit, used, limit, limit))
        if found.unread:
            text = (
                f"{found.unread} entries of {watch.path} could not be read, the first: "
                f"{found.first_error}; the sums are too small"
            )
            report.troubles.append(text)
            report.add_alert(kind, text)
    return gauges


def measure_file_system(path: Path, percent: float) -> list[Gauge]:
    """Measure a file system as df does.

    Space that is reserved for root counts as if it did not exist.

    Args:
        path: A path on the file system.
        percent: Limit in percent.

    Returns:
        Gauges of bytes and inodes. There is no gauge of inodes if the file system has no fixed
        number of them.

    Raises:
        OSError: The path does not exist.
    """
    found = os.statvfs(path)
    # `f_bfree` includes the blocks that are reserved for root, and `f_bavail` does not. A training
    # job cannot use them, so the disk is full for it when `f_bavail` is 0.
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    full = (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize
    gauges = [Gauge(FILE_SYSTEM, BYTES, used, full, round(full * percent / 100))]
    # File systems like btrfs make inodes as they are needed, and report 0 here.
    if found.f_files:
        used = found.f_files - found.f_ffree
        full = found.f_files - found.f_ffree + found.f_favail
        gauges.append(Gauge(FILE_SYSTEM, INODES, used, full, round(full * percent / 100)))
    return gauges


def measure_folder(path: Path) -> FolderUsage:
    """Measure a folder as du does.

    Blocks on the disk are counted. A file with several hard links counts once, symbolic links are
    not followed, and other file systems are left out. An entry that is deleted during the scan is
    no error, because old checkpoints are deleted while a run continues.

    Raises:
        OSError: The folder does not exist, or cannot be read at all.
    """
    top = os.stat(path)
    # `st_blocks` has units of 512 bytes, whatever the block size of the file system is.
    usage = FolderUsage(top.st_blocks * 512, 1)
    # Inodes of files with several hard links that were counted already.
    seen: set[int] = set()
    # Opened here for its error. In the loop below, a folder that cannot be read is only counted.
    with os.scandir(path):
        folders = [os.fspath(path)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if _count(entry.stat(follow_symlinks=False), top.st_dev, seen, usage):
                            folders.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            usage.unread += 1
            usage.first_error = usage.first_error or f"{folder}: {error.strerror}"
    return usage


def _count(facts: os.stat_result, device: int, seen: set[int], usage: FolderUsage) -> bool:
    """Add one entry to the usage, and return whether it is a folder to scan."""
    folder = stat.S_ISDIR(facts.st_mode)
    if facts.st_dev != device or facts.st_ino in seen:
        return False
    # Only files with several links are remembered. A set of all inodes would need much memory.
    if facts.st_nlink > 1 and not folder:
        seen.add(facts.st_ino)
    usage.bytes += facts.st_blocks * 512
    usage.inodes += 1
    return folder


# Alerts


def _check_gauges(
    watch: DiskWatch,
    gauges: Sequence[Gauge],
    history: History,
    report: CheckFindings,
    days_left: float,
    now: float,
) -> None:
    """Add a PULSE with all gauges of a path, and alerts for those over a limit or soon full.

    A measurement is added to the history if no other one is less than ten minutes away.
    """
    over = []
    soon = []
    parts = []
    for gauge in gauges:
        points = history.setdefault(f"{watch.path.absolute()} {gauge.of} {gauge.unit}", [])
        # The absolute value matters after a clock was set back. Otherwise nothing would be added
        # until the clock passes the last point again.
        if all(abs(now - at) > _APART_SECONDS for at, _ in points):
            points.append((now, gauge.used))
            points.sort()
        growth = estimate_daily_growth(points, now)
        text = f"{gauge.of} {gauge.describe()}"
        if growth is not None and growth > 0:
            left = max(0.0, (gauge.full - gauge.used) / growth)
            text += f", {gauge.format_amount(growth)} more a day, full in {left:,.1f} days"
            if left < days_left:
                soon.append(text)
        parts.append(text)
        if gauge.used >= gauge.limit:
            over.append(f"{text}; the limit is {gauge.format_amount(gauge.limit)}")
    report.pulses.append(f"{watch.path}: {'; '.join(parts)}")
    # Both kinds are watched in every check. So an alert that has ended is reported as RECOVERED.
    for kind, found in (("full", over), ("soon full", soon)):
        report.watched.add(f"disk {watch.path} {kind}")
        if found:
            text = f"{watch.path} is {kind}: {'; '.join(found)}"
            report.add_alert(f"disk {watch.path} {kind}", text)


def estimate_daily_growth(points: Sequence[tuple[float, float]], now: float) -> float | None:
    """Return the slope of the straight line through the newest days.

    Args:
        points: (seconds since the epoch, used), the oldest first.
        now: Present time in seconds since the epoch.

    Returns:
        Growth a day, or None if the history is too short.
    """
    # Points in the future come from a clock that was set back. They are left out.
    newest = [(at / _DAY, used) for at, used in points if 0 <= now - at <= _GROWTH_DAYS * _DAY]
    if len(newest) < 2 or newest[-1][0] - newest[0][0] < _GROWTH_SPAN_DAYS:
        return None
    return statistics.linear_regression(*zip(*newest, strict=True)).slope


def _check_run(run: Path, rooms: Mapping[Path, int], report: CheckFindings) -> None:
    """Add a PULSE with the size of a run's checkpoints and the room for more, and alerts.

    Args:
        run: The run's `--save` folder.
        rooms: Watched folder -> bytes that are left until its limit.
        report: Report to add to.

    Raises:
        OSError: The folder cannot be read.
    """
    kind = f"checkpoints {run}"
    # Called only for its error. A folder that cannot be read must not look like one without
    # checkpoints.
    os.scandir(run).close()
    report.watched |= {f"{kind} unseen", f"{kind} room"}
    found, damaged = _list_checkpoints(run)
    if damaged:
        _alert_unseen(
            report,
            kind,
            f"{run}: {'; '.join(damaged)}; tools/inspect_checkpoint.py --verify reports details",
        )
    if not found:
        report.pulses.append(f"{run}: no checkpoints")
        return
    size = found[-1][1]
    text = (
        f"{run}: {len(found)} checkpoint{'s' if len(found) > 1 else ''}, "
        f"the newest of {format_bytes(size)}"
    )
    days = (found[-1][0] - found[0][0]) / _DAY
    if days > 0:
        # The time span starts at the first checkpoint, so its bytes are not growth within it.
        kept = sum(each for _, each in found[1:])
        text += (
            f", one every {days / (len(found) - 1):.2g} days, "
            f"{format_bytes(kept / days)} a day are kept"
        )
    # The room is the smallest of what the file system and each watched folder above have left.
    place = os.statvfs(run)
    around = [left for path, left in rooms.items() if run.resolve().is_relative_to(path)]
    room = max(0, min([place.f_bavail * place.f_frsize, *around]))
    more = room // max(1, size)
    report.pulses.append(f"{text}; room for {more:,} more")
    if more < _CHECKPOINTS_OF_ROOM:
        report.add_alert(
            f"{kind} room",
            f"{run}: room for {more} more checkpoints of {format_bytes(size)} "
            f"({format_bytes(room)} free); make room, or keep fewer with --keep-latest-checkpoints",
        )


def _list_checkpoints(run: Path) -> tuple[list[tuple[float, int]], list[str]]:
    """Return the checkpoints in order of time, as (time of save, bytes), and the damaged ones.

    The time of save is that of the manifest, which is written last.
    """
    found = []
    damaged = []
    for iteration in list_saved_iterations(run):
        folder = find_stored_folder(run, iteration)
        try:
            found.append(((folder / MANIFEST).stat().st_mtime, read_manifest(folder).bytes))
        # The run deleted the checkpoint after it was listed.
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            # If the folder does not exist now, it was deleted while it was read.
            if folder.exists():
                damaged.append(f"{folder.name}: {error}")
    return sorted(found), damaged


# Growth over days


def _read_history(path: Path, report: CheckFindings) -> History:
    """Return the history in a file, or an empty one if it is missing or damaged."""

    def parse(record: Any) -> History:
        return {
            str(key): [(float(at), float(used)) for at, used in points]
            for key, points in record.items()
        }

    remark = "; growth is known again after 6 hours"
    return read_record(path, parse, report.troubles, remark) or {}


def _write_history(path: Path, history: History, now: float, report: CheckFindings) -> None:
    """Write the history without points that are too old."""
    # The absolute value also drops points that a wrong clock put far into the future.
    kept = {
        key: [point for point in points if abs(now - point[0]) <= _HISTORY_DAYS * _DAY]
        for key, points in history.items()
    }
    # The disk that is watched may be full. An error here must not end the check.
    remark = ": growth is not known without it; make room, or fix permissions"
    text = json.dumps({key: points for key, points in kept.items() if points})
    write_record(path, text, report.troubles, remark)


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
    return found.deliver(given.outlets, given.run)


if __name__ == "__main__":
    sys.exit(main())
