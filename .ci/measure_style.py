"""Measure how the package is written: lines, names, comments, docstrings and README sentences.

Run `python .ci/measure_style.py` from the repository's root. It prints one table. With `--check` it
exits with 1 if a figure misses its target. The targets, and the figures before and after the first
rewrite, are in docs/decisions/025-plain-english.md.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = ("megatron", "tools", "pretrain_gpt.py")
MAX_COLUMNS = 100
PLACES = ("long", "conditional", "nested", "packed", "name", "docstring", "class")

# Words that begin a function's name and are verbs in this package. A name that begins with one of
# the prefixes `is_`, `has_` and so on asks a yes-or-no question and counts as well.
_VERBS = """
    accept accumulate acquire add adopt advance agree align allocate allow analyse answer append
    apply arrange ask assert assign average avoid await backward balance begin bind blend block
    broadcast build bump cache calculate call cancel cap cast catch change check choose claim
    clamp clean clear clip clone close collapse collect combine compare compile complete compute
    concatenate configure confirm connect consume contain continue convert copy count cover create
    cut deal decide declare decode decompress decrease delete deliver derive describe detach detect
    determine die digest disable discard dispatch distribute divide download draw drop dump emit
    enable encode end enforce enqueue ensure enter enumerate erase escape estimate evaluate examine
    exclude execute exit expand expect explain export extend extract fail fall feed fetch fill
    filter find finish fit fix flatten flush fold follow forecast forget fork format forward free
    freeze gather generate get give go group guard guess halt handle hash have head hide hold host
    identify ignore import include increase indent index infer inform initialise initialize insert
    inspect install interleave interpret intersect invert issue iterate join jump keep kill label
    launch lay learn leave let limit link list listen load lock log look lower main make map mark
    mask match measure merge migrate mirror mix move multiply name need normalise normalize note
    notify number obey observe offer open order pack pad parse partition pass paste pause permute
    pick pin place plan plot point poll pop post predict prefetch prepare pretrain prevent print
    probe process produce propose prove prune publish pull push put query queue raise rank read
    rebuild receive recommend recompute record recover reduce refresh refuse register reject
    release reload remember remove rename render repair repeat replace reply report request
    require reschedule reserve reset reshape resolve restore restrict resume retry return reverse
    rewrite roll rotate round run sample save say scale scan scatter schedule score search seed
    select send serve set settle setup shard share shift show shrink shuffle shut sign simulate
    skip sleep slice smooth snapshot sort span spawn split spread squeeze stack start state step
    stop store stream strip submit subtract suggest sum summarise summarize suspend swap sync
    synchronise synchronize tag take tell test throttle tie time tokenize touch trace track train
    transform translate transpose traverse trim truncate try tune turn unfold unlink unlock unpack
    unshard update upload use validate verify view visit wait walk warm warn watch weigh wrap write
    yield zero commit requeue eval attend alert finalize restart preprocess shorten attempt locate
    unmark protect iterate
"""
VERBS = frozenset(_VERBS.split())
_QUESTIONS = "is are has have can may must should was were does needs wants"
QUESTIONS = frozenset(_QUESTIONS.split())


@dataclass(frozen=True)
class Figure:
    """One measured figure and the target that it must reach."""

    name: str
    value: float
    target: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """Whether the value reaches the target."""
        if self.at_least:
            return self.value >= self.target
        return self.value <= self.target


def list_python_files(root: Path) -> list[Path]:
    """Return the package's Python files in a fixed order."""
    files: list[Path] = []
    for name in PACKAGE:
        path = root / name
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return files


def count_code_lines(text: str) -> int:
    """Count the lines that hold code: no blank line, no comment alone, no docstring."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    ignored |= {tokenize.ENCODING, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            # A string over several lines is one token, and all of its lines hold code.
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count_comments(text: str) -> int:
    """Count the comment lines, directives for tools left out."""
    directives = ("# type:", "# noqa", "#!", "# shellcheck", "# fmt:")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum(not comment.startswith(directives) for comment in comments)


def is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment packs unrelated values: `a, b = x, y`."""
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def iterate_functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Yield each function and method, and whether it is a property."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list}
            is_property = any(name.endswith(("property", ".setter")) for name in names)
            yield node, is_property  # type: ignore[misc]


def begins_with_verb(name: str) -> bool:
    """Return whether a function's name begins with a verb or asks a question."""
    first = name.lstrip("_").split("_")[0]
    return first in VERBS or first in QUESTIONS


def is_counted_name(function: ast.FunctionDef, is_property: bool) -> bool:
    """Return whether a name counts. Python names dunders, and properties are nouns."""
    if is_property:
        return False
    return not (function.name.startswith("__") and function.name.endswith("__"))


def find_public_without_docstring(tree: ast.Module) -> list[str]:
    """Return the public functions, methods and classes without a docstring."""
    missing: list[str] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return missing


def read_sentences(markdown: str) -> list[str]:
    """Return the sentences of a page, without its code blocks, tables and headings."""
    # Code is no prose, and a link counts by its text.
    text = re.sub(r"```.*?```", "\n\n", markdown, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    kept = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("|", "#")):
            kept.append("")
            continue
        item = re.sub(r"^([-*]|\d+\.)\s+", "", stripped)
        if item != stripped:
            kept.append("")
        kept.append(item)
    sentences: list[str] = []
    for paragraph in "\n".join(kept).split("\n\n"):
        joined = " ".join(paragraph.split())
        parts = re.split(r"(?<=[.!?])[*_)]*\s+(?=[A-Z*_(\[\"0-9-])", joined)
        sentences += [part for part in parts if re.search(r"[a-z]", part)]
    return sentences


@dataclass
class PackageCounts:
    """What is counted in the package's files, and the places of what should be rare."""

    code: int = 0
    comments: int = 0
    functions: int = 0
    verbs: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=lambda: {key: [] for key in PLACES})

    def add_file(self, name: str, text: str) -> None:
        """Count the content of one file."""
        tree = ast.parse(text)
        self.code += count_code_lines(text)
        self.comments += count_comments(text)
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                self.places["long"].append(f"{name}:{number}")
        for node in ast.walk(tree):
            self._add_node(name, node)
        for function, is_property in iterate_functions(tree):
            if is_counted_name(function, is_property):
                self._add_function(name, function)
        for public in find_public_without_docstring(tree):
            self.places["docstring"].append(f"{name} {public}")

    def finish(self) -> None:
        """List the class names that are used twice, which needs all files."""
        self.places["class"] = sorted(name for name, count in self.classes.items() if count > 1)

    def _add_node(self, name: str, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] += 1
        elif isinstance(node, ast.IfExp):
            self.places["conditional"].append(f"{name}:{node.lineno}")
            if contains_conditional(node):
                self.places["nested"].append(f"{name}:{node.lineno}")
        elif isinstance(node, ast.Assign) and is_packed(node):
            self.places["packed"].append(f"{name}:{node.lineno}")

    def _add_function(self, name: str, function: ast.FunctionDef) -> None:
        self.functions += 1
        if begins_with_verb(function.name):
            self.verbs += 1
        else:
            self.places["name"].append(f"{name}:{function.lineno} {function.name}")


def contains_conditional(node: ast.IfExp) -> bool:
    """Return whether a conditional expression has another one inside."""
    return any(isinstance(child, ast.IfExp) for child in ast.walk(node) if child is not node)


def count_package(root: Path) -> PackageCounts:
    """Count the content of all files of the package."""
    counts = PackageCounts()
    for path in list_python_files(root):
        counts.add_file(str(path.relative_to(root)), path.read_text())
    counts.finish()
    return counts


def measure_package(counts: PackageCounts) -> list[Figure]:
    """Return the figures of the package, with their targets."""
    places = counts.places
    conditionals = 1000 * len(places["conditional"]) / counts.code
    packed = 1000 * len(places["packed"]) / counts.code
    verbs = 100 * counts.verbs / counts.functions
    comments = 100 * counts.comments / counts.code
    return [
        Figure("code lines", counts.code, 0, True),
        Figure("lines longer than 100 columns", len(places["long"]), 0, False),
        Figure("conditional expressions per 1,000 code lines", conditionals, 10, False),
        Figure("nested conditional expressions", len(places["nested"]), 0, False),
        Figure("packed assignments per 1,000 code lines", packed, 2, False),
        Figure("function names that begin with a verb, %", verbs, 75, True),
        Figure("comments per 100 code lines", comments, 6, True),
        Figure("public names without a docstring", len(places["docstring"]), 0, False),
        Figure("class names used twice", len(places["class"]), 0, False),
    ]


def measure_readme(markdown: str) -> list[Figure]:
    """Return the figures of the README, with their targets."""
    sentences = read_sentences(markdown)
    count = max(1, len(sentences))
    words = sum(len(sentence.split()) for sentence in sentences)
    # A mark inside of a word, as in `a:b`, is part of a name.
    marks = sum(len(re.findall(r"[;:](?:\s|$)", sentence)) for sentence in sentences)
    return [
        Figure("README: words with its commands", len(markdown.split()), 1300, False),
        Figure("README: words a sentence", words / count, 18, False),
        Figure("README: semicolons and colons a sentence", marks / count, 0.6, False),
    ]


def main() -> int:
    """Print the table and return the exit code, which is 1 if --check finds a missed target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--list", choices=PLACES, help="print the places of one figure")
    arguments = parser.parse_args()
    root = Path.cwd()
    counts = count_package(root)
    if arguments.list:
        print("\n".join(counts.places[arguments.list]))
        return 0
    figures = [*measure_package(counts), *measure_readme((root / "README.md").read_text())]
    for figure in figures:
        relation = "at least" if figure.at_least else "at most"
        verdict = "ok" if figure.holds else "MISSED"
        # One decimal would show 5.99 as the target 6.0, although it misses it.
        rounded = f"{figure.value:.1f}"
        if float(rounded) == figure.target != figure.value:
            rounded = f"{figure.value:.2f}"
        print(f"{figure.name:48} {rounded:>9}   {relation} {figure.target:g}   {verdict}")
    missed = [figure for figure in figures if not figure.holds]
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
