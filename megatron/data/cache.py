"""Index caches: arrays that are dear to build, kept as .npy files under a key of everything that determines them.

Invariant: an entry that opens is the one that was asked for and is whole. Its manifest, written last, holds key, dtypes, shapes
and digests; whatever disagrees is built again, and that is said.

Any process may ask. A lock file lets one of them build while the others wait, so that no process group is needed and nothing
waits in a collective; the lock dies with its holder. Where a file system has no locks several may build at once: they write the
same bytes under temporary names, and the last rename wins harmlessly.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.durable import sync_folder
from megatron.errors import DataError

Arrays = dict[str, NDArray]
Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
FORMAT = 1
_WHOLE_BYTES = 16 << 20  # a larger array's digest takes 64 blocks of 256 KiB: opening must not read gigabytes
_BLOCK_BYTES = 256 << 10


class IndexCache:
    """Cache entries in one folder. What happened is told in `notes`."""

    def __init__(self, folder: str | os.PathLike, notes: list[str] | None = None) -> None:
        self.folder = Path(folder)
        self.notes: list[str] = [] if notes is None else notes

    def open(self, kind: str, key: Mapping[str, Any], shapes: Shapes, build: Callable[[Arrays], None]) -> Arrays:
        """The arrays of an entry, memory-mapped and read-only; if they are not there, `build` fills them in place.

        Raises DataError where they are absent and the folder cannot be written.
        """
        key = {"format": FORMAT, **key}
        stem = f"{kind}-{hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()}"
        found = self._read(stem, key, shapes)
        if isinstance(found, dict):
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(stem):
                found = self._read(stem, key, shapes)  # another process may have built it while we waited
                if isinstance(found, dict):
                    return found
                if found:
                    self.notes.append(f"index cache {self.folder / stem} is damaged ({found}); built again")
                self._build(stem, key, shapes, build)
        except OSError as error:
            raise DataError(
                f"the index cache {self.folder} cannot be written ({error.strerror}); name a writable one by --data-cache-path."
            ) from error
        found = self._read(stem, key, shapes)
        assert isinstance(found, dict), f"the entry {stem} that was just written does not open: {found}"
        return found

    def _read(self, stem: str, key: Mapping[str, Any], shapes: Shapes) -> Arrays | str:
        """The arrays; or why the entry is not usable; or "" where there is none."""
        manifest = self.folder / f"{stem}.json"
        if not manifest.exists():
            return ""
        try:
            described = json.loads(manifest.read_text())
            if described["key"] != key:
                return "its manifest belongs to another key"
            arrays = {}
            for name, (dtype, shape) in shapes.items():
                array = np.load(self.folder / f"{stem}-{name}.npy", mmap_mode="r").view(np.ndarray)
                if array.dtype != dtype or array.shape != shape:
                    return f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)}{list(shape)}"
                if described["digests"][name] != _digest(array):
                    return f"the content of {name} has changed"
                arrays[name] = array
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            return f"{type(error).__name__}: {error}"
        return arrays

    def _build(self, stem: str, key: Mapping[str, Any], shapes: Shapes, build: Callable[[Arrays], None]) -> None:
        partial = {name: self._partial(f"{stem}-{name}.npy") for name in shapes}
        arrays: Arrays = {
            name: np.lib.format.open_memmap(partial[name], "w+", dtype=dtype, shape=shape).view(np.ndarray)
            for name, (dtype, shape) in shapes.items()
        }
        try:
            for path in partial.values():
                _reserve(path)
            build(arrays)
            digests = {name: _digest(array) for name, array in arrays.items()}
            manifest = self._partial(f"{stem}.json")
            manifest.write_text(json.dumps({"key": key, "digests": digests}, indent=1) + "\n")
            for path in (*partial.values(), manifest):
                _sync(path)
            (self.folder / f"{stem}.json").unlink(missing_ok=True)  # a manifest stands for files that are all in place
            for name, path in partial.items():
                os.replace(path, self.folder / f"{stem}-{name}.npy")
            os.replace(manifest, self.folder / f"{stem}.json")
            sync_folder(self.folder)
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)

    def _partial(self, name: str) -> Path:
        return self.folder / f"{name}.{socket.gethostname()}.{os.getpid()}.partial"

    @contextlib.contextmanager
    def _locked(self, stem: str) -> Iterator[None]:
        path = self.folder / f"{stem}.lock"
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                self.notes.append(f"{self.folder} has no file locks: several processes may build the same index cache")
                yield
                return
            for stale in self.folder.glob(f"{stem}*.partial"):  # of a builder that was killed: the lock is ours
                stale.unlink(missing_ok=True)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)


def _digest(array: NDArray) -> str:
    """blake2b of the bytes; of evenly spread blocks of them where they are many."""
    raw = array.reshape(-1).view(np.uint8)
    digest = hashlib.blake2b(digest_size=16)
    if raw.size <= _WHOLE_BYTES:
        digest.update(raw.data)
    else:
        for place in range(64):
            start = (raw.size - _BLOCK_BYTES) * place // 63
            digest.update(raw[start : start + _BLOCK_BYTES].data)
    return digest.hexdigest()


def _reserve(path: Path) -> None:
    """Take the file's space from the disk now: written through a mapping, a full disk would end the process by a signal.

    OSError where there is not enough.
    """
    with open(path, "rb+") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
