"""Report words that this project does not use, in its sources, scripts and pages.

Run `python .ci/check_terms.py` from the repository's root. It prints each place and exits with 1 if
there is one. The reasons and the words to use instead are in docs/decisions/025-plain-english.md.
Only this file and that page may contain the words.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    "aloud": "log a warning, print",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "mending": "fixing",
    "anew": "again",
    "afresh": "from scratch",
    "for ever": "permanently",
    "begun": "started",
    "whence": "where from",
    "whither": "where to",
    "thereof": "of it",
}
"""Word -> what to write instead."""

REPLACED = {
    "Ancestor": "LineageEntry",
    "Asked": "ConfigWithOrigin",
    "Chunk": "TensorShard",
    "Course": "Lineage",
    "Moment": "dropout_key",
    "cut_dim": "shard_dim",
}
"""Class or attribute that was renamed -> its present name."""

PATTERNS = ("*.py", "*.md", "*.sh", "*.slurm", "*.cpp", ".ci/run", "train/*/start-*")
SKIPPED_FOLDERS = ("tests/fixtures/", "tests/golden/")
ALLOWED = {Path(".ci/check_terms.py"), Path("docs/decisions/025-plain-english.md")}

_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
_REPLACED_NAME = re.compile(rf"\b(?:{'|'.join(REPLACED)})\b")
# A docstring that begins with one of these words continues the name of the function or the class.
_FRAGMENT = re.compile(
    r'^[ \t]*[rf]?"""(?:And|Because|But|For|In place of|Of|That|Which|Whose) ',
    re.MULTILINE,
)


def list_files() -> list[Path]:
    """Return the checked files that git tracks, without the data of the tests."""
    command = ["git", "ls-files", "--", *PATTERNS]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [Path(name) for name in names if not name.startswith(SKIPPED_FOLDERS)]
    # A file that was deleted but not yet committed is still listed.
    return [path for path in paths if path not in ALLOWED and path.exists()]


def find_places(path: Path) -> list[str]:
    """Return one line for each place in a file that breaks a rule, in the order of the file."""
    text = path.read_text()
    places = sorted(_find_matches(text, is_python=path.suffix == ".py"))
    return [f"{path}:{text.count(chr(10), 0, at) + 1}: {message}" for at, message in places]


def _find_matches(text: str, *, is_python: bool) -> Iterator[tuple[int, str]]:
    """Yield (position, message) of each match."""
    lowered = text.lower()
    # Plain search is five times as fast as the pattern, and almost no file has one of the words.
    if any(word in lowered for word in WORDS):
        for match in _WORD.finditer(text):
            advice = WORDS[match[0].lower()]
            yield match.start(), f"'{match[0]}' is not used in this project; write: {advice}"
    for match in _REPLACED_NAME.finditer(text):
        yield match.start(), f"'{match[0]}' was renamed to {REPLACED[match[0]]}"
    if is_python:
        for match in _FRAGMENT.finditer(text):
            yield match.start(), "begin a docstring with a verb or a noun, not with a fragment"


def main() -> int:
    """Print every place and return the exit code."""
    files = list_files()
    places = [place for path in files for place in find_places(path)]
    if places:
        print("\n".join(places))
        return 1
    print(f"{len(files)} files use no replaced word")
    return 0


if __name__ == "__main__":
    sys.exit(main())
