"""Measure how large the core is: code lines by package, and what the loop and an engine import.

Run `python .ci/measure_core.py` from the repository's root. The limits are in `.ci/limits.toml`. A
code line has code on it, so comments, docstrings and empty lines do not count.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from measure_style import count_code_lines

STARTS = {"loop": "megatron.run.loop", "engine": "megatron.engine.native"}
"""What is measured with everything that it imports."""
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


def measure_packages() -> tuple[Counter[str], dict[str, int]]:
    """Return the code lines of each package, and those of all modules that a start imports."""
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
    imported = {
        what: sum(lines[module] for module in find_all_imported(start, imports))
        for what, start in STARTS.items()
    }
    return packages, imported


def sum_core(packages: Counter[str]) -> int:
    """Return the code lines of the core."""
    return sum(count for package, count in packages.items() if not package.startswith(OUTSIDE))


def main() -> None:
    """Print the table."""
    packages, imported = measure_packages()
    for package, count in sorted(packages.items()):
        print(f"{package or '(top)':32}{count:8,}")
    print(f"{'total':32}{sum(packages.values()):8,}")
    print(f"{'the core':32}{sum_core(packages):8,}")
    for what, count in imported.items():
        print(f"{f'what the {what} imports':32}{count:8,}")


if __name__ == "__main__":
    main()
