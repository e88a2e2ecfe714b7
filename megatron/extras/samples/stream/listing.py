"""The row groups of all files of a data set, and the cache that makes a second start fast.

Invariant: a listing is a function of the files. The cache is only used for files whose size and
modification time are those of its record.
"""

import dataclasses
import json
import os
import socket
import stat
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm import tqdm

from megatron.base.durable import replace_file_by
from megatron.base.errors import DataError
from megatron.base.outside_file import INDEX_BYTES, open_regular
from megatron.base.plain_text import is_url, print_to_stderr, redact
from megatron.data.content import FileSet
from megatron.extras.samples.stream.formats import FORMATS, FileGroups, Kind
from megatron.extras.samples.stream.remote import (
    BlockCache,
    FileStatus,
    RemoteDataFile,
    RemoteFolder,
)
from megatron.extras.samples.stream.table_files import FilePath

_THREADS = 16
_CACHE_VERSION = 2
_SAMPLES = 8
_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class ListedFile:
    """What was found in a file when it was opened for the list."""

    groups: FileGroups
    sampled: str
    """See `_sample_file`."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The row groups of a data set, in the order of its files. Arrays have an element a group."""

    folder: str
    column: str
    format: str
    kind: Kind
    files: tuple[FileStatus, ...]
    file: NDArray[np.int64]
    """The file of the group, as a number in `files`."""
    begin: NDArray[np.int64]
    """See `FileGroups`, as for the arrays below."""
    end: NDArray[np.int64]
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    sampled: tuple[str, ...] = ()
    """A digest of each file, see `_sample_file`."""
    remote: RemoteFolder | None = None
    """Where the files are, if the folder is a URL."""
    cache_folder: Path | None = None
    """Folder of everything that is derived from the files."""

    def compute_fingerprint(self) -> str:
        """Return a digest of the names, sizes and row groups of all files."""
        digest = xxhash.xxh3_128()
        # Without the modification times, so that a copy of the data is the same data.
        facts = [self.kind, self.column, [(file.name, file.size) for file in self.files]]
        digest.update(json.dumps(facts).encode())
        for array in (self.file, self.begin, self.end, self.rows, self.tokens):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def compute_sampled_digest(self) -> str:
        """Return a digest of sampled contents of all files.

        It begins with what was sampled. Digests of another kind cannot be compared.
        """
        kind = "bytes" if self.remote is None else "etag"
        return f"{kind}-{xxhash.xxh3_128_hexdigest(json.dumps(self.sampled).encode())}"

    def find_last_change(self) -> int:
        """Return the time of the last change of any file in ns. 0 if the files are remote."""
        if self.remote is not None:
            return 0
        return max(record.version for record in self.files)

    def list_changed_since(self, time_ns: int) -> list[str]:
        """Return the local files that were changed after a time."""
        if self.remote is not None:
            return []
        return [
            _get_local_path(self.folder, record)
            for record in self.files
            if record.version > time_ns
        ]

    def get_file_set(self) -> FileSet | None:
        """Return the files for a digest of all bytes, or None if they are remote."""
        if self.remote is not None or self.cache_folder is None:
            return None
        return FileSet(
            f"{self.compute_fingerprint()}-{self.compute_sampled_digest()}",
            self.folder,
            tuple(Path(_get_local_path(self.folder, record)) for record in self.files),
            self.cache_folder,
        )

    def get_path(self, file: int) -> FilePath:
        """Return a file that can be read.

        Raises:
            DataError: the file has changed since it was listed.
        """
        record = self.files[file]
        if self.remote is not None:
            return self._open_remote(self.remote, record)
        path = _get_local_path(self.folder, record)
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read any more ({error.strerror}). Restore the file, and start "
                "again from the last checkpoint."
            ) from error
        if (status.st_size, status.st_mtime_ns) != (record.size, record.version):
            raise _make_changed_error(path, record, status.st_size)
        return path

    def _open_remote(self, remote: RemoteFolder, record: FileStatus) -> RemoteDataFile:
        """Return a remote file that has not changed."""
        listed = RemoteDataFile(remote, record)
        now = remote.describe(record.name)
        if now != record:
            raise _make_changed_error(listed, record, now.size)
        return listed


@dataclasses.dataclass(frozen=True)
class FoundFiles:
    """The files of a data set, sorted by name. They have not been opened."""

    folder: str
    remote: RemoteFolder | None
    records: list[FileStatus]

    def get_path(self, record: FileStatus) -> FilePath:
        """Return a file that can be read."""
        if self.remote is not None:
            return RemoteDataFile(self.remote, record)
        return _get_local_path(self.folder, record)


def find_files(
    folder: str, format: str, cache_folder: str | None = None, cache_gb: int = 0
) -> FoundFiles:
    """Return the files of a data set. See `list_dataset` for the arguments.

    Raises:
        DataError: there are no files, or a folder or file cannot be read.
    """
    folder = folder.removeprefix("file://")
    suffixes = FORMATS[format].suffixes
    remote = None
    # Local files are not copied into the cache of remote data.
    if is_url(folder):
        remote = _open_remote_folder(folder, cache_folder, cache_gb)
        records = remote.list_files(suffixes)
    else:
        records = _find_local_files(folder, suffixes)
    if not records:
        raise DataError(
            f"{redact(folder)} has no files with the ending {' or '.join(suffixes)}. Correct "
            "--data-path, --datasets or --dataset-format."
        )
    # The order of the files decides the order of the samples.
    records.sort(key=lambda record: record.name)
    return FoundFiles(folder, remote, records)


def list_dataset(
    folder: str,
    format: str,
    column: str,
    cache_folder: str | None,
    log: Callable[[str], None] = lambda line: None,
    cache_gb: int = 0,
) -> Listing:
    """Return the row groups of all files below a folder, or of one file.

    Only files that are new or have changed since the last call are opened.

    Args:
        folder: The folder of the data set, or a URL. Files may lie in folders below it. One file
            is a data set, too.
        format: A name in `FORMATS`.
        column: The column with texts or token ids.
        cache_folder: Folder of the cache. None puts it next to the data. URLs need one.
        log: Receives lines for the user.
        cache_gb: Gigabytes of remote data that are kept in the folder of the cache.

    Raises:
        DataError: there are no files or no rows, a file is damaged, or files hold different kinds
            of data.
    """
    found_files = find_files(folder, format, cache_folder, cache_gb)
    folder, remote, records = found_files.folder, found_files.remote, found_files.records
    cache = _find_cache_path(folder, format, column, cache_folder)
    known = _read_cache(cache)
    # A record has size and time, so a file that has changed is not found.
    groups: list[ListedFile | None] = [known.get(record) for record in records]
    missing = [number for number, found in enumerate(groups) if found is None]

    def list_file(number: int) -> ListedFile:
        path = found_files.get_path(records[number])
        groups = FORMATS[format].list_groups(path, column)
        return ListedFile(groups, _sample_file(path, records[number]))

    if missing:
        # Opening a file on a network file system is mostly waiting.
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="listing") as pool:
            opened = pool.map(list_file, missing)
            # The bar appears only if it takes longer than a second.
            progress = tqdm(opened, f"listing {redact(folder)}", len(missing), unit="file", delay=1)
            for number, found in zip(missing, progress, strict=True):
                groups[number] = found
        _write_cache(cache, records, [found for found in groups if found is not None], log)
    complete = [found for found in groups if found is not None]
    listing = _join_files(folder, format, column, records, [found.groups for found in complete])
    if int(listing.rows.sum()) == 0:
        raise DataError(
            f"the {len(records)} files in {redact(folder)} have no rows. Use other data."
        )
    sampled = tuple(found.sampled for found in complete)
    return dataclasses.replace(listing, sampled=sampled, remote=remote, cache_folder=cache.parent)


def _sample_file(path: FilePath, record: FileStatus) -> str:
    """Return a digest of the first and the last bytes of a file, and of some between them.

    Of a remote file, it is the version that the server gives, because each read of bytes would
    transfer a whole block.

    Raises:
        DataError: the file cannot be read.
    """
    if isinstance(path, RemoteDataFile):
        return f"{record.version:x}"
    digest = xxhash.xxh3_64()
    last = max(0, record.size - _SAMPLE_BYTES)
    try:
        with open_regular(path) as file:
            for number in range(_SAMPLES):
                begin = last * number // (_SAMPLES - 1)
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, begin))
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}). Repair or remove the file."
        raise DataError(reason) from error
    return digest.hexdigest()


def _open_remote_folder(url: str, cache_folder: str | None, cache_gb: int) -> RemoteFolder:
    """Return the folder behind a URL.

    Raises:
        DataError: there is no folder for what is read, or see `RemoteFolder`.
    """
    if cache_folder is None:
        raise DataError(f"{redact(url)} needs --data-cache-path, a folder on this machine.")
    blocks = os.path.join(cache_folder, "remote-blocks")
    return RemoteFolder(url, BlockCache(blocks, cache_gb * 10**9, print_to_stderr))


def _get_local_path(folder: str, record: FileStatus) -> str:
    """Return the path of a file. Without a name, the folder itself is the file."""
    if not record.name:
        return folder
    return os.path.join(folder, record.name)


def _make_changed_error(path: FilePath, record: FileStatus, size: int) -> DataError:
    """Return the error for a file that is not the one that was listed."""
    return DataError(
        f"{path} has changed since the run started: it had {record.size} bytes and has {size}. "
        "Its rows would not be those of the data order. Restore the file, and start again from "
        "the last checkpoint."
    )


def _find_local_files(folder: str, suffixes: tuple[str, ...]) -> list[FileStatus]:
    """Return the files below a folder. Hidden files and folders are left out.

    Raises:
        DataError: there is no such folder, or a folder or file cannot be read.
    """
    if os.path.isfile(folder) and folder.endswith(suffixes):
        return [_describe_file(folder, "")]
    if not os.path.isdir(folder):
        raise DataError(
            f"{folder} is not a folder. Give the folder of the files with --data-path, and the "
            "names of folders in it with --datasets."
        )
    records = []
    for parent, folders, names in os.walk(folder, onerror=_fail_for_folder):
        # os.walk reads this list again, so the cache below the folder is not entered.
        folders[:] = [name for name in folders if not name.startswith(".")]
        # This is slow, so it is done once for each folder and not for each file.
        below = os.path.relpath(parent, folder)
        if below == os.curdir:
            below = ""
        for name in names:
            # Spark writes such files beside its data, and unfinished downloads have such names.
            if name.endswith(suffixes) and not name.startswith((".", "_")):
                path = os.path.join(parent, name)
                records.append(_describe_file(path, os.path.join(below, name)))
    return records


def _describe_file(path: str, name: str) -> FileStatus:
    """Return the record of a file.

    Raises:
        DataError: it is a link that leads nowhere, no regular file, or has no UTF-8 name.
    """
    # pyarrow opens no other names, and messages could not be printed.
    shown = path.encode(errors="backslashreplace").decode()
    if shown != path:
        raise DataError(f"the name of {shown} is not UTF-8. Rename the file or folder.")
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}). Repair or remove the file or link."
        ) from error
    # Opening a pipe would wait forever for someone who writes into it.
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no regular file. Remove it, or rename it.")
    return FileStatus(name, status.st_size, status.st_mtime_ns)


def _fail_for_folder(error: OSError) -> NoReturn:
    """Raise the error for a subfolder, whose documents would otherwise be missing silently."""
    raise DataError(
        f"{error.filename} cannot be listed ({error.strerror}). Correct its permissions."
    ) from error


def _join_files(
    folder: str,
    format: str,
    column: str,
    records: list[FileStatus],
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
            f"column {column!r} of {redact(folder)} holds texts in {kinds['text']} and token ids "
            f"in {kinds['tokens']}. Put them into two folders, and name both with --datasets."
        )
    file = np.repeat(np.arange(len(groups)), [len(found.rows) for found in groups])
    return Listing(
        folder,
        column,
        format,
        next(iter(kinds), "text"),
        tuple(records),
        file.astype(np.int64),
        begin=np.concatenate([found.begin for found in groups]),
        end=np.concatenate([found.end for found in groups]),
        rows=np.concatenate([found.rows for found in groups]),
        tokens=np.concatenate([found.tokens for found in groups]),
    )


def _find_cache_path(folder: str, format: str, column: str, cache_folder: str | None) -> Path:
    """Return the path of the cache of a listing."""
    # A relative path names another folder after a change of the working directory.
    place = folder
    parent = folder
    if not is_url(folder):
        place = os.path.abspath(folder)
    if os.path.isfile(folder):
        parent = os.path.dirname(place)
    key = xxhash.xxh3_64_hexdigest(json.dumps([place, format, column]).encode())
    return Path(cache_folder or os.path.join(parent, ".index-cache")) / f"listing-{key}.npz"


def _read_cache(path: Path) -> dict[FileStatus, ListedFile]:
    """Return what was found in files that were listed before. A damaged cache is not used."""
    try:
        # `_write_cache` compresses nothing, so what is unpacked is as large as the file.
        with open_regular(path, limit=INDEX_BYTES) as file, zipfile.ZipFile(file) as archive:
            if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
                return {}
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
        FileStatus(*record): ListedFile(FileGroups(kind, *columns[:, begin:end]), sampled)
        for record, kind, sampled, begin, end in zip(
            facts["files"],
            facts["kinds"],
            facts["sampled"],
            bounds[:-1],
            bounds[1:],
            strict=True,
        )
    }


def _write_cache(
    path: Path,
    records: list[FileStatus],
    listed: list[ListedFile],
    log: Callable[[str], None],
) -> None:
    """Write the cache. A failure costs time at the next start, so it is only reported."""
    groups = [each.groups for each in listed]
    facts = {
        "version": _CACHE_VERSION,
        "sampled": [each.sampled for each in listed],
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
        log(
            f"the list of row groups cannot be stored in {path.parent} ({error.strerror}), so the "
            "next start will open all files again. Name a folder that can be written with "
            "--data-cache-path."
        )
