"""Fixtures that many tests share, and the order in which pytest's workers run the tests."""

import atexit
import contextlib
import csv
import gc
import importlib.util
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from suites import find_unchanged, is_short, note_suite

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from process_pool import ProcessPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests start some hundred processes that import the package. Without bytecode on the disk, each
# of them would compile 240 modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

DURATIONS = Path(__file__).with_name("durations.csv")
"""Seconds of each file and of each slow test, see `.ci/measure_tests.py`."""

UNKNOWN_SECONDS = 20.0
"""What a file without a row counts."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect the tests without Python's garbage collection.

    Nearly all objects that collection makes live until the end. Searching them for garbage again
    and again took a third of the CPU time. Later searches leave them out as well.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # nanobind reports objects that are never freed as leaks. Handlers run last in, first out,
        # so the end of Python searches all objects once and not while it frees them.
        atexit.register(gc.unfreeze)
        atexit.register(gc.disable)


def pytest_configure(config: pytest.Config) -> None:
    """Let the tests know whether the short suite runs."""
    note_suite(config)


def pytest_collection_finish() -> None:
    """Refuse a test file that puts tools/ on the path.

    `tools/generate.py` would then hide the package `generate` of the tests, in all processes that
    start later. Import commands from the package.
    """
    tools = Path(__file__).resolve().parents[1] / "tools"
    assert tools not in (Path(entry).resolve() for entry in sys.path), (
        "a test file has put tools/ on sys.path; import from megatron instead"
    )


def find_folder(node: str) -> str:
    """Return the folder of a test: "data" for tests/data/test_x.py::test_y."""
    return node.split("::")[0].split("/")[1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of unchanged files, and start the longest folders first.

    The last folders are short, so several workers end at about the same time.
    """
    if is_short():
        leave_out_unchanged(config, items)
    if hasattr(config, "workerinput"):
        seconds = sum_folders(item.nodeid.split("::")[0] for item in items)
        folders = sorted(seconds, key=lambda folder: (-seconds[folder], folder))
        order = {folder: rank for rank, folder in enumerate(folders)}
        items.sort(key=lambda item: order[find_folder(item.nodeid)])


def leave_out_unchanged(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are marked `when_changed`, if none of their files has changed.

    A change is what differs from the main branch of the server, if there is one, or from the local
    one. Nothing is left out if git does not know them.
    """
    from nearest_tests import list_changed

    for base in ("origin/main", "main"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            changed = [str(file) for file in list_changed(base)]
            break
    else:
        return
    unchanged = find_unchanged(items, changed)
    if unchanged:
        config.hook.pytest_deselected(items=unchanged)
        left_out = set(unchanged)
        items[:] = [item for item in items if item not in left_out]


def sum_folders(files: Iterable[str]) -> dict[str, float]:
    """Return the recorded seconds of the folders of some test files."""
    recorded: dict[str, float] = defaultdict(float)
    with open(DURATIONS, newline="") as rows:
        for name, seconds in csv.reader(rows):
            recorded[name.split("::")[0]] += float(seconds)
    total: dict[str, float] = defaultdict(float)
    for file in dict.fromkeys(files):
        total[find_folder(file)] += recorded.get(file, UNKNOWN_SECONDS)
    return total


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a folder to the same xdist worker, so that its fixtures are made once."""
    from xdist.scheduler import LoadScopeScheduling

    class FolderScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_folder(nodeid)

    return FolderScheduling(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator["ProcessPool"]:
    """Yield a pool of eight real processes, which start once in a session."""
    from process_pool import ProcessPool

    shared = ProcessPool()
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def interpreters() -> Iterator["ProcessPoolExecutor"]:
    """Yield processes that run Triton's kernels on the CPU. Skip the test without Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install -e '.[kernels]'")
    from triton_interpreter import start_interpreters

    with start_interpreters() as processes:
        yield processes


@pytest.fixture(scope="session")
def corpus() -> str:
    """Return the prefix of a small indexed data set: real web text, a vocabulary of 5000."""
    folder = Path(__file__).parent / "fixtures" / "openwebtext-100"
    return str(folder / "meg-gpt2-openwebtext_text_document")
