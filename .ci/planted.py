"""Plant errors of one line in the package, and see which tests find them.

    python .ci/planted.py check                      # each line stands once, and its error compiles
    python .ci/planted.py record -- tests/data ...   # run tests, and note which execute each line
    python .ci/planted.py run [--limit 12]           # plant each error, and run the cheapest tests
    python .ci/planted.py run --error NAME --tests tests/data/test_blend.py
    python .ci/planted.py table                      # what was found, by which test

The errors are in `tests/planted/errors.toml`. Everything runs in a copy of the working tree, which
has the error in its source. So each process has it, also one that starts with an environment of its
own, such as a rank, a Slurm job or a pool's worker. `record` puts a call before each line, which
notes the test that is running. `run` keeps its results in `tests/planted/results.csv` after each
error, and goes on where it stopped. `--error NAME` runs one error again, and `--tests` names tests
for it that cost more than the cheapest ones.

A test may move to the long suite if it is not the cheapest one that finds an error, and not the
only test of a flag, a format or a message.
"""

import argparse
import ast
import contextlib
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure_tests import find_file, read_record

ERRORS = Path("tests/planted/errors.toml")
HITS = Path("tests/planted/hits.csv")
RESULTS = Path("tests/planted/results.csv")
MOST_TESTS = 40
"""How many tests that execute a line are kept, the cheapest ones."""

MOST_SECONDS = 60
"""How long a test with an error may take."""

SHORTEST_SECONDS = 0.1
"""What a test counts that has no row of its own in the record of times."""

_MODULE = "megatron.base.planted_probe"
_PROBE = '''\
"""Notes which test executes a line. `.ci/planted.py` writes it into a copy of the package."""

import os
from pathlib import Path

HITS = Path({folder!r})
_seen = set()


def hit(name):
    """Note the test for an error's line. A process without a test notes "?"."""
    test = _find_test() or "?"
    if (name, test) not in _seen:
        _seen.add((name, test))
        with open(HITS / f"{{os.getpid()}}.txt", "a") as file:
            file.write(f"{{name}}\\t{{test}}\\n")


def _find_test():
    # A worker of a pool is older than the test, and its environment may name an earlier one. The
    # file of pytest's process names the current one.
    pid = os.getpid()
    while pid > 1:
        try:
            return (HITS / f"test-{{pid}}").read_text()
        except OSError:
            pass
        try:
            pid = int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return ""
    return ""
'''
_PLUGIN = """\
import os
from pathlib import Path


def pytest_runtest_logstart(nodeid, location):
    Path({folder!r}, f"test-{{os.getpid()}}").write_text(nodeid)
"""


@dataclass(frozen=True)
class PlantedError:
    """An error, and where its line stands."""

    name: str
    line: str
    by: str
    file: Path
    number: int


def read_errors() -> list[PlantedError]:
    """Return the errors.

    Raises:
        SystemExit: A line does not stand once in the package, or its error does not compile.
    """
    lines = defaultdict(list)
    for file in sorted(Path("megatron").rglob("*.py")):
        for number, text in enumerate(file.read_text().splitlines()):
            lines[text.strip()].append((file, number))
    errors = []
    for row in tomllib.loads(ERRORS.read_text())["error"]:
        places = lines[row["line"]]
        if len(places) != 1:
            raise SystemExit(
                f"{row['name']}: this line stands {len(places)} times in the package, and must "
                f"stand once: {row['line']}"
            )
        error = PlantedError(**row, file=places[0][0], number=places[0][1])
        compile(plant(error, Path()), str(error.file), "exec")
        errors.append(error)
    return errors


def plant(error: PlantedError, root: Path) -> str:
    """Return the text of the file below `root` with an error."""
    lines = (root / error.file).read_text().splitlines(keepends=True)
    lines[error.number] = lines[error.number].replace(error.line, error.by)
    return "".join(lines)


@contextlib.contextmanager
def copy_tree() -> Iterator[Path]:
    """Give a copy of the files that git knows, and of the built extensions."""
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder, "copy")
        built = (str(path) for path in Path("megatron").rglob("*.so"))
        for name in [*listed.stdout.splitlines(), *built]:
            if Path(name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, root / name)
        # Some tests ask git for the files of the project.
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)
        subprocess.run(["git", "add", "-A"], cwd=root, check=True)
        yield root


def run_pytest(root: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy. Return the exit code and the output."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not full", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def record(tests: Sequence[str]) -> None:
    """Run tests with a probe before each line, and add what they execute to the file of hits."""
    errors = read_errors()
    with copy_tree() as root:
        folder = root / ".hits"
        folder.mkdir()
        probes = defaultdict(list)
        for error in errors:
            probes[error.file].append(error)
        for file, own in probes.items():
            (root / file).write_text(add_probes((root / file).read_text(), own))
        # Whoever finds the package finds the probe.
        probe = root / _MODULE.replace(".", "/")
        probe.with_suffix(".py").write_text(_PROBE.format(folder=str(folder)))
        (root / "note_test.py").write_text(_PLUGIN.format(folder=str(folder)))
        _, output = run_pytest(root, ["-p", "note_test", *tests])
        print(output[-2000:])
        found = {tuple(row) for row in _read_rows(HITS)}
        for file in folder.glob("*.txt"):
            for text in file.read_text().splitlines():
                name, _, test = text.partition("\t")
                found.add((name, test))
    times = read_record()
    kept = defaultdict(list)
    for name, test in sorted(found, key=lambda row: times.get(row[1], SHORTEST_SECONDS)):
        kept[name].append(test)
    _write_rows(HITS, sorted((name, test) for name in kept for test in kept[name][:MOST_TESTS]))


def add_probes(text: str, errors: Sequence[PlantedError]) -> str:
    """Return the text of a file with a call before the statement of each error's line."""
    starts = sorted(node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    lines = text.splitlines(keepends=True)
    for error in errors:
        # The statement may begin before the line. Lines of `ast` count from one.
        first = max(start for start in starts if start <= error.number + 1) - 1
        indent = lines[first][: -len(lines[first].lstrip())]
        call = f"__import__({_MODULE!r}, fromlist=['hit']).hit({error.name!r})"
        word, _, rest = lines[first].strip().partition(" ")
        if word in ("elif", "while"):
            # No statement can stand before these. `hit` returns None.
            lines[first] = f"{indent}{word} {call} or {rest}\n"
        else:
            lines[first] = f"{indent}{call}\n{lines[first]}"
    return "".join(lines)


def run(limit: int, only: str | None, tests: Sequence[str]) -> None:
    """Plant each error and run its cheapest tests, until one fails.

    Args:
        limit: The number of tests for an error.
        only: The name of the only error to plant, also if it has a result.
        tests: The tests to run instead. Nothing is recorded if they do not find the error.
    """
    times = read_record()
    hits = defaultdict(set)
    for name, test in _read_rows(HITS):
        if test != "?":
            hits[name].add(test)
    results = {row[0]: row for row in _read_rows(RESULTS)}
    for error in read_errors():
        if error.name != only and (only or error.name in results):
            continue
        cost = {test: times.get(test, SHORTEST_SECONDS) for test in hits[error.name]}
        ordered = sorted(cost, key=lambda test: (cost[test], test))
        begin = time.perf_counter()
        found = "no test executes the line"
        if tests:
            found = _find(error, tests) or ""
            if not found:
                raise SystemExit(f"{error.name}: these tests pass")
        elif ordered:
            found = _find(error, ordered[:limit]) or f"not found by {len(ordered[:limit])} tests"
        seconds = time.perf_counter() - begin
        results[error.name] = [error.name, str(len(ordered)), found, f"{seconds:.0f}"]
        print(*results[error.name], sep=", ", flush=True)
        _write_rows(RESULTS, sorted(results.values()))


def _find(error: PlantedError, tests: Sequence[str]) -> str | None:
    """Return the test that finds an error, or None."""
    with copy_tree() as root:
        (root / error.file).write_text(plant(error, root))
        # An error may make a loop endless. Then the test that ends it has found it.
        code, output = run_pytest(root, ["-x", "--tb=no", f"--timeout={MOST_SECONDS}", *tests])
        for line in output.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split(" - ")[0].split(" ", 1)[1]
        if code == 4:
            raise SystemExit(f"a test is gone; run `record` again: {output[-300:]}")
        if code:
            # A file could not be collected, so the error does not stay hidden.
            return f"pytest ends with {code}"
    return None


def print_table() -> None:
    """Print what was found, and which test files find something that no cheaper one does."""
    errors = {error.name: error for error in read_errors()}
    finders = defaultdict(list)
    for name, executed, found, _ in _read_rows(RESULTS):
        print(f"{name:36}{errors[name].file!s:60}{executed:>5}  {found}")
        if "::" in found:
            finders[find_file(found)].append(name)
    for file, names in sorted(finders.items()):
        print(f"{file}: {', '.join(names)}")


def _read_rows(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.reader(file))


def _write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description="Plant errors, and see which tests find them.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="check the list of errors")
    recorder = commands.add_parser("record", help="note which tests execute the lines")
    recorder.add_argument("tests", nargs="+", help="arguments of pytest")
    runner = commands.add_parser("run", help="plant each error, and run its cheapest tests")
    runner.add_argument("--limit", type=int, default=12, help="tests for an error (default: 12)")
    runner.add_argument("--error", metavar="NAME", help="run only this error, also again")
    runner.add_argument("--tests", nargs="+", default=[], help="tests to run for this error")
    commands.add_parser("table", help="print the results")
    arguments = parser.parse_args()
    if arguments.command == "check":
        print(f"{len(read_errors())} errors, each line stands once")
    elif arguments.command == "record":
        record(arguments.tests)
    elif arguments.command == "run":
        if arguments.tests and not arguments.error:
            parser.error("--tests needs --error")
        run(arguments.limit, arguments.error, arguments.tests)
    else:
        print_table()


if __name__ == "__main__":
    main()
