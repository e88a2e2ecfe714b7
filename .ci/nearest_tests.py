"""List the test files that are nearest to a change, for `bash tests/run.sh --changed`.

A test file that imports a changed module directly is near it. If no test file does, those that
import it through one other module are near it, and so on. Tests that start commands or ranks import
nothing that they test, so they are in the complete suite only. A change is what differs from the
main branch, committed or not.

    python .ci/nearest_tests.py                      # the files that have changed
    python .ci/nearest_tests.py megatron/model/mlp.py
"""

import argparse
import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path

from measure_core import find_module, iterate_imports, name_module

ALWAYS = ("tests/test_start_imports.py",)
"""A change of any module may import too much."""


def list_changed(base: str) -> list[Path]:
    """Return the Python files that differ from a branch, and those that git does not know yet."""
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
    return [Path(name) for name in names if name.endswith(".py") and Path(name).exists()]


def read_importers() -> dict[Path, set[Path]]:
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


def find_nearest(file: Path, importers: dict[Path, set[Path]]) -> set[Path]:
    """Return the test files with the shortest chain of imports to a file."""
    seen = {file}
    layer = {file}
    while layer:
        tests = {other for other in layer if is_test(other)}
        if tests:
            return tests
        layer = {other for near in layer for other in importers.get(near, ())} - seen
        seen |= layer
    return set()


def list_tests(changed: Iterable[Path]) -> list[Path]:
    """Return the test files to run after a change, without duplicates."""
    importers = read_importers()
    tests = {test for file in changed for test in find_nearest(file, importers)}
    return sorted(tests | {Path(name) for name in ALWAYS})


def main() -> None:
    """Print the test files, one in a line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="changed files (default: ask git)")
    parser.add_argument("--base", default="main", help="branch to compare with")
    arguments = parser.parse_args()
    changed = arguments.files or list_changed(arguments.base)
    print("\n".join(map(str, list_tests(changed))))


if __name__ == "__main__":
    main()
