"""Record how long tests take, for `bash tests/run.sh --changed`. This is a plugin of pytest.

    PYTHONPATH=.ci bash tests/run.sh -p measure_tests                             # all files
    PYTHONPATH=.ci bash tests/run.sh -p measure_tests tests/model/test_parts.py

It replaces the rows of `tests/durations.csv` whose files have run, and removes those whose files
are gone. Run it again if a selection takes longer than predicted. Other work on the machine matters
little: the number is the CPU time of all processes of a test. If the elapsed time without the time
in which a process waited for a core is longer, the number is that time.
"""

import contextlib
import csv
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

RECORD = Path("tests/durations.csv")
SLOW_SECONDS = 1.0
"""A test that takes longer has a row. The others of its file are added up in one row."""

BRIEF_SECONDS = 0.1
"""A test that is shorter starts no processes that matter."""

seconds: Counter[str] = Counter()
"""The time of each test that has run, and that of the shared fixtures of each file."""


def find_file(name: str) -> str:
    """Return the file of a test, or a file itself."""
    return name.split("::")[0]


def read_record() -> dict[str, float]:
    """Return the recorded seconds, by file or by test."""
    with open(RECORD, newline="") as file:
        return {name: float(value) for name, value in csv.reader(file)}


def read_clocks() -> tuple[float, float]:
    """Return the CPU time of this process and its children, and their time without a core."""
    own = psutil.Process()
    used = 0.0
    waited = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            used += sum(process.cpu_times()[:4])
            # Nanoseconds in the second field. The file exists on Linux.
            waited += int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
        except (psutil.Error, OSError):
            continue
    return used, waited


@contextlib.contextmanager
def measure(name: str) -> Iterator[None]:
    """Add the time of a block to the seconds of a test or a file."""
    used, waited = read_clocks()
    start = time.perf_counter()
    own = time.process_time()
    yield
    elapsed = time.perf_counter() - start
    value = time.process_time() - own
    if elapsed > BRIEF_SECONDS:
        used_after, waited_after = read_clocks()
        # The times of processes that have ended are missing in the second sums.
        waiting = max(0.0, waited_after - waited)
        value = min(elapsed, max(used_after - used, elapsed - waiting))
    seconds[name] += value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure a test with its own fixtures."""
    file = find_file(item.nodeid)
    shared = seconds[file]
    with measure(item.nodeid):
        result = yield
    seconds[item.nodeid] -= seconds[file] - shared
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[None]:
    """Measure a shared fixture as a part of its file, because its first test may be left out."""
    if fixturedef.scope == "function":
        return (yield)
    with measure(find_file(os.environ["PYTEST_CURRENT_TEST"])):
        return (yield)


def merge(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """Return the record after a run: rows of the files that ran are replaced."""
    files = {find_file(name) for name in new}
    kept = {
        name: value
        for name, value in old.items()
        if find_file(name) not in files and Path(find_file(name)).exists()
    }
    rows = dict.fromkeys(files, 0.0)
    for name, value in new.items():
        row = name if value >= SLOW_SECONDS else find_file(name)
        rows[row] = rows.get(row, 0.0) + value
    return dict(sorted({**kept, **rows}.items()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the times that a worker of xdist has measured."""
    seconds.update(getattr(node, "workeroutput", {}).get("seconds", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record, or send the times from a worker to the process that writes it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = dict(seconds)
        return
    record = merge(read_record() if RECORD.exists() else {}, seconds)
    with open(RECORD, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            (name, f"{value:.1f}") for name, value in record.items()
        )
