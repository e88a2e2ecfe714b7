"""Digests of whole data files: computed once, kept beside the index caches, so that a resume finds
a corpus that was altered.

Invariant: a kept digest belongs to a file whose path, size, time of change and inode are still the
same. A terabyte never delays the first step: files above SMALL_BYTES are read in the background.

The key is (path, size, mtime_ns, ctime_ns, inode). `cp -p`, `rsync -t` and `touch` restore the
mtime; the ctime cannot be set, so that any write since the digest was taken shows. A rename or
chmod changes the ctime too, and costs one more reading. The device is left out: a network file
system has another number on each host and after each mount.
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
from pathlib import Path
from typing import Any

import xxhash

from megatron.data.array_file import open_regular
from megatron.data.background import BLOCK, Background
from megatron.data.building import Temporaries

SMALL_BYTES = 1 << 30
"""A file up to this size is digested before the first step."""
FIRST_BYTES = 4 << 30
"""One process digests no more than this before the first step, whatever the sizes of the files."""
_SETTLED_NS = 2_000_000_000
"""A file that changed less than this ago may change again within one tick of its clock; its digest
is not kept."""
_RECORD_BYTES = 1 << 16


@dataclass(frozen=True)
class FileIdentity:
    """What changes whenever a file's content does; see above."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """
        Raises:
            OSError: the file is missing, or is no regular file.
        """
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        real = os.path.realpath(path)
        return cls(real, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    @property
    def copy(self) -> tuple[int, int, int, int]:
        """What is equal on two hosts that see one file: all but the path, and different for two
        copies."""
        return (self.size, self.mtime_ns, self.ctime_ns, self.inode)


class DigestFolder:
    """Digests in a folder, a small file for each; a folder that cannot be written holds none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, identity: FileIdentity) -> str | None:
        """Return the digest of a file that has not changed since it was kept."""
        try:
            with open_regular(self._path(identity)) as file:
                record = json.loads(file.read(_RECORD_BYTES))
            digest = str(record["xxh3_128"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        whole = record == self._record(identity, digest) and re.fullmatch(r"[0-9a-f]{32}", digest)
        return digest if whole else None

    def put(self, identity: FileIdentity, digest: str) -> None:
        """Keep a digest.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(identity)
        with Temporaries(self._folder) as temporaries:
            fresh = temporaries.create(path.name)
            fresh.write_text(json.dumps(self._record(identity, digest), indent=1) + "\n")
            os.replace(fresh, path)

    def _path(self, identity: FileIdentity) -> Path:
        """Copies on several hosts have several files here, so that a shared folder serves them
        all."""
        key = json.dumps(astuple(identity)).encode()
        return self._folder / f"digest-{hashlib.blake2b(key, digest_size=12).hexdigest()}.json"

    @staticmethod
    def _record(identity: FileIdentity, digest: str) -> dict[str, Any]:
        record = {"file": list(astuple(identity)), "xxh3_128": digest}
        check = xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())
        return {**record, "check": check}


class ContentDigests:
    """The digests of the files that this process was asked for, as far as they are known."""

    def __init__(self, background: Background) -> None:
        self.notes: list[str] = []
        self._background = background
        self._known: dict[str, str] = {}
        self._budget = FIRST_BYTES

    @property
    def known(self) -> dict[str, str]:
        """path -> xxh3_128 of all its bytes."""
        return dict(self._known)

    def request(self, path: Path, folder: Path) -> None:
        """Have a file digested: at once where the digest is kept in `folder` or the file is small,
        else in the background.

        Raises:
            OSError: the file cannot be read.
        """
        identity = FileIdentity.of(path)
        kept = DigestFolder(folder).get(identity)
        if kept is not None:
            self._known[str(path)] = kept
            return
        if identity.size <= min(SMALL_BYTES, self._budget):
            self._budget -= identity.size
            self._digest(path, folder, digest_of_file)
            return

        def check() -> None:
            self._digest(path, folder, self._read_slowly)

        self._background.submit(f"the content of {path}", check)

    def _digest(self, path: Path, folder: Path, read: Callable[[Path], str]) -> None:
        before = FileIdentity.of(path)
        started = time.time_ns()
        digest = read(path)
        after = FileIdentity.of(path)
        if before != after:
            raise OSError(f"{path} changed while it was read")
        self._known[str(path)] = digest
        if started - after.ctime_ns < _SETTLED_NS:
            return
        try:
            DigestFolder(folder).put(after, digest)
        except OSError as error:
            self.notes.append(
                f"the digest of {path} cannot be kept in {folder} ({error.strerror}); it is computed again at each start"
            )

    def _read_slowly(self, path: Path) -> str:
        digest = xxhash.xxh3_128()
        with open_regular(path) as file:
            for block in self._background.read(file.fileno(), 0, os.fstat(file.fileno()).st_size):
                digest.update(block)
        return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """Return xxh3_128 of all bytes, as `xxh128sum` prints it.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
