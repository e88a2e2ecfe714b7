"""Report words that this project does not use, in `*.py` and `*.md` files.

Run `python .ci/check_terms.py` from the repository's root. It prints each place and exits with 1 if
there is one. The reasons and the words to use instead are in docs/decisions/025-plain-english.md,
which is the only page that may hold the words.
"""

import re
import subprocess
import sys
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
    "whither": "where to",
    "thereof": "of it",
}
"""Word -> what to write instead."""

REPLACED = {
    "Ancestor": "LineageEntry",
    "Asked": "ConfigWithOrigin",
    "Chunk": "TensorShard",
    "Course": "Lineage",
    "Moment": "DropoutKey",
    "cut_dim": "shard_dim",
}
"""Class or attribute that was renamed -> its present name."""

FRAGMENT = re.compile(r'^\s*(?:r|f)?"""(?:Of|And|That|For|Which|In place of) ')
ALLOWED = {Path(".ci/check_terms.py"), Path("docs/decisions/025-plain-english.md")}


def list_files() -> list[Path]:
    """Return the Python and Markdown files that git tracks, data of tests left out."""
    command = ["git", "ls-files", "--", "*.py", "*.md"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    skipped = ("tests/fixtures/", "tests/golden/")
    return [Path(name) for name in names if not name.startswith(skipped)]


def find_places(path: Path) -> list[str]:
    """Return one line for each place in a file that breaks a rule."""
    words = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    replaced = re.compile(rf"\b({'|'.join(REPLACED)})\b")
    places = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for match in words.finditer(line):
            advice = WORDS[match[1].lower()]
            places.append(f"{path}:{number}: '{match[1]}' has no use here; write: {advice}")
        for match in replaced.finditer(line):
            places.append(f"{path}:{number}: '{match[1]}' was renamed to {REPLACED[match[1]]}")
        if path.suffix == ".py" and FRAGMENT.match(line):
            places.append(f"{path}:{number}: a docstring begins with a verb, not with a fragment")
    return places


def main() -> int:
    """Print every place and return the exit code."""
    files = [path for path in list_files() if path not in ALLOWED and path.exists()]
    places = [place for path in files for place in find_places(path)]
    print("\n".join(places) if places else f"{len(files)} files use no replaced word")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
