"""Build a corpus of real text from the sources and documentation of Python's standard library.

Every machine with Python has this text. The output has JSON lines with the keys `text` and
`source`. There is one document for each source file, and one for each topic of the language
reference that `pydoc` contains.

Invariant: the same Python gives the same file, and no text is in it twice. A hash mixes the order
of the documents, so any part of the file is a fair sample of all.
"""

import ast
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

# Installed packages are not part of the standard library. Test suites and codec tables are mostly
# data, not text.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
    "node_modules",
}
_SUFFIXES = {".py", ".rst", ".txt"}


@dataclass(frozen=True)
class BuildCorpus:
    """Write the standard library's sources and docs as JSON lines."""

    output: Path
    """The .jsonl file to write."""
    max_megabytes: float = 20.0
    """Stop after this much text."""


def iterate_documents(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of each file below `library` and of each documentation topic."""
    for folder, names, files in os.walk(library):
        # Assigning to the slice makes os.walk skip folders. Sorting makes the order the same on all
        # machines.
        names[:] = sorted(name for name in names if name not in _SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix not in _SUFFIXES:
                continue
            source = path.relative_to(library).as_posix()
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                # A few old sources declare another encoding.
                continue
            if source == "pydoc_data/topics.py":
                yield from iterate_topics(source, text)
            else:
                yield source, text


def iterate_topics(source: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the topics of the language reference, which are stored as one dictionary of texts."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, topic in ast.literal_eval(node.value).items():
                yield f"{source}#{name}", topic


def build(options: BuildCorpus) -> tuple[int, int]:
    """Write the corpus and return (documents, characters)."""
    unique = {
        hashlib.sha256(text.encode()).hexdigest(): (source, text)
        for source, text in iterate_documents(_find_library())
        if text.strip()
    }
    # The file gets its name when it is complete. The quickstart keeps a corpus that exists, so a
    # partial one would stay.
    temporary = options.output.with_name(options.output.name + ".unfinished")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    characters = 0
    with temporary.open("w", encoding="utf-8") as file:
        for _, (source, text) in sorted(unique.items()):
            if characters + len(text) > options.max_megabytes * 1e6:
                break
            file.write(json.dumps({"source": source, "text": text}, ensure_ascii=False) + "\n")
            count += 1
            characters += len(text)
    temporary.rename(options.output)
    return count, characters


def _find_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def main(argv: list[str] | None = None) -> int:
    """Write the corpus and return the exit code."""
    options = tyro.cli(BuildCorpus, args=argv)
    count, characters = build(options)
    print(
        f"{count} documents, {characters / 1e6:.1f} million characters of {_find_library()} in "
        f"{options.output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
