"""Run the tests slice by slice, so that a long run can be stopped and continued.

    python tests/run_slices.py RESULTS --marker full
    python tests/run_slices.py RESULTS --table

A slice is a test file of a folder with long tests, a part of such a file, or a whole other folder.
`--only triples` runs the slices whose names contain a word. The result of a slice
is one JUnit file in the folder RESULTS. A second call runs the slices that have none yet, and those
that were stopped. Remove a file to repeat its slice. The table is printed at the end.
"""

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

TESTS = Path(__file__).parent
LONG_FOLDERS = ("equivalence", "training", "faults", "engine", "examples")
"""The folders of which each file is a slice."""
PARTS = {
    "equivalence/test_triples": (
        *("gpt2 and ramp", "gpt2 and curriculum"),
        *("llama and ramp", "llama and curriculum"),
        *("bloom and ramp", "bloom and curriculum"),
    )
}
"""Expressions (pytest's -k) that divide a long file into slices. Each test is in one of them."""
NO_TESTS = 5
"""Exit code of pytest if no test was selected."""
COMPLETE = (0, 1, NO_TESTS)
"""Exit codes of pytest after a complete run. 1 means that tests failed."""


@dataclass(frozen=True)
class Slice:
    """A test file or a folder, and an expression that selects a part of it."""

    path: Path
    part: str = ""

    @property
    def name(self) -> str:
        """The name in the table, as in equivalence/test_triples/gpt2-ramp."""
        path = self.path.relative_to(TESTS).with_suffix("").as_posix()
        return "/".join([path, *([self.part.replace(" and ", "-")] if self.part else [])])


def list_slices() -> list[Slice]:
    """Return slices that together have all tests."""
    files = sorted(TESTS.rglob("test_*.py"))
    slices = []
    for path in dict.fromkeys(_find_slice(file) for file in files):
        whole = Slice(path)
        slices += [Slice(path, part) for part in PARTS.get(whole.name, ("",))]
    return slices


def _find_slice(file: Path) -> Path:
    folder = file.relative_to(TESTS).parts[0]
    # The tests of slurm/ share one cluster.
    if folder not in LONG_FOLDERS and file.parent != TESTS:
        return TESTS / folder
    return file


def run_slice(tests: Slice, result: Path, marker: str) -> None:
    """Run the tests of a slice, and write its result once it is complete.

    Args:
        tests: The slice.
        result: JUnit file of the result.
        marker: Expression that selects tests by their markers.
    """
    partial = result.with_suffix(".partial")
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, f"--junitxml={partial}"]
    command += ["-k", tests.part, str(tests.path)]
    log = result.with_suffix(".log")
    with open(log, "w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, check=False)
    if done.returncode not in COMPLETE:
        raise SystemExit(f"error: pytest ended with {done.returncode} in {tests.name}; see {log}")
    partial.replace(result)


def format_table(results: Path) -> str:
    """Return a Markdown table of the results so far."""
    rows = []
    failed = []
    total = 0.0
    for file in sorted(results.glob("*.xml")):
        suite = next(ElementTree.parse(file).iter("testsuite"))
        count, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "errors", "skipped"))
        if count == 0:
            continue
        errors += int(suite.get("failures", 0))
        minutes = float(suite.get("time", 0)) / 60
        day = datetime.fromtimestamp(file.stat().st_mtime, UTC).date()
        passed = count - errors - skipped
        total += minutes
        name = file.stem.replace("--", "/")
        numbers = [str(number) for number in (day, passed, errors, skipped)]
        rows.append([name, *numbers, f"{minutes:.1f}"])
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}::{case.get('name')}")
    lines = ["| slice | date | passed | failed | skipped | minutes |", "|---|---|--:|--:|--:|--:|"]
    lines += [" | ".join(["", *row, ""]).strip() for row in rows]
    lines.append(f"{len(rows)} slices, {total:.0f} minutes")
    return "\n".join([*lines, "", *failed])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="folder of the results")
    parser.add_argument("--marker", default="full", help="which tests, by marker: %(default)s")
    parser.add_argument("--only", default="", help="only slices whose names contain this")
    parser.add_argument("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    slices = [] if arguments.table else list_slices()
    slices = [each for each in slices if arguments.only in each.name]
    for each in tqdm(slices, unit="slice", disable=arguments.table):
        result = arguments.results / f"{each.name.replace('/', '--')}.xml"
        if not result.exists():
            run_slice(each, result, arguments.marker)
    print(format_table(arguments.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
