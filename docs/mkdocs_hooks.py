"""Hooks of the documentation site. mkdocs calls them by their names.

Pages under docs/ link to files outside it, such as `../megatron/plan/plan.py`. These links work
where the repository is browsed. The site has no such files. A link then leads to the repository if
`repo_url` is set, and becomes its text otherwise. A link to a file that does not exist is an error.

The reference pages and the list of decisions exist only on the site. They are made from the files
that exist, so a new module or decision needs no change here.

Two comments in a page stand for text that only the site shows. Each has a line of its own:

    <!-- output of: python tools/flags.py -->      the Markdown that this command prints
    <!-- table: tables/planner_times.csv -->       the rows of this file below docs/
"""

import ast
import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

REFERENCE = (
    "config",
    "schedule",
    "parallel",
    "data",
    "tokenizer",
    "model",
    "plan",
    "engine",
    "checkpoint",
    "observe",
    "run",
    "extras/preparation/preprocess",
    "extras/operations",
)
"""Packages that have a reference page. It begins with the docstring of the package."""

_GENERATED = re.compile(r"^<!-- (?P<kind>output of|table): (?P<source>.+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the reference pages and the list of decisions.

    Args:
        files: All pages. The new ones are appended.
        config: The site's configuration.
    """
    repository = Path(config["docs_dir"]).resolve().parent
    for package in REFERENCE:
        folder = repository / "megatron" / package
        # Without it, the page of a package that has moved would be empty.
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        names = [
            ".".join(path.relative_to(repository).with_suffix("").parts)
            for path in sorted(folder.rglob("*.py"))
            if path.name != "__init__.py"
        ]
        title = package.replace("/", ".")
        lines = [f"# megatron.{title}", str(docstring), *(f"::: {name}" for name in names)]
        name = f"reference/{package.rpartition('/')[2]}.md"
        files.append(File.generated(config, name, content="\n\n".join(lines) + "\n"))
    decisions = sorted((repository / "docs" / "decisions").glob("[0-9]*.md"))
    rows = [_make_row(path) for path in decisions]
    header = [
        "# Decisions",
        "",
        "Each page has a context, a decision and its cost.",
        "",
        "| | |",
        "|---|---|",
    ]
    content = "\n".join([*header, *rows, ""])
    files.append(File.generated(config, "decisions/index.md", content=content))
    return files


def _make_row(path: Path) -> str:
    """Return the row of a decision, whose first line is `# 007 Title`."""
    number, title = path.read_text().splitlines()[0].removeprefix("# ").split(maxsplit=1)
    return f"| [{number}]({path.name}) | {title} |"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fill in the generated parts of a page, and replace its links that lead out of docs/.

    Args:
        markdown: The text of the page.
        page: The page.
        config: The site's configuration. With `repo_url` the links lead to the repository.
        files: All pages, which this hook does not need.

    Raises:
        FileNotFoundError: A link or a table names a file that does not exist.
        CalledProcessError: A command of the page failed.
    """
    docs = Path(config["docs_dir"]).resolve()
    repository = docs.parent
    folder = (docs / page.file.src_uri).parent
    markdown = _GENERATED.sub(
        lambda match: _generate(match["kind"], match["source"], docs), markdown
    )

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return match[0]
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve()
        if path.is_relative_to(docs) and path.suffix != ".py":
            return match[0]
        if not path.is_relative_to(repository) or not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
        if not config.get("repo_url"):
            return match["text"]
        suffix = f"#{anchor}" if anchor else ""
        url = f"{config['repo_url'].rstrip('/')}/blob/main/{path.relative_to(repository)}{suffix}"
        return f"[{match['text']}]({url})"

    return _LINK.sub(replace, markdown)


def _generate(kind: str, source: str, docs: Path) -> str:
    """Return the Markdown that a comment of a page stands for."""
    if kind == "table":
        with open(docs / source, newline="") as file:
            header, *rows = csv.reader(file)
        return "\n".join(_join_cells(cells) for cells in (header, ["---"] * len(header), *rows))
    # A process of its own, because the hooks must not depend on what mkdocs has imported.
    command = [sys.executable, *shlex.split(source.removeprefix("python "))]
    return subprocess.run(
        command, cwd=docs.parent, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _join_cells(cells: list[str]) -> str:
    """Return a row of a Markdown table."""
    # A bare `|` would start a new column.
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
