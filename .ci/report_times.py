"""Report test files whose time is not recorded, or has doubled. This is a plugin of pytest.

`.ci/run` loads it. It compares elapsed times with `tests/durations.csv`, so other work on the
machine lets it report files that have not changed. It fails no run.
"""

from collections import defaultdict

import pytest
from measure_tests import find_file, read_record

FACTOR = 2.0
SHORTEST_SECONDS = 10.0
"""A file that takes less is not reported, as its time may have doubled by chance."""

seconds: defaultdict[str, float] = defaultdict(float)
"""The elapsed time of each file that has run."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a test, or of its fixtures."""
    seconds[find_file(report.nodeid)] += report.duration


def compare(elapsed: dict[str, float], record: dict[str, float]) -> tuple[list[str], list[str]]:
    """Return the files without a row, and those whose time has doubled."""
    recorded: defaultdict[str, float] = defaultdict(float)
    for name, value in record.items():
        recorded[find_file(name)] += value
    unknown = sorted(set(elapsed) - set(recorded))
    doubled = [
        f"{file}: {value:.0f} s, {recorded[file]:.0f} s are recorded"
        for file, value in sorted(elapsed.items())
        if file in recorded and value > max(FACTOR * recorded[file], SHORTEST_SECONDS)
    ]
    return unknown, doubled


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the report, and the command that measures."""
    unknown, doubled = compare(dict(seconds), read_record())
    if not unknown and not doubled:
        return
    terminalreporter.section("times of tests/durations.csv")
    for file in unknown:
        terminalreporter.write_line(f"{file}: not measured")
    for line in doubled:
        terminalreporter.write_line(line)
    files = " ".join([*unknown, *(line.split(":")[0] for line in doubled)])
    terminalreporter.write_line("Measure them when nothing else runs:")
    terminalreporter.write_line(f"PYTHONPATH=.ci bash tests/run.sh -p measure_tests {files}")
