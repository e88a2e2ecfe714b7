"""Reads the reports of the errors that ended the ranks of a step, and finds the hosts at fault."""

from pathlib import Path
from typing import Any

from megatron.base.error_report import ErrorReport
from megatron.base.outside_file import load_json


def read_reports(folder: Path) -> tuple[list[ErrorReport], list[str]]:
    """Read all reports in a folder.

    Returns:
        The reports in the order of ranks, and the names of files that hold no report.

    Raises:
        OSError: If the folder cannot be read.
    """
    reports: list[ErrorReport] = []
    unreadable: list[str] = []
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".json":
                report = _parse_report(load_json(path))
            else:
                report = None
        # One bad file must not hide the others. TypeError means other fields than ErrorReport has,
        # and AttributeError that the file holds no object.
        except (OSError, ValueError, TypeError, AttributeError):
            report = None
        if report is None:
            unreadable.append(path.name)
        else:
            reports.append(report)
    return sorted(reports, key=lambda report: report.rank), unreadable


def _parse_report(record: dict[str, Any]) -> ErrorReport:
    """Return the report of a JSON object.

    Raises:
        TypeError: It has other fields than ErrorReport has, or other types.
        AttributeError: It is no object.
    """
    # JSON has no tuples.
    report = ErrorReport(**{**record, "hung_hosts": tuple(record.get("hung_hosts", ()))})
    texts = (report.host, report.kind, report.message, *report.hung_hosts)
    # Another type would only fail when the array task decides what follows.
    if not isinstance(report.rank, int) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{record!r} has a value of another type than ErrorReport")
    return report


def hosts_at_fault(reports: list[ErrorReport], hosts: int) -> dict[str, str]:
    """Return the hosts whose own I/O errors ended the step.

    An error that is not an I/O error needs a person, with one exception. After an I/O error in a
    checkpoint, all ranks end with the message of the rank that had it. If more than half of several
    hosts have I/O errors, the cause is the shared file system or the configuration.

    Args:
        reports: Reports of one step, at least one.
        hosts: Number of hosts of the job.

    Returns:
        Host -> the reason. Empty if a person is needed.
    """
    # A rank without an I/O error that repeats such a message has learned it from that rank.
    failed = [report for report in reports if report.io_error is not None]
    explained = {report.message for report in failed}
    if any(report.message not in explained for report in reports):
        return {}
    bad: dict[str, str] = {}
    # The first report of each host is enough for the reason.
    for report in failed:
        bad.setdefault(report.host, f"rank {report.rank}: {report.kind}: {report.message}")
    if hosts > 1 and 2 * len(bad) > hosts:
        return {}
    return bad
