"""Which code runs: the version, and in a git checkout the commit."""

from functools import cache
from pathlib import Path

from megatron import __version__


@cache
def get_code_version() -> str:
    """`0.1.0`, or `0.1.0+g1a2b3c4d5e` in a checkout. Reads git's files: a process with threads and open devices must not fork."""
    commit = _read_commit(Path(__file__).resolve().parents[1] / ".git")
    return f"{__version__}+g{commit[:10]}" if commit else __version__


def _read_commit(git: Path) -> str | None:
    try:
        if git.is_file():  # a work tree beside the repository
            git = (git.parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        common = git / "commondir"
        root = (git / common.read_text().strip()).resolve() if common.is_file() else git
        for folder in (git, root):
            if (folder / name).is_file():
                return (folder / name).read_text().strip()
        packed = (
            line.split()
            for line in (root / "packed-refs").read_text().splitlines()
            if not line.startswith(("#", "^"))
        )
        return next((commit for commit, ref in packed if ref == name), None)
    except (OSError, ValueError):
        return None
