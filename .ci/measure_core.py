"""Measure how large the core is: code lines by package, and what the loop and an engine import.

Run `python .ci/measure_core.py` from the repository's root. With `--check` it exits with 1 if a
limit is exceeded. Raising a limit needs a reason in the commit. A code line has code on it, so
comments, docstrings and empty lines do not count.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from measure_style import count_code_lines

LIMITS = {"the core": 25_132, "what the loop imports": 20_000, "what an engine imports": 10_500}
STARTS = {
    "what the loop imports": "megatron.run.loop",
    "what an engine imports": "megatron.engine.native",
}
OUTSIDE = ("extras", "console", "commands")
"""Packages that are not the core. The core imports none of them."""


def name_module(path: Path) -> str:
    """Return the dotted name of a file below the repository's root."""
    parts = path.with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def iterate_imports(tree: ast.AST) -> Iterator[str]:
    """Yield each dotted name that a file imports, at the top or in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_module(name: str, known: dict[str, int]) -> str | None:
    """Return the module of the package that a dotted name is in, or None for other packages."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def find_all_imported(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return a module and everything that it imports, directly or not."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += imports[module]
    return seen


def main() -> int:
    """Print the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 above a limit")
    arguments = parser.parse_args()
    files = {name_module(path): path for path in Path("megatron").rglob("*.py")}
    texts = {module: path.read_text(encoding="utf-8") for module, path in files.items()}
    lines = {module: count_code_lines(text) for module, text in texts.items()}
    imports: dict[str, set[str]] = {}
    for module, text in texts.items():
        found = (find_module(name, lines) for name in iterate_imports(ast.parse(text)))
        imports[module] = {name for name in found if name is not None}
    packages: Counter[str] = Counter()
    for module, count in lines.items():
        parts = module.split(".")[1:4]
        packages["/".join(parts if parts[:1] == ["extras"] else parts[:1])] += count
    for package, count in sorted(packages.items()):
        print(f"{package or '(top)':24}{count:8,}")
    core = sum(count for package, count in packages.items() if not package.startswith(OUTSIDE))
    sums = {"the core": core}
    for what, start in STARTS.items():
        sums[what] = sum(lines[module] for module in find_all_imported(start, imports))
    print(f"{'total':24}{sum(packages.values()):8,}")
    missed = False
    for what, limit in LIMITS.items():
        above = sums[what] > limit
        missed |= above
        print(f"{what:24}{sums[what]:8,}   at most {limit:,}   {'MISSED' if above else 'ok'}")
    return int(missed and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
