"""The manifest of a corpus: its shards, their counts and digests, the tokenizer, and what failed.

Invariant: nothing in a manifest is executed, and no path in it leads out of its folder.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.base.durable import replace_file
from megatron.base.errors import DataError
from megatron.base.outside_file import INDEX_BYTES, load_json, open_regular
from megatron.base.plain_text import format_count, print_to_stderr
from megatron.data.indexed import get_bin_path, get_idx_path, is_manifest

VERSION = 1
_SUMS = ("documents", "tokens", "bad_documents")
_BLOCK_BYTES = 1 << 24
_AGAIN = "Copy the corpus again, or run the same command of preprocess_data.py again."


@dataclass(frozen=True)
class Shard:
    """An indexed data set with the documents of one input file."""

    path: str
    """Path of the data set without .bin and .idx, below the folder of the manifest."""
    input: str
    """The input file, without secrets of a URL."""
    documents: int
    tokens: int
    bytes: tuple[int, int]
    """Sizes of .bin and .idx."""
    sha256: tuple[str, str]
    """Digests of .bin and .idx."""
    text_bytes: int
    """Size of the texts in UTF-8."""
    bad_documents: int
    """Lines or rows of the input file that gave no document."""
    first_bad_documents: tuple[str, ...]
    """Number of the line and the reason, for the first of them."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Shard":
        """Return the shard that `asdict` described.

        Raises:
            TypeError: A key is missing or unknown.
            ValueError: A value is not possible.
        """
        lists = ("bytes", "sha256", "first_bad_documents")
        shard = cls(**{**record, **{name: tuple(record[name]) for name in lists}})
        counts = (shard.documents, shard.tokens, shard.text_bytes, shard.bad_documents)
        if not all(type(number) is int and number >= 0 for number in (*counts, *shard.bytes)):
            raise ValueError(
                f"shard {shard.path!r} has a count or size that is no integer from 0 on"
            )
        if len(shard.bytes) != 2 or len(shard.sha256) != 2:
            raise ValueError(f"shard {shard.path!r} must have two sizes and two digests")
        # This raises ValueError for half a surrogate pair.
        os.fsencode(shard.path)
        # A path from the root begins with an empty name. The system accepts no NUL.
        if "\0" in shard.path or not {"..", ""}.isdisjoint(shard.path.split("/")):
            raise ValueError(
                f"the path {shard.path!r} must be relative and without '..' and NUL, so that it "
                "stays below the folder of the manifest"
            )
        return shard


@dataclass(frozen=True)
class Corpus:
    """What a manifest describes."""

    path: Path
    """The manifest."""
    shards: tuple[Shard, ...]
    """In the order of the input files, in which the shards are concatenated."""
    failed: dict[str, str]
    """Input file -> why it has no shard."""

    @property
    def prefixes(self) -> list[str]:
        """The path of each shard, without .bin and .idx."""
        return [str(self.path.parent / shard.path) for shard in self.shards]

    def count(self, name: str) -> int:
        """Return the sum of a field over all shards, such as `documents`."""
        return sum(getattr(shard, name) for shard in self.shards)

    @property
    def gap(self) -> str | None:
        """A message if the documents of some input files are missing."""
        if not self.failed:
            return None
        return (
            f"{self.path} lacks the documents of {format_count(len(self.failed), 'input file')} "
            f"that failed when it was made, such as {next(iter(self.failed))}"
        )

    def write(self, made_with: dict[str, Any]) -> None:
        """Write the manifest atomically, with the tokenizer and what else made the shards.

        Raises:
            OSError: The file cannot be written.
        """
        content = {
            "version": VERSION,
            **{name: self.count(name) for name in _SUMS},
            **made_with,
            "failed_files": self.failed,
            "shards": [asdict(each) for each in self.shards],
        }
        replace_file(self.path, json.dumps(content, indent=1) + "\n")


def read_manifest(path: str | Path) -> Corpus:
    """Read a manifest, and compare the sizes of all files with it.

    Raises:
        DataError: It is missing or damaged, or a file of a shard has another size.
    """
    path = Path(path)
    try:
        corpus = _parse(path, load_json(path, INDEX_BYTES))
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path} cannot be read ({reason}). Correct the path.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no manifest of a corpus: {error}. {_AGAIN}") from error
    for shard, prefix in zip(corpus.shards, corpus.prefixes, strict=True):
        for file, size in zip(list_files(prefix), shard.bytes, strict=True):
            try:
                found = file.stat().st_size
            except OSError as error:
                raise DataError(f"{file} cannot be read ({error.strerror}). {_AGAIN}") from error
            if found != size:
                raise DataError(f"{file} has {found} bytes, and {path} records {size}. {_AGAIN}")
    return corpus


def _parse(path: Path, content: Any) -> Corpus:
    """Return what the JSON of a manifest describes.

    Raises:
        DataError: It has another version.
        ValueError, LookupError, TypeError, AttributeError: A value is not possible.
    """
    if content["version"] != VERSION:
        raise DataError(
            f"{path} is no manifest of a corpus that can be read: it has version "
            f"{content['version']!r}, and this program reads version {VERSION}. Use the "
            "program that made the corpus, or make it again."
        )
    shards = tuple(map(Shard.from_json, content["shards"]))
    corpus = Corpus(path, shards, dict(content["failed_files"]))
    if not corpus.shards:
        raise ValueError("it has no shard")
    for name in _SUMS:
        if content[name] != corpus.count(name):
            raise ValueError(
                f"it records {content[name]!r} {name}, and its shards have "
                f"{corpus.count(name)}, so a shard was removed, added or changed"
            )
    return corpus


def check_digests(corpus: Corpus, *, only_indices: bool = False) -> None:
    """Compare the SHA-256 of the files of all shards with the manifest.

    Args:
        corpus: The corpus.
        only_indices: Compare the .idx, and not the .bin, which are much larger.

    Raises:
        DataError: A file has changed.
    """
    for shard, prefix in zip(corpus.shards, corpus.prefixes, strict=True):
        pairs = list(zip(list_files(prefix), shard.sha256, strict=True))
        for file, digest in pairs[1:] if only_indices else pairs:
            found = compute_sha256(file)
            if found != digest:
                raise DataError(
                    f"{file} has the SHA-256 {found}, and {corpus.path} records {digest}. {_AGAIN}"
                )


def expand_manifests(prefixes: Sequence[str]) -> list[str]:
    """Return the paths of data sets with the shards in place of each manifest, in order.

    A warning reports input files whose documents are missing.

    Raises:
        DataError: A manifest or a shard is damaged. All bytes of the shards are read.
    """
    expanded = list[str]()
    for prefix in prefixes:
        if is_manifest(prefix):
            corpus = read_manifest(prefix)
            if corpus.gap:
                print_to_stderr(f"warning: {corpus.gap}")
            check_digests(corpus)
            expanded += corpus.prefixes
        else:
            expanded.append(prefix)
    return expanded


def list_files(prefix: str) -> tuple[Path, Path]:
    """Return the .bin and the .idx of a data set."""
    return get_bin_path(prefix), get_idx_path(prefix)


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        DataError: The file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). {_AGAIN}") from error
    return digest.hexdigest()
