"""Digests of complete data files, stored next to the index caches.

With them a resume detects that a corpus was altered. A digest is computed once for each file.

Invariant: a stored digest belongs to a file whose path, size, times of change and inode are still
the same. A terabyte never delays the first step, because files above SMALL_BYTES are read in the
background.

The key is (path, size, mtime_ns, ctime_ns, inode). `cp -p`, `rsync -t` and `touch` restore the
mtime. The ctime cannot be set, so it reveals any write since the digest was taken. A rename or a
chmod changes the ctime too, and costs one more reading. The device is left out, because a network
file system has another device number on each host and after each mount.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from megatron.base.outside_file import POINTER_BYTES, load_json, open_regular
from megatron.data.background import BLOCK, Background, digest_blocks
from megatron.data.building import Temporaries

SMALL_BYTES = 1 << 30
"""A file up to this size is digested before the first step."""
FIRST_BYTES = 4 << 30
"""A process digests no more than this before the first step, whatever the sizes of the files."""
_SETTLED_NS = 2_000_000_000
"""The digest of a file that changed less than this ago is not stored.

The file may change again within one tick of its clock, which would leave its times as they are.
"""


@dataclass(frozen=True)
class FileIdentity:
    """What changes whenever the content of a file does. See the module docstring."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """Return the identity of a file.

        Raises:
            OSError: the file is missing, or is not a regular file.
        """
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        # Several links to one file share its digest.
        real = os.path.realpath(path)
        return cls(real, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    @property
    def copy(self) -> tuple[int, int, int, int]:
        """All fields but the path. They are equal on two hosts that see the same file.

        Two copies of a file differ in them.
        """
        return (self.size, self.mtime_ns, self.ctime_ns, self.inode)


@dataclass(frozen=True)
class FileSet:
    """Files that are one data set, and have one digest of all bytes."""

    fingerprint: str
    """Identifies the data set before its bytes are known."""
    place: str
    """Where the files are, for messages."""
    paths: tuple[Path, ...]
    cache_folder: Path
    """Folder of the digest of each file."""


class DigestFolder:
    """Digests in a folder, one small file each. A folder that cannot be written holds none."""

    def __init__(self, folder: Path) -> None:
        """Use a folder. It is created when the first digest is stored."""
        self._folder = folder

    def get(self, identity: FileIdentity) -> str | None:
        """Return the digest of a file, or None if none is stored since its last change."""
        try:
            record = load_json(self._path(identity), POINTER_BYTES)
            digest = str(record["xxh3_128"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # A record that is damaged counts as missing, and costs one more reading.
        if record != self._record(identity, digest) or not re.fullmatch(r"[0-9a-f]{32}", digest):
            return None
        return digest

    def put(self, identity: FileIdentity, digest: str) -> None:
        """Store a digest.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(identity)
        # A temporary name and a rename, so that other processes never read half a record.
        with Temporaries(self._folder) as temporaries:
            fresh = temporaries.create(path.name)
            fresh.write_text(json.dumps(self._record(identity, digest), indent=1) + "\n")
            os.replace(fresh, path)

    def _path(self, identity: FileIdentity) -> Path:
        """Return the path of the record of a file.

        Copies of a data file on several hosts have several records. They fit in one folder.
        """
        # The name has the form that `remove_abandoned` recognises.
        key = json.dumps(astuple(identity)).encode()
        return self._folder / f"digest-{hashlib.blake2b(key, digest_size=12).hexdigest()}.json"

    @staticmethod
    def _record(identity: FileIdentity, digest: str) -> dict[str, Any]:
        """Return the content of a record, with a digest of itself."""
        record = {"file": list(astuple(identity)), "xxh3_128": digest}
        check = xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())
        return {**record, "check": check}


class ContentDigests:
    """The digests of the files that this process requested."""

    def __init__(self, background: Background) -> None:
        """Start without digests. `background` reads large files."""
        self.notes: list[str] = []
        self._background = background
        self._known: dict[str, str] = {}
        self._budget = FIRST_BYTES

    @property
    def known(self) -> dict[str, str]:
        """The digests that are known so far: path -> xxh3_128 of all bytes.

        Of a `FileSet`, it is the fingerprint -> the digest of the digests of its files.
        """
        return dict(self._known)

    def request(self, path: Path, folder: Path) -> None:
        """Request the digest of a file.

        It is known at once if it is stored in `folder` or if the file is small. Otherwise the file
        is read in the background.

        Raises:
            OSError: the file cannot be read.
        """
        identity = FileIdentity.of(path)
        kept = DigestFolder(folder).get(identity)
        if kept is not None:
            self._known[str(path)] = kept
            return
        if identity.size <= min(SMALL_BYTES, self._budget):
            # Many small files together must not delay the first step either.
            self._budget -= identity.size
            self._known[str(path)] = self._digest(path, folder, digest_of_file)
            return

        def check() -> None:
            self._known[str(path)] = self._digest(path, folder, self._read_slowly)

        self._background.submit(f"the content of {path}", check)

    def request_set(self, files: FileSet) -> None:
        """Request the digest of a data set of many files. They are read in the background."""

        def check() -> None:
            together = xxhash.xxh3_128()
            kept = DigestFolder(files.cache_folder)
            for path in files.paths:
                digest = kept.get(FileIdentity.of(path))
                if digest is None:
                    digest = self._digest(path, files.cache_folder, self._read_slowly)
                together.update(digest.encode())
            self._known[files.fingerprint] = together.hexdigest()

        self._background.submit(f"the content of {files.place}", check)

    def _digest(self, path: Path, folder: Path, read: Callable[[Path], str]) -> str:
        """Read a file, store its digest and return it.

        Raises:
            OSError: the file cannot be read, or changed meanwhile.
        """
        # A file that changes while it is read gets a digest that belongs to none of its states.
        before = FileIdentity.of(path)
        started = time.time_ns()
        digest = read(path)
        after = FileIdentity.of(path)
        if before != after:
            raise OSError(f"{path} changed while it was read")
        # Valid for this run, but not safe to store. See _SETTLED_NS.
        if started - after.ctime_ns < _SETTLED_NS:
            return digest
        try:
            DigestFolder(folder).put(after, digest)
        except OSError as error:
            # A folder that cannot be written costs time at each start, but must not stop the run.
            self.notes.append(
                f"the digest of {path} cannot be stored in {folder} ({error.strerror}); it is "
                "computed again at each start"
            )
        return digest

    def _read_slowly(self, path: Path) -> str:
        """Return the digest of a file, read at the pace of a background check."""
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return digest_blocks(self._background.read(file.fileno(), 0, size))


def digest_of_file(path: Path) -> str:
    """Return xxh3_128 of all bytes of a file, as `xxh128sum` prints it.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        with contextlib.suppress(OSError):
            # Only a hint for reading ahead, which some file systems reject.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return digest_blocks(iter(partial(file.read, BLOCK), b""))
