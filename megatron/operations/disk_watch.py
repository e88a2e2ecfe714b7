"""How full file systems and folders are, what checkpoints add, and how many days are left.

Invariant: only counts; nothing is removed. `PATH=90%` is about the file system that PATH lies on (statvfs, as df counts);
`PATH=2TB,500k-inodes` about the folder itself (what du counts: space on the disk, hard links once, other file systems left out),
as a quota is. A sum in which something could not be read says so.
"""

import contextlib
import json
import os
import re
import stat
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import find_stored_folder, list_saved_iterations
from megatron.checkpoint.manifest import MANIFEST, read_manifest
from megatron.durable import replace_file
from megatron.errors import CheckpointError, OperationsError
from megatron.operations.alerts import Alert, read_record

_DAY = 86_400.0
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_SPEC = "write PATH=90% for the file system, PATH=2TB or PATH=500k-inodes for the folder, limits apart by commas"
_HISTORY_DAYS = 7.0
_GROWTH_DAYS = 3.0
"""Growth is that of so many days, so that a checkpoint that comes or goes is not a trend."""
_GROWTH_SPAN_DAYS = 0.25
"""The least history for it."""
_APART_SECONDS = 600.0
"""Of two points of the history."""
_CHECKPOINTS_OF_ROOM = 2
"""Fewer that fit is an alert: the next save would be the last."""


FILE_SYSTEM, FOLDER = "file system", "folder"
BYTES, INODES = "bytes", "inodes"
History = dict[str, list[tuple[float, float]]]
"""path, what and unit -> (seconds since the epoch, used)"""


@dataclass(frozen=True)
class DiskWatch:
    """One path and its limits."""

    path: Path
    percent: float | None = None
    """Of the file system's bytes, and of its inodes."""
    limit_bytes: int | None = None
    """Of the folder."""
    limit_inodes: int | None = None
    """Of the folder: files, folders and links."""


@dataclass(frozen=True)
class Gauge:
    """One number that grows towards a limit."""

    of: str
    unit: str
    used: int
    full: int
    """Where nothing more goes in; for a folder its limit."""
    limit: int
    """Where an alert is due."""

    def format_amount(self, number: float) -> str:
        return format_bytes(number) if self.unit == BYTES else f"{number:,.0f} inodes"

    def describe(self) -> str:
        part = f" ({100 * self.used / self.full:.1f} %)" if self.full else ""
        return f"{self.format_amount(self.used)} of {self.format_amount(self.full)}{part}"


@dataclass
class FolderUsage:
    bytes: int
    inodes: int
    unread: int = 0
    """Folders that could not be read: the sums are too small."""
    first_error: str = ""


@dataclass
class DiskReport:
    """Of one check."""

    pulses: list[str] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    watched: set[str] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)


def parse_watch(text: str) -> DiskWatch:
    """Of `PATH=LIMIT[,LIMIT]`.

    Raises:
        OperationsError: it is none.
    """
    path, equals, limits = text.rpartition("=")
    if not equals or not path:
        raise OperationsError(f"--watch {text!r} has no limit; {_SPEC}")
    found: dict[str, Any] = {}
    for limit in limits.split(","):
        key, value = _limit(limit.strip(), text)
        if key in found:
            raise OperationsError(f"--watch {text!r} limits {key.replace('_', ' ')} twice; {_SPEC}")
        found[key] = value
    return DiskWatch(Path(path), **found)


def _limit(limit: str, text: str) -> tuple[str, float | int]:
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?) ?(?:(%)|([kmgtp]?)-?inodes|([kmgtp]i?)?b)", limit, re.IGNORECASE
    )
    if match is None:
        raise OperationsError(f"--watch {text!r}: {limit!r} is no limit; {_SPEC}")
    number = float(match[1])
    if match[2]:
        if not 0 < number <= 100:
            raise OperationsError(f"--watch {text!r}: {limit} must be above 0% and at most 100%")
        return "percent", number
    if number <= 0:
        raise OperationsError(f"--watch {text!r}: {limit} must be above 0")
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
) -> DiskReport:
    """Look at all paths and runs' folders; one that fails does not keep the others from being checked.

    Growth is read from `history_file`; a path that is full in fewer than `days_left` days at that rate is an alert.
    """
    now = time.time() if now is None else now
    report = DiskReport()
    history = _read_history(history_file, report)
    rooms: dict[Path, int] = {}
    for watch in watches:
        try:
            gauges = measure(watch, report)
        except OSError as error:
            _alert_unseen(
                report,
                f"disk {watch.path}",
                f"--watch {watch.path} cannot be looked at: {error.strerror}; give a path that is there",
            )
            continue
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
                f"--run {run} cannot be looked at: {error.strerror}; give a run's --save folder",
            )
    _write_history(history_file, history, now, report)
    return report


def _alert_unseen(report: DiskReport, kind: str, text: str) -> None:
    """Who relies on this tool must know that it does not see."""
    report.troubles.append(text)
    report.watched.add(f"{kind} unseen")
    report.alerts.append(Alert(f"{kind} unseen", text))


# Counting


def measure(watch: DiskWatch, report: DiskReport) -> list[Gauge]:
    """
    Raises:
        OSError: there is no such path.
    """
    gauges = []
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
            text = f"{found.unread} entries of {watch.path} could not be read, the first: {found.first_error}; its sums are too small"
            report.troubles.append(text)
            report.alerts.append(Alert(kind, text))
    return gauges


def measure_file_system(path: Path, percent: float) -> list[Gauge]:
    """As df counts: what is kept for root is not there. Without inodes where the file system has no fixed number of them.

    Raises:
        OSError: there is no such path.
    """
    found = os.statvfs(path)
    used, full = (
        (found.f_blocks - found.f_bfree) * found.f_frsize,
        (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize,
    )
    gauges = [Gauge(FILE_SYSTEM, BYTES, used, full, round(full * percent / 100))]
    if found.f_files:
        used, full = found.f_files - found.f_ffree, found.f_files - found.f_ffree + found.f_favail
        gauges.append(Gauge(FILE_SYSTEM, INODES, used, full, round(full * percent / 100)))
    return gauges


def measure_folder(path: Path) -> FolderUsage:
    """As du counts: blocks on the disk, a file with several names once, links not followed, other file systems left out.

    What vanishes meanwhile (a checkpoint that is thinned out) is no error.

    Raises:
        OSError: there is no such folder, or it cannot be read at all.
    """
    top = os.stat(path)
    usage = FolderUsage(top.st_blocks * 512, 1)
    seen: set[int] = set()
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
    """Whether to go down into it."""
    folder = stat.S_ISDIR(facts.st_mode)
    if facts.st_dev != device or facts.st_ino in seen:
        return False
    if facts.st_nlink > 1 and not folder:
        seen.add(facts.st_ino)
    usage.bytes += facts.st_blocks * 512
    usage.inodes += 1
    return folder


# Judging


def _check_gauges(
    watch: DiskWatch,
    gauges: Sequence[Gauge],
    history: History,
    report: DiskReport,
    days_left: float,
    now: float,
) -> None:
    """A PULSE of all gauges of a path, and alerts for what is over its limit or soon full."""
    over, soon, parts = [], [], []
    for gauge in gauges:
        points = history.setdefault(f"{watch.path.absolute()} {gauge.of} {gauge.unit}", [])
        if not points or now - points[-1][0] > _APART_SECONDS:
            points.append((now, gauge.used))
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
    for kind, found in (("full", over), ("soon full", soon)):
        report.watched.add(f"disk {watch.path} {kind}")
        if found:
            report.alerts.append(
                Alert(f"disk {watch.path} {kind}", f"{watch.path} is {kind}: {'; '.join(found)}")
            )


def estimate_daily_growth(points: Sequence[tuple[float, float]], now: float) -> float | None:
    """Slope of the straight line through the newest days; None where there is too little history."""
    newest = [(at / _DAY, used) for at, used in points if 0 <= now - at <= _GROWTH_DAYS * _DAY]
    if len(newest) < 2 or newest[-1][0] - newest[0][0] < _GROWTH_SPAN_DAYS:
        return None
    return statistics.linear_regression(*zip(*newest, strict=True)).slope


def _check_run(run: Path, rooms: Mapping[Path, int], report: DiskReport) -> None:
    """What checkpoints take, and how many more there is room for: by the file system, and by the limits of the folders around."""
    kind = f"checkpoints {run}"
    os.scandir(run).close()
    report.watched |= {f"{kind} unseen", f"{kind} room"}
    found, damaged = _list_checkpoints(run)
    if damaged:
        _alert_unseen(
            report,
            kind,
            f"{run}: {'; '.join(damaged)}; tools/inspect_checkpoint.py --verify tells more",
        )
    if not found:
        report.pulses.append(f"{run}: no checkpoints")
        return
    size = found[-1][1]
    text = f"{run}: {len(found)} checkpoint{'s' if len(found) > 1 else ''}, the newest of {format_bytes(size)}"
    days = (found[-1][0] - found[0][0]) / _DAY
    if days > 0:
        kept = sum(each for _, each in found[1:])
        text += f", one every {days / (len(found) - 1):.2g} days, {format_bytes(kept / days)} a day are kept"
    place = os.statvfs(run)
    around = [left for path, left in rooms.items() if run.resolve().is_relative_to(path)]
    room = max(0, min([place.f_bavail * place.f_frsize, *around]))
    more = room // max(1, size)
    report.pulses.append(f"{text}; room for {more:,} more")
    if more < _CHECKPOINTS_OF_ROOM:
        rule = (
            f"room for {more} more checkpoints of {format_bytes(size)} ({format_bytes(room)} free)"
        )
        report.alerts.append(
            Alert(
                f"{kind} room",
                f"{run}: {rule}; make room, or thin them out with --keep-latest-checkpoints",
            )
        )


def _list_checkpoints(run: Path) -> tuple[list[tuple[float, int]], list[str]]:
    """((when it was saved, bytes) in order, what is damaged)."""
    found, damaged = [], []
    for iteration in list_saved_iterations(run):
        folder = find_stored_folder(run, iteration)
        try:
            found.append(((folder / MANIFEST).stat().st_mtime, read_manifest(folder).bytes))
        except FileNotFoundError:
            continue  # thinned out meanwhile
        except CheckpointError as error:
            if folder.exists():
                damaged.append(f"{folder.name}: {error}")
    return sorted(found), damaged


# Growth over days


def _read_history(path: Path, report: DiskReport) -> History:
    try:
        record = read_record(path)
        found = {} if record is None else record
        return {
            str(key): [(float(at), float(used)) for at, used in points]
            for key, points in found.items()
        }
    except OperationsError as error:
        report.troubles.append(str(error))
    except (TypeError, ValueError, AttributeError):
        report.troubles.append(
            f"{path} is not what this tool writes and is begun afresh; growth is known again after 6 hours"
        )
    return {}


def _write_history(path: Path, history: History, now: float, report: DiskReport) -> None:
    kept = {
        key: [point for point in points if abs(now - point[0]) <= _HISTORY_DAYS * _DAY]
        for key, points in history.items()
    }
    try:
        replace_file(
            path, json.dumps({key: points for key, points in kept.items() if points}) + "\n"
        )
    except OSError as error:
        report.troubles.append(
            f"{path} cannot be written ({error.strerror}): growth is not known without it; make room, or mend permissions"
        )


def format_bytes(size: float) -> str:
    """Three digits, in units of 1000, as disks are sold and quotas are given."""
    unit = "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    decimals = 0 if unit == "bytes" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:,.{decimals}f} {unit}"
