"""Files behind a URL, which the package fsspec lists and reads: s3://, gs://, hf://, https://, ...

Only the byte ranges that are needed are read. A range is divided into blocks of 1 MiB, which
`BlockCache` keeps on the disk. The last 64 KiB of a file are a block of their own, because the
footers of Parquet files are there.

Invariant: a read returns bytes of the file as it was listed, or fails.
"""

import contextlib
import dataclasses
import datetime
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from megatron.base.errors import DataError
from megatron.base.outside_file import load_bytes
from megatron.base.plain_text import format_count, print_to_stderr, redact
from megatron.extras.operations.hub.answers import AnswerTooLongError, make_web_options, run_limited

Result = TypeVar("Result")
_BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_TRIES = 5
_LAST_TRY_SECONDS = 120.0
"""No try starts later than this after the first one."""
_MOST_ENTRIES = 1_000_000
_MOST_LEVELS = 32
_LISTING_SECONDS = 900.0
_LONGEST_REASON = 500
# Each wait is twice as long as the one before it.
_FIRST_WAIT_SECONDS = 1.0
_THREADS = 16
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hub"}
"""Protocol of a URL -> the extra of this package with its file system."""
# What file systems call the identity of a content, the most exact ones first.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "e_tag",
    "blob_id",
    "md5Hash",
    "Content-MD5",
    "checksum",
    "Last-Modified",
    "LastModified",
    "mtime",
    "created",
    "modified",
)


_DIGEST_BYTES = 8
# The folder is scanned when this process has stored such a part of the limit since the last time.
_SCANNED_AFTER = 0.05
# Removed blocks make room for a while, so that not every block scans the folder again.
_KEPT = 0.9


class BlockCache:
    """A folder of blocks of remote files, up to a size. Any number of processes may share it.

    Invariant: what is loaded is what was stored. Blocks may disappear at any time, because the
    other processes remove the least recently used ones. A missing block is fetched again.
    """

    def __init__(self, folder: str, limit: int, log: Callable[[str], None]) -> None:
        """Remember the folder, which the first block creates.

        Args:
            folder: The folder. Nothing else may be stored in it.
            limit: Bytes that all blocks together may have. 0 stores nothing.
            log: Receives a line if the folder cannot be written.
        """
        self._folder = Path(folder)
        self._limit = limit
        self._log = log
        self._lock = threading.Lock()
        # The first block that is stored scans the folder, which may be full from an earlier run.
        self._stored = limit

    def load(self, key: str) -> bytes | None:
        """Return a block, or None if it is not stored or damaged."""
        path = self._find_path(key)
        try:
            content = load_bytes(path)
            # The modification time tells when a block was last used.
            os.utime(path)
        except OSError:
            return None
        data = content[:-_DIGEST_BYTES]
        # Blocks are not synced, so a power failure may leave damaged ones.
        if xxhash.xxh3_64_digest(data) != content[-_DIGEST_BYTES:]:
            return None
        return data

    def store(self, key: str, data: bytes) -> None:
        """Store a block. A failure only costs time later, so it is reported once."""
        if self._limit == 0:
            return
        path = self._find_path(key)
        own = f"{path.name}-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}.new"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.with_name(own).write_bytes(data + xxhash.xxh3_64_digest(data))
                os.replace(path.with_name(own), path)
            except OSError:
                with contextlib.suppress(OSError):
                    path.with_name(own).unlink()
                raise
        except OSError as error:
            self._limit = 0
            self._log(
                f"remote data are not kept in {self._folder} any more ({error.strerror}). They are "
                "read from the network each time. Free space, or name another --data-cache-path."
            )
            return
        # Threads read at the same time, and only one of them shall scan the folder.
        with self._lock:
            self._stored += len(data)
            due = self._stored > self._limit * _SCANNED_AFTER
            if due:
                self._stored = 0
        if due:
            self._remove_oldest()

    def _find_path(self, key: str) -> Path:
        """Return the path of a block. Subfolders keep each folder small."""
        return self._folder / key[:2] / key

    def _remove_oldest(self) -> None:
        """Remove the least recently used blocks if there are more than the limit allows."""
        blocks = []
        for parent, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(parent, name)
                # Another process may remove it at the same time.
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    blocks.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in blocks)
        if total <= self._limit:
            return
        for _, size, path in sorted(blocks):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= self._limit * _KEPT:
                return


@dataclasses.dataclass(frozen=True)
class FileStatus:
    """A file when it was listed. It must not change while it is in use."""

    name: str
    """Path below the folder of the data set. It is empty if the data set is this file."""
    size: int
    version: int
    """Time of the last change in ns. Of a remote file: digest of the ETag, or of what else the
    server has, and 0 if it has nothing."""


class RemoteFolder:
    """A folder behind a URL, or a single file."""

    def __init__(
        self, url: str, cache: BlockCache, log: Callable[[str], None] = print_to_stderr
    ) -> None:
        """Open the file system of a URL. Credentials come from the environment.

        Args:
            url: The URL.
            cache: Keeps what is read.
            log: Receives a line for each read that is tried again.

        Raises:
            DataError: a package for this kind of URL is not installed, or the URL is wrong.
        """
        try:
            import fsspec.core
        except ImportError as error:
            raise DataError(
                f"{redact(url)} needs the package fsspec. Install it: {_name_packages(url)}."
            ) from error
        self.url = url.rstrip("/")
        self._cache = cache
        self._log = log
        try:
            # A listing that fsspec keeps would hide that a file has changed.
            self._system, root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, **make_web_options(self.url)
            )
        except ImportError as error:
            raise DataError(
                f"{redact(url)} cannot be opened: {redact(str(error))}. Install what these URLs "
                f"need: {_name_packages(url)}."
            ) from None
        except ValueError as error:
            raise DataError(
                f"{redact(url)} cannot be opened: {redact(str(error))}. Correct the URL."
            ) from None
        self._root = str(root).rstrip("/")

    def list_files(self, suffixes: tuple[str, ...]) -> list[FileStatus]:
        """Return the files below the folder, or the file itself. Hidden ones are left out.

        Raises:
            DataError: the folder is missing, cannot be listed, or its listing has no end.
        """
        if self._root.endswith(suffixes) and self._ask("").get("type") != "directory":
            return [self.describe("")]
        end = time.monotonic() + _LISTING_SECONDS

        def describe(item: tuple[str, dict[str, Any]]) -> FileStatus:
            name, facts = item
            self._check_time(end)
            # Web servers list names without sizes.
            if facts.get("size") is None:
                return self.describe(name)
            return _make_status(name, facts)

        names = list(self._walk(suffixes, end))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="remote") as pool:
            return list(pool.map(describe, names))

    def _walk(self, suffixes: tuple[str, ...], end: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of each file below the folder, and fsspec's facts about it."""
        # Folders below are appended while the list is gone through.
        folders = [self._root]
        seen = {self._root}
        entries = 0
        # `find` of fsspec would leave out the folders that cannot be listed.
        for folder in folders:
            for facts in self._list_folder(folder, end):
                entries += 1
                if entries > _MOST_ENTRIES:
                    raise self._make_endless_error(f"{_MOST_ENTRIES:,} entries")
                path = str(facts["name"]).rstrip("/")
                last = path.rsplit("/", 1)[-1]
                # Object stores list an empty object in place of the folder itself. A page may have
                # links that lead out of the folder.
                if last.startswith(".") or path in seen or ".." in path.split("/"):
                    continue
                if facts["type"] == "directory":
                    if self._get_name(path).count("/") >= _MOST_LEVELS:
                        raise self._make_endless_error(f"{_MOST_LEVELS} levels of folders")
                    folders.append(path)
                    seen.add(path)
                elif last.endswith(suffixes) and not last.startswith("_"):
                    yield self._get_name(path), facts

    def describe(self, name: str) -> FileStatus:
        """Return what the server says about a file now.

        Raises:
            DataError: the file is missing, the server does not answer, or it gives no size.
        """
        facts = self._ask(name)
        if facts.get("size") is None:
            raise DataError(
                f"{redact(self.get_url(name))}: the server does not tell the size of the file, so "
                "parts of it cannot be read. Use another server, or copy the files."
            )
        return _make_status(name, facts)

    def get_url(self, name: str) -> str:
        """Return the URL of a file."""
        if not name:
            return self.url
        return f"{self.url}/{name}"

    def read_block(self, status: FileStatus, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of a file, from the cache if it has them.

        Raises:
            DataError: they cannot be read.
        """
        url = self.get_url(status.name)
        facts = [url, status.size, status.version, begin, end]
        key = xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())
        kept = self._cache.load(key)
        # Several ranks may fetch the same block at once. That is harmless, so there is no lock.
        if kept is not None and len(kept) == end - begin:
            return kept

        def fetch() -> bytes:
            data = bytes(self._system.cat_file(self._get_path(status.name), start=begin, end=end))
            if len(data) != end - begin:
                raise OSError(
                    f"the server sent {len(data)} bytes instead of {end - begin}; it must support "
                    "requests for ranges"
                )
            return data

        data = self._try("read", url, fetch)
        self._cache.store(key, data)
        return data

    def _list_folder(self, folder: str, end: float) -> list[dict[str, Any]]:
        """Return fsspec's facts about what is in a folder, which is a path of the file system."""
        self._check_time(end)
        url = self.get_url(self._get_name(folder))
        return self._try("list", url, lambda: list(self._system.ls(folder, detail=True)))

    def _check_time(self, end: float) -> None:
        """Raise DataError if a listing takes longer than it may."""
        if time.monotonic() > end:
            raise self._make_endless_error(f"what can be listed in {_LISTING_SECONDS:g} s")

    def _make_endless_error(self, bound: str) -> DataError:
        """Return the error for a listing beyond a bound, which may have no end."""
        return DataError(
            f"the listing of {redact(self.url)} has more than {bound}. Name a folder with fewer "
            "files, or correct the URL."
        )

    def _ask(self, name: str) -> dict[str, Any]:
        """Return fsspec's facts about a file."""
        path = self._get_path(name)

        def ask() -> dict[str, Any]:
            self._system.invalidate_cache(path)
            return dict(self._system.info(path))

        return self._try("find", self.get_url(name), ask)

    def _get_path(self, name: str) -> str:
        """Return the path of a file in the file system."""
        if not name:
            return self._root
        return f"{self._root}/{name}"

    def _get_name(self, path: str) -> str:
        """Return the name of a file below the folder. That of the folder itself is empty."""
        return path.removeprefix(self._root).lstrip("/")

    def _try(self, verb: str, url: str, request: Callable[[], Result]) -> Result:
        """Return the result of a request. Errors of the connection are tried again.

        Raises:
            DataError: it failed several times, or trying again has no use.
        """
        shown = redact(url)
        wait = _FIRST_WAIT_SECONDS
        begin = time.monotonic()
        for attempt in range(1, _TRIES + 1):
            try:
                return run_limited(request)
            except AnswerTooLongError as error:
                raise DataError(
                    f"cannot {verb} {shown}: {error}. Use another server, or copy the files."
                ) from None
            # What `from error` would print may hold a token, so the causes are left out.
            except FileNotFoundError as error:
                # fsspec also raises it for a web server that fails.
                cause = error.__cause__
                if cause is None or getattr(cause, "status", None) == 404:
                    raise DataError(
                        f"{shown} does not exist. Correct --data-path, --datasets or --input, or "
                        "restore the file."
                    ) from None
                reason = _describe(cause)
            except PermissionError as error:
                raise DataError(
                    f"{shown} must not be read: {redact(str(error))}. Give the credentials as the "
                    "file system's package expects them, in environment variables or its file."
                ) from None
            # Each file system has its own classes of errors.
            except Exception as error:
                reason = _describe(error)
            left = begin + _LAST_TRY_SECONDS - time.monotonic()
            if attempt == _TRIES or wait > left:
                break
            self._log(
                f"warning: cannot {verb} {shown} ({reason}). Try {attempt + 1} of {_TRIES} "
                f"follows in {wait:g} s. No try starts after {left:.0f} s from now"
            )
            time.sleep(wait)
            wait *= 2
        raise DataError(
            f"cannot {verb} {shown} after {format_count(attempt, 'try', 'tries')}: {reason}. Check "
            "the network and the server, and run the same command again."
        )


def _describe(error: BaseException) -> str:
    """Return an error for a message, without secrets. It may quote an answer of any length."""
    return redact(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]


def _name_packages(url: str) -> str:
    """Return the command that installs what a kind of URL needs."""
    extra = _EXTRAS.get(url.partition("://")[0])
    if extra is None:
        return "pip install 'megatron-3d[remote]', and the package that fsspec names"
    return f"pip install 'megatron-3d[remote,{extra}]'"


def _make_status(name: str, facts: dict[str, Any]) -> FileStatus:
    """Return the status of a file from fsspec's facts about it."""
    for key in _VERSION_KEYS:
        found = facts.get(key)
        if found:
            # Some file systems list a number, and give the same time as an object later.
            if isinstance(found, datetime.datetime):
                found = found.timestamp()
            version = str(found).removeprefix("W/").strip('"')
            # 63 bits, because it is stored where local files have a time in ns.
            return FileStatus(
                name, int(facts["size"]), xxhash.xxh3_64_intdigest(version.encode()) >> 1
            )
    return FileStatus(name, int(facts["size"]), 0)


@dataclasses.dataclass(frozen=True)
class RemoteDataFile:
    """A remote file as it was listed. As text, it is its URL without secrets."""

    folder: RemoteFolder
    status: FileStatus

    def __str__(self) -> str:
        """Return the URL for messages."""
        return redact(self.folder.get_url(self.status.name))

    def open(self) -> io.RawIOBase:
        """Return a file object. It reads when it is asked to."""
        return _RemoteReader(self)


class _RemoteReader(io.RawIOBase):
    """Reads a remote file in blocks, one of which is in memory."""

    def __init__(self, file: RemoteDataFile) -> None:
        """Begin at the first byte."""
        self._file = file
        self._place = 0
        self._held = (0, b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._place

    def seek(self, offset: int, origin: int = io.SEEK_SET) -> int:
        """Go to a place, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.status.size}
        self._place = max(0, base[origin] + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, and return the number of bytes. It is smaller only at the end."""
        view = memoryview(buffer).cast("B")
        end = min(self._place + len(view), self._file.status.size)
        filled = 0
        for first, last in self._list_blocks(self._place, end):
            # pyarrow reads a column in small steps, so most of them fall into the same block.
            begin, data = self._held
            if begin != first or not data:
                data = self._file.folder.read_block(self._file.status, first, last)
                self._held = (first, data)
            part = data[max(0, self._place + filled - first) : end - first]
            view[filled : filled + len(part)] = part
            filled += len(part)
        self._place += filled
        return filled

    def _list_blocks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the blocks that hold the bytes [begin, end)."""
        size = self._file.status.size
        tail = max(0, size - _TAIL_BYTES)
        first = begin // _BLOCK_BYTES * _BLOCK_BYTES
        # Listing thousands of files then transfers 64 KiB of each, and not a complete block.
        if begin >= tail:
            first = tail
        while first < end:
            if first >= tail:
                last = size
            else:
                last = min(first + _BLOCK_BYTES, tail)
            yield first, last
            first = last
