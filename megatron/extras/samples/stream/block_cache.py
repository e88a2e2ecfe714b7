"""Blocks of remote files that are kept on the local disk, up to a size.

Invariant: what is loaded is what was stored. Blocks may disappear at any time, because the other
processes that share the folder remove the least recently used ones. A missing block is fetched
again.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import xxhash

from megatron.base.outside_file import load_bytes

_DIGEST_BYTES = 8
# The folder is scanned when this process has stored such a part of the limit since the last time.
_SCANNED_AFTER = 0.05
# Removed blocks make room for a while, so that not every block scans the folder again.
_KEPT = 0.9


class BlockCache:
    """A folder of blocks. Any number of processes may share it."""

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
