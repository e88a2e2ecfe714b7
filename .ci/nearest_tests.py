"""Choose the tests to run after a change, for `bash tests/run.sh --changed`.

The tests of one changed module take at most `LIMIT_SECONDS`. First come those of the test files
that import the module directly. If there are none, those that import it through one other module
come first, and so on. The tests in the folder of the module's package are added, and count as one
import nearer. The fast tests of all these files are preferred to the slow ones. Tests that start
ranks import nothing that they test. Therefore, a few of them (`RANK_TESTS`) are chosen for the
packages that ranks run. A test file that has changed runs completely, and may take longer.

`tests/durations.csv` has the time of each file and each slow test (see `measure_tests.py`). A wrong
number makes the selection longer or shorter, and nothing else. A change is what differs from the
main branch, committed or not. Arguments of pytest are printed, one in a line. What is left out goes
to stderr.

    python .ci/nearest_tests.py                      # for the files that have changed
    python .ci/nearest_tests.py megatron/model/mlp.py
    python .ci/nearest_tests.py --core               # print the seconds of each module of the core
"""

import argparse
import ast
import functools
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from measure_core import OUTSIDE, find_module, iterate_imports, name_module
from measure_tests import find_file, read_record

LIMIT_SECONDS = 60.0
START_SECONDS = 12.0
"""The time until the first test begins: this script, pytest and its two workers."""
FILE_SECONDS = 0.1
"""The time to collect a test file."""
UNKNOWN_SECONDS = 20.0
"""The time of a test file that has no row in the record."""
ALWAYS = "tests/test_start_imports.py"
"""Any module may import too much, so these tests count as near."""
_LAYOUTS = "tests/equivalence/test_layouts.py::test_"
RANK_TESTS = (
    # Eight ranks save, and four load: tensor, pipeline, data and sequence parallelism.
    f"{_LAYOUTS}resume_under_another_layout"
    "[tp2-pp2-dp2-zero2-sp-interleaved-gpt2-tied-ramp--pp2-dp2-zero1-1F1B-gpt2-tied-ramp]",
    # Eight ranks with context parallelism, uneven stages and documents.
    f"{_LAYOUTS}layout_trains_and_evaluates_as_one_process"
    "[pp4-allgather-zero2-GPipe-ends-micro4-bloom-tied-ramp-documents]",
)
RANK_PACKAGES = ("checkpoint", "engine", "model", "parallel", "run", "schedule")
"""The packages of the core that are tested by `RANK_TESTS` too."""


def list_changed(base: str) -> list[Path]:
    """Return the files that differ from a branch, and those that git does not know yet.

    A file that is gone is one of them.

    Raises:
        subprocess.CalledProcessError: This is no checkout of git, or it has no such branch.
    """
    commands = (
        ["git", "diff", "--name-only", "--merge-base", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names = [
        name
        for command in commands
        for name in subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    ]
    return [Path(name) for name in names]


def list_python(files: Iterable[Path]) -> list[Path]:
    """Return the Python files that exist."""
    return [file for file in files if file.suffix == ".py" and file.exists()]


Importers = Mapping[Path, set[Path]]


@functools.cache
def read_importers() -> Importers:
    """Return, for each file of the package and the tests, the files that import it directly."""
    files = [*Path("megatron").rglob("*.py"), *Path("tests").rglob("*.py")]
    # Tests import each other from their folder.
    modules = {name_module(file).removeprefix("tests."): file for file in files}
    known = dict.fromkeys(modules, 0)
    importers: dict[Path, set[Path]] = {file: set() for file in files}
    for file in files:
        for name in iterate_imports(ast.parse(file.read_text())):
            module = find_module(name, known)
            if module is not None and modules[module] != file:
                importers[modules[module]].add(file)
    return importers


def is_test(file: Path) -> bool:
    """Return whether pytest collects a file."""
    return file.name.startswith("test_")


def list_core() -> list[Path]:
    """Return the modules of the core."""
    files = sorted(Path("megatron").rglob("*.py"))
    return [file for file in files if file.parts[1] not in OUTSIDE]


def find_distances(file: Path, importers: Importers) -> dict[str, int]:
    """Return the test files of a changed file, and how many imports each is away, 1 at least.

    Those in the folder of its package are one import nearer.
    """
    seen = {file}
    layer = seen
    distance = 0
    distances: dict[str, int] = {}
    while layer:
        tests = {test for test in layer if is_test(test)}
        own = {test for test in tests if test.parts[1] == file.parts[1]}
        chosen = own if distances else tests
        distances |= {str(test): distance - (test in own) for test in chosen}
        layer = {other for near in layer for other in importers.get(near, ())} - seen
        seen = seen | layer
        distance += 1
    return distances


@dataclass
class Selection:
    """Tests to run after a change."""

    chosen: set[str]
    """Test files, and single tests by their node ids."""
    left_out: set[str]
    """Test files that do not run, and slow tests of files that run."""
    seconds: float
    """The predicted time without the start, as if one test ran at a time."""


def select(file: Path, importers: Importers, record: Mapping[str, float]) -> Selection:
    """Choose the tests for one changed file."""
    if is_test(file):
        chosen = {str(file)} | {name for name in record if find_file(name) == str(file)}
        return Selection(chosen, set(), sum(record.get(name, 0) for name in chosen))
    ranks_run = file.parts[0] == "megatron" and file.parts[1] in RANK_PACKAGES
    chosen = set(RANK_TESTS) if ranks_run else set()
    seconds = sum(record.get(name, UNKNOWN_SECONDS) for name in chosen)
    distances = {ALWAYS: 1, **find_distances(file, importers)}
    fast = [
        (distance, record.get(test, UNKNOWN_SECONDS) + FILE_SECONDS, test)
        for test, distance in distances.items()
    ]
    slow = [
        (distances[find_file(name)], value, name)
        for name, value in record.items()
        if "::" in name and find_file(name) in distances
    ]
    left_out: set[str] = set()
    for _, value, name in [*sorted(fast), *sorted(slow)]:
        if name in chosen or find_file(name) in left_out:
            continue
        if seconds + value > LIMIT_SECONDS - START_SECONDS:
            left_out.add(name)
        else:
            seconds += value
            chosen.add(name)
    return Selection(chosen, left_out, seconds)


def select_all(files: Iterable[Path], record: Mapping[str, float]) -> Selection:
    """Choose the tests for all changed files. A test that is chosen for one of them runs."""
    selections = [select(file, read_importers(), record) for file in files]
    chosen = set().union(*(each.chosen for each in selections)) or {ALWAYS}
    left_out = set().union(*(each.left_out for each in selections)) - chosen
    seconds = sum(record.get(name, UNKNOWN_SECONDS) for name in chosen)
    return Selection(chosen, left_out, seconds)


def list_arguments(selection: Selection) -> list[str]:
    """Return the arguments of pytest. A deselected test needs no existing file."""
    chosen = selection.chosen
    files = sorted(
        name for name in chosen if find_file(name) == name or find_file(name) not in chosen
    )
    skipped = sorted(name for name in selection.left_out if find_file(name) in chosen)
    return [*files, *(f"--deselect={name}" for name in skipped)]


def describe(selection: Selection) -> str:
    """Return what is predicted, what is left out, and the command that runs it."""
    seconds = START_SECONDS + selection.seconds
    text = f"The chosen tests take about {seconds:.0f} s on two idle cores, or less."
    files = sorted({find_file(name) for name in selection.left_out})
    if files:
        text += f"\n{len(files)} files have further tests. Run all tests of these files with:\n"
        text += f"bash tests/run.sh {shlex.join(files)}"
    return text


def main() -> None:
    """Print the arguments of pytest, or the table of the core."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="changed files (default: ask git)")
    parser.add_argument("--base", default="main", help="branch to compare with")
    parser.add_argument("--core", action="store_true", help="print the seconds of each core module")
    arguments = parser.parse_args()
    record = read_record()
    if arguments.core:
        importers = read_importers()
        for file in list_core():
            selection = select(file, importers, record)
            left_out = len({find_file(name) for name in selection.left_out})
            seconds = START_SECONDS + selection.seconds
            print(f"{file!s:50}{seconds:6.1f} s, tests left out in {left_out} files")
        return
    selection = select_all(arguments.files or list_python(list_changed(arguments.base)), record)
    print(describe(selection), file=sys.stderr)
    print("\n".join(list_arguments(selection)))


if __name__ == "__main__":
    main()
