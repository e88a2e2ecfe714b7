"""The version of the code that runs, in a git checkout its commit, and digests of its files."""

import os
from functools import cache
from pathlib import Path

import xxhash

from megatron.base.outside_file import load_text

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]
"""The folder `megatron`. It has no __init__.py, so that Megatron-LM's `megatron.core` works beside
it, and that package may be in the same folder."""
_OTHERS = frozenset(["__pycache__", "core"])
_SOURCES = (".py", ".yaml", ".toml", ".cpp")
"""Endings of the files of the package that are compared. Others are built on each host."""


@cache
def get_code_version() -> str:
    """Return the version, such as `0.1.0`, or `0.1.0+g1a2b3c4d5e` in a git checkout."""
    # Git's files are read here. Running `git` would fork a process that has threads and open
    # devices, and such a fork can deadlock.
    commit = read_commit(PACKAGE.parent / ".git")
    if commit:
        return f"{VERSION}+g{commit[:10]}"
    return VERSION


def compute_file_digests(package: Path = PACKAGE) -> dict[str, str]:
    """Return the xxh3_64 of each source file of the package, by its path below `package`.

    A file that cannot be read has the error in place of its digest.
    """
    digests = {}
    prefix = len(os.path.join(package, ""))
    for folder, folders, names in os.walk(package):
        folders[:] = sorted(name for name in folders if name not in _OTHERS)
        for name in sorted(names):
            if name.endswith(_SOURCES):
                path = os.path.join(folder, name)
                digests[path[prefix:]] = _digest_of_file(path)
    return digests


def _digest_of_file(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return xxhash.xxh3_64_hexdigest(file.read())
    except OSError as error:
        return str(error.strerror)


def read_commit(git: Path) -> str | None:
    """Return the commit of HEAD, or None if `git` is not the git directory of a checkout."""
    try:
        # In an additional work tree, `.git` is a file with the path of the git directory.
        if git.is_file():
            git = (git.parent / load_text(git).removeprefix("gitdir:").strip()).resolve()
        head = load_text(git / "HEAD").strip()
        # A detached HEAD holds the commit itself.
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        # A work tree has its own HEAD, and most branches are in the common directory.
        common = git / "commondir"
        root = git
        if common.is_file():
            root = (git / load_text(common).strip()).resolve()
        for folder in (git, root):
            if (folder / name).is_file():
                return load_text(folder / name).strip()
        # `git gc` moves branches into one file. Its comments start with "#", and lines with "^"
        # belong to the tag above them.
        packed = (
            line.split()
            for line in load_text(root / "packed-refs").splitlines()
            if not line.startswith(("#", "^"))
        )
        return next((commit for commit, ref in packed if ref == name), None)
    except (OSError, ValueError):
        return None
