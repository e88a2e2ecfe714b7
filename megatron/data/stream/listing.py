"""The row groups of all files of a data set, and the cache that makes a second start fast.

Invariant: a listing is a function of the files. The cache is only used for files whose size and
modification time are those of its record.
"""

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm import tqdm

from megatron.data.stream.formats import FORMATS, FileGroups, Kind
from megatron.durable import replace_file_by
from megatron.errors import DataError

_THREADS = 16
_CACHE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file when it was listed. It must not change while it is in use."""

    name: str
    """Path below the folder of the data set."""
    size: int
    modified_ns: int


@dataclasses.dataclass(frozen=True)
class Listing:
    """The row groups of a data set, in the order of its files. Arrays have an element a group."""

    folder: str
    column: str
    format: str
    kind: Kind
    files: tuple[FileRecord, ...]
    file: NDArray[np.int64]
    """The file of the group, as a number in `files`."""
    begin: NDArray[np.int64]
    """See `FileGroups`, as for the arrays below."""
    end: NDArray[np.int64]
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def compute_fingerprint(self) -> str:
        """Return a digest of the names, sizes and row groups of all files."""
        digest = xxhash.xxh3_128()
        # Without the modification times, so that a copy of the data is the same data.
        facts = [self.kind, self.column, [(file.name, file.size) for file in self.files]]
        digest.update(json.dumps(facts).encode())
        for array in (self.file, self.begin, self.end, self.rows, self.tokens):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def get_path(self, file: int) -> str:
        """Return the path of a file.

        Raises:
            DataError: the file has changed since it was listed.
        """
        record = self.files[file]
        path = os.path.join(self.folder, record.name)
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read any more ({error.strerror}). Restore the file, and start "
                "again from the last checkpoint."
            ) from error
        if (status.st_size, status.st_mtime_ns) != (record.size, record.modified_ns):
            raise DataError(
                f"{path} has changed since the run started: it had {record.size} bytes and has "
                f"{status.st_size}. Its rows would not be those of the data order. Restore the "
                "file, and start again from the last checkpoint."
            )
        return path


def list_dataset(
    folder: str,
    format: str,
    column: str,
    cache_folder: str | None,
    say: Callable[[str], None] = lambda line: None,
) -> Listing:
    """Return the row groups of all files below a folder.

    Only files that are new or have changed since the last call are opened.

    Args:
        folder: The folder of the data set. Files may lie in folders below it.
        format: A name in `FORMATS`.
        column: The column with texts or token ids.
        cache_folder: Folder of the cache. None puts it next to the data.
        say: Receives lines for the user.

    Raises:
        DataError: there are no files or no rows, a file is damaged, or files hold different kinds
            of data.
    """
    records = _find_files(folder, FORMATS[format].suffixes)
    if not records:
        raise DataError(
            f"{folder} has no files with the ending {' or '.join(FORMATS[format].suffixes)}. "
            "Correct --data-path, --datasets or --dataset-format."
        )
    cache = _find_cache_path(folder, format, column, cache_folder)
    known = _read_cache(cache)
    # A record has size and time, so a file that has changed is not found.
    groups: list[FileGroups | None] = [known.get(record) for record in records]
    missing = [number for number, found in enumerate(groups) if found is None]

    def list_file(number: int) -> FileGroups:
        return FORMATS[format].list_groups(os.path.join(folder, records[number].name), column)

    if missing:
        # Opening a file on a network file system is mostly waiting.
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="listing") as pool:
            opened = pool.map(list_file, missing)
            # The bar appears only if it takes longer than a second.
            progress = tqdm(opened, f"listing {folder}", len(missing), unit="file", delay=1)
            for number, found in zip(missing, progress, strict=True):
                groups[number] = found
        complete = [found for found in groups if found is not None]
        _write_cache(cache, records, complete, say)
    listing = _join_files(folder, format, column, records, [g for g in groups if g is not None])
    if int(listing.rows.sum()) == 0:
        raise DataError(f"the {len(records)} files in {folder} have no rows. Use other data.")
    return listing


def _find_files(folder: str, suffixes: tuple[str, ...]) -> list[FileRecord]:
    """Return the files below a folder, sorted by name. Hidden files and folders are left out."""
    if not os.path.isdir(folder):
        raise DataError(
            f"{folder} is not a folder. Give the folder of the files with --data-path, and the "
            "names of folders in it with --datasets."
        )
    records = []
    for parent, folders, names in os.walk(folder):
        # os.walk reads this list again, so the cache below the folder is not entered.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            # Spark writes such files beside its data, and unfinished downloads have such names.
            if name.endswith(suffixes) and not name.startswith((".", "_")):
                path = os.path.join(parent, name)
                status = os.stat(path)
                relative = os.path.relpath(path, folder)
                records.append(FileRecord(relative, status.st_size, status.st_mtime_ns))
    # The order of a folder differs between file systems, and would change the data order.
    return sorted(records, key=lambda record: record.name)


def _join_files(
    folder: str,
    format: str,
    column: str,
    records: list[FileRecord],
    groups: list[FileGroups],
) -> Listing:
    """Return the listing of all files.

    Raises:
        DataError: files hold different kinds of data.
    """
    # An empty file has no kind.
    kinds = {
        found.kind: record.name
        for found, record in zip(groups, records, strict=True)
        if len(found.rows)
    }
    if len(kinds) > 1:
        raise DataError(
            f"column {column!r} of {folder} holds texts in {kinds['text']} and token ids in "
            f"{kinds['tokens']}. Put them into two folders, and name both with --datasets."
        )
    file = np.repeat(np.arange(len(groups)), [len(found.rows) for found in groups])
    return Listing(
        folder,
        column,
        format,
        next(iter(kinds), "text"),
        tuple(records),
        file.astype(np.int64),
        *(
            np.concatenate([getattr(found, name) for found in groups])
            for name in ("begin", "end", "rows", "tokens")
        ),
    )


def _find_cache_path(folder: str, format: str, column: str, cache_folder: str | None) -> Path:
    """Return the path of the cache of a listing."""
    key = xxhash.xxh3_64_hexdigest(json.dumps([os.path.abspath(folder), format, column]).encode())
    return Path(cache_folder or os.path.join(folder, ".index-cache")) / f"listing-{key}.npz"


def _read_cache(path: Path) -> dict[FileRecord, FileGroups]:
    """Return the row groups of files that were listed before. A damaged cache is not used."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            if facts["version"] != _CACHE_VERSION:
                return {}
            columns = arrays["groups"]
            bounds = np.cumsum([0, *facts["counts"]])
    # A cache is written again. numpy and zipfile raise many kinds of errors for a damaged file.
    except Exception:
        return {}
    return {
        FileRecord(*record): FileGroups(kind, *columns[:, begin:end])
        for record, kind, begin, end in zip(
            facts["files"], facts["kinds"], bounds[:-1], bounds[1:], strict=True
        )
    }


def _write_cache(
    path: Path,
    records: list[FileRecord],
    groups: list[FileGroups],
    say: Callable[[str], None],
) -> None:
    """Write the cache. A failure costs time at the next start, so it is only reported."""
    facts = {
        "version": _CACHE_VERSION,
        "files": [dataclasses.astuple(record) for record in records],
        "kinds": [found.kind for found in groups],
        "counts": [len(found.rows) for found in groups],
    }
    columns = np.concatenate(
        [np.stack([found.begin, found.end, found.rows, found.tokens]) for found in groups], axis=1
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts_as_bytes = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        # Several ranks may write it at the same time, each under a name of its own.
        own = path.with_name(f"{path.stem}-{socket.gethostname()}-{os.getpid()}.npz")
        replace_file_by(own, lambda file: np.savez(file, facts=facts_as_bytes, groups=columns))
        os.replace(own, path)
    except OSError as error:
        say(
            f"the list of row groups cannot be stored in {path.parent} ({error.strerror}), so the "
            "next start will open all files again. Name a folder that can be written with "
            "--data-cache-path."
        )
