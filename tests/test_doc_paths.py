"""The pages about the code name files and folders that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / "docs" / "architecture.md"
PAGES = (MAP, ROOT / "docs" / "tour.md", ROOT / "CONTRIBUTING.md", ROOT / "README.md")
LONGEST_TABLE = 30
"""Rows of "Where is ...". A longer table is not read, and packages have docstrings."""

_LINK = re.compile(r"\[`[^`\]]*`\]\(([^)\s]+)\)")
_FILE = re.compile(r"(?<![\w/.*<>-])[\w./*<>-]+\.py\b")
_FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")


def exists(name: str, page: Path) -> bool:
    """Return whether a page names a file or folder from its own, the root or the package."""
    # `<name>` is for the reader to replace, so any file fits.
    pattern = re.sub(r"<\w+>", "*", name)
    bases = (page.parent, ROOT, ROOT / "megatron")
    return any(list(base.glob(pattern)) for base in bases)


def read_section(title: str) -> str:
    return MAP.read_text().split(f"\n## {title}")[1].split("\n## ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_folders_exist(page: Path) -> None:
    # The text of a link to a file may be the last part of its path.
    text = _LINK.sub(lambda match: f"`{match[1]}`", page.read_text())
    names = {*_FILE.findall(text), *_FOLDER.findall(text)}
    assert len(names) > 10
    assert sorted(name for name in names if not exists(name, page)) == []


def test_table_of_places_is_short_and_has_one_place_each() -> None:
    rows = [line for line in read_section("Where is ...").splitlines() if "`" in line]
    assert 0 < len(rows) <= LONGEST_TABLE
    for row in rows:
        assert len(_FILE.findall(row)) == 1, row


def test_map_has_every_package() -> None:
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", read_section("Packages"), re.MULTILINE))
    package = ROOT / "megatron"
    folders = {
        str(path.parent.relative_to(package))
        for pattern in ("*/__init__.py", "extras/*/*/__init__.py")
        for path in package.glob(pattern)
    }
    assert listed == folders - {"extras"}


def test_docstrings_of_packages_name_modules_that_exist() -> None:
    """Their readers have no other list of the modules."""
    package = ROOT / "megatron"
    wrong = []
    named = 0
    for path in package.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        for name in re.findall(r"`([a-z][a-z0-9_]*)`", text):
            named += 1
            places = (path.parent / f"{name}.py", path.parent / name, package / name)
            if not any(place.exists() for place in places):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert named > 50
    assert wrong == []
