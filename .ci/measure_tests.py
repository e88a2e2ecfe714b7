"""Record how long tests take, for `bash tests/run.sh --changed`. This is a plugin of pytest.

    PYTHONPATH=.ci bash tests/run.sh -p measure_tests                             # all files
    PYTHONPATH=.ci bash tests/run.sh -p measure_tests tests/model/test_parts.py

It replaces the rows of `tests/durations.csv` whose files were collected, and removes those whose
files are gone, so run complete files. A file whose tests are all left out has 0. The number is the
longer one of two times: the CPU time of all processes of a test, and its elapsed time without that
in which they waited for a core. Other work on the machine changes both only a little.
"""

import contextlib
import csv
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

RECORD = Path("tests/durations.csv")
SLOW_SECONDS = 1.0
"""A test that takes longer has a row. The others of its file are added up in one row."""

BRIEF_SECONDS = 0.1
"""A test that is shorter starts no processes that matter."""

seconds: defaultdict[str, float] = defaultdict(float)
"""The time of each test that has run, and that of the shared fixtures of each file."""


def find_file(name: str) -> str:
    """Return the file of a test, or a file itself."""
    return name.split("::")[0]


def read_record() -> dict[str, float]:
    """Return the recorded seconds, by file or by test."""
    with open(RECORD, newline="") as file:
        return {name: float(value) for name, value in csv.reader(file)}


def read_clocks() -> tuple[float, float, float]:
    """Return three sums of seconds over this process and all that it has started.

    The first is CPU time, the second is the part of it of processes that have ended, and the third
    is the time in which those that live waited for a core.
    """
    own = psutil.Process()
    used = 0.0
    ended = 0.0
    waited = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
            waited += read_schedstat(process.pid)[1]
        except (psutil.Error, OSError):
            continue
        used += sum(times[:4])
        ended += times.children_user + times.children_system
    return used, ended, waited


def read_schedstat(pid: int) -> tuple[float, float]:
    """Return how many seconds a process has run, and how many it waited for a core."""
    # The file exists on Linux. It has nanoseconds.
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


@contextlib.contextmanager
def measure(name: str) -> Iterator[None]:
    """Add the time of a block to the seconds of a test or a file."""
    before = read_clocks()
    start = time.perf_counter()
    own = time.process_time()
    yield
    elapsed = time.perf_counter() - start
    value = time.process_time() - own
    if elapsed > BRIEF_SECONDS:
        used, ended, waited = (b - a for a, b in zip(before, read_clocks(), strict=True))
        # How long the processes that have ended waited is unknown. It is estimated by this process.
        ran, waited_itself = read_schedstat(os.getpid())
        waiting = max(0.0, waited) + ended * waited_itself / ran
        value = min(elapsed, max(used, elapsed - waiting))
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


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Let the files of tests that are left out have rows."""
    for item in items:
        seconds[find_file(item.nodeid)] += 0.0


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
