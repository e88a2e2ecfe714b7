"""Index caches: arrays that take long to build, stored on disk for other processes.

The key of an entry holds everything that determines its arrays.

Invariant: an entry that opens is the one that was requested. Its manifest is written last and holds
the key and the digests. Dtypes and shapes are in the headers of the .npy files and are compared
too. If anything disagrees, the entry is built again and a note reports it. All bytes of an array up
to 16 MiB are digested when it is opened. Larger arrays are sampled then, and all their bytes are
digested in the background. A difference ends the run before its next save.

Any process may request an entry. A lock file lets one process build while the others wait. No
process group is needed, and no process waits in a collective. The kernel releases the lock when its
holder ends. Where a file system has no locks, or other hosts do not see them, several processes may
build at the same time. They write the same bytes under names of their own, and the last rename wins
(see building.py).
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.base.durable import sync_folder
from megatron.base.errors import DataError
from megatron.base.outside_file import SETTINGS_BYTES, load_json
from megatron.base.plain_text import print_to_stderr
from megatron.data.array_file import (
    MappedArray,
    create_array,
    sampled_digest,
    whole_digest,
)
from megatron.data.background import Background
from megatron.data.building import Log, Temporaries, only_builder, remove_abandoned

Arrays = dict[str, NDArray]
Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
FORMAT = 1
"""Part of every key. Raise it when the meaning of an array changes."""
WAIT_SECONDS = 600.0
"""Longest time to wait for another process that builds an entry."""
_ATTEMPTS = 5
"""Number of builds before giving up. Other processes may replace or remove an entry meanwhile."""


class IndexCache:
    """The cache entries in one folder."""

    def __init__(
        self,
        folder: str | os.PathLike,
        notes: list[str] | None = None,
        *,
        background: Background | None = None,
        log: Log = print_to_stderr,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Use a folder as a cache.

        Args:
            folder: Where the entries are. It is created when the first one is built.
            notes: Receives messages that may be read later.
            background: Digests all bytes of large arrays. None verifies samples of them only.
            log: Receives urgent messages while a build, or the wait for one, takes long.
            wait_seconds: Longest time to wait for a process that builds the same entry.
        """
        self.folder = Path(folder)
        self.notes: list[str] = [] if notes is None else notes
        self.manifests: list[Path] = []
        """The manifests of the entries that were opened."""
        self._background = background
        self._verified: set[str] = set()
        self._log = log
        self._wait_seconds = wait_seconds

    def open(
        self, kind: str, key: Mapping[str, Any], shapes: Shapes, build: Callable[[Arrays], None]
    ) -> Arrays:
        """Return the arrays of an entry, memory-mapped and read-only.

        Args:
            kind: First part of the entry's file names.
            key: Everything that determines the arrays, as JSON values.
            shapes: The dtype and the shape of each array.
            build: Fills the arrays in place if the entry does not exist.

        Raises:
            DataError: the entry must be built and the folder cannot be written, or another process
                holds the lock for too long, or the entry cannot be opened after several builds.
        """
        # A change of the format changes every key, so entries of older formats are not opened. The
        # file names have the form that `remove_abandoned` recognises.
        key = {"format": FORMAT, **key}
        text = json.dumps(key, sort_keys=True).encode()
        stem = f"{kind}-{hashlib.blake2b(text, digest_size=12).hexdigest()}"
        # The first attempt takes no lock, because all ranks of a large run open the same entries at
        # the same time.
        found = self._read(stem, key, shapes)
        attempts = 0
        # Other processes may replace or remove files between a build and its reading.
        while not isinstance(found, dict):
            if attempts == _ATTEMPTS:
                raise DataError(
                    f"the index cache {self.folder / stem} was built {attempts} times and still "
                    f"cannot be opened ({found or 'its files are gone'}). Check the file system, "
                    "or give another folder with --data-cache-path."
                )
            attempts += 1
            try:
                found = self._build_or_wait(stem, key, shapes, build)
            except FileNotFoundError:
                # Other processes remove the files of a builder that was suspended for too long.
                found = "its files were removed while it was built"
            except OSError as error:
                raise DataError(
                    f"the index cache {self.folder} cannot be written ({error.strerror}). Give a "
                    "writable folder with --data-cache-path."
                ) from error
        self._opened(stem, found)
        return {name: mapped.array for name, mapped in found.items()}

    def _build_or_wait(
        self, stem: str, key: Mapping[str, Any], shapes: Shapes, build: Callable[[Arrays], None]
    ) -> "dict[str, MappedArray] | str":
        """Build an entry, unless another process has built it. Return the arrays, or a reason."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Builders that were killed leave files as large as the arrays.
        remove_abandoned(self.folder)
        with only_builder(
            self.folder / f"{stem}.lock",
            f"the index cache {self.folder / stem}",
            limit_seconds=self._wait_seconds,
            log=self._log,
            note=self.notes.append,
        ):
            # Another process may have built it while this one waited for the lock.
            found = self._read(stem, key, shapes)
            if isinstance(found, dict):
                return found
            if found:
                self.notes.append(
                    f"index cache {self.folder / stem} cannot be used ({found}); it is built again"
                )
            self._build(stem, key, shapes, build)
        return self._read(stem, key, shapes)

    def _opened(self, stem: str, arrays: "dict[str, MappedArray]") -> None:
        """Start the verification of large arrays in the background, once for each entry."""
        manifest = self.folder / f"{stem}.json"
        self.manifests.append(manifest)
        for mapped in arrays.values():
            # An entry that is opened again has already been submitted.
            if self._background is None or not mapped.is_sampled or stem in self._verified:
                mapped.close_file()
            else:
                self._background.submit(
                    f"index cache {mapped.path}", _Verification(mapped, manifest, self._background)
                )
        self._verified.add(stem)

    def _read(
        self, stem: str, key: Mapping[str, Any], shapes: Shapes
    ) -> "dict[str, MappedArray] | str":
        """Return the arrays, or why the entry is not usable, or "" if it does not exist."""
        arrays: dict[str, MappedArray] = {}
        try:
            described = _read_manifest(self.folder / f"{stem}.json")
            # File names hold a digest of the key. The manifest has the full key, so that a
            # collision cannot return another entry.
            if described["key"] != key:
                return "its manifest belongs to another key"
            # The background check would have nothing to compare with.
            if "whole" not in described:
                return "it was built by an older version, without digests of complete arrays"
            for name, (dtype, shape) in shapes.items():
                mapped = MappedArray(self.folder / f"{stem}-{name}.npy")
                arrays[name] = mapped
                array = mapped.array
                if array.dtype != dtype or array.shape != shape:
                    return (
                        f"{name} is {array.dtype}{list(array.shape)}, "
                        f"not {np.dtype(dtype)}{list(shape)}"
                    )
                if described["digests"][name] != sampled_digest(array):
                    return f"the content of {name} has changed"
                mapped.expected = str(described["whole"][name])
        except FileNotFoundError as error:
            # Without a manifest the entry does not exist. A missing array is damage.
            if not arrays and str(error.filename).endswith(".json"):
                return ""
            return f"{type(error).__name__}: {error}"
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            RecursionError,
            MemoryError,
        ) as error:
            return f"{type(error).__name__}: {error}"
        return arrays

    def _build(
        self, stem: str, key: Mapping[str, Any], shapes: Shapes, build: Callable[[Arrays], None]
    ) -> None:
        """Build under temporary names, then rename the arrays first and the manifest last.

        The key determines every byte. So the files of two builders fit together, and a reader may
        open a mixture of them. An earlier manifest stays until it is replaced at the end.
        """
        with Temporaries(
            self.folder, lambda: self._log(f"building the index cache {self.folder / stem}")
        ) as temporaries:
            partial = {name: temporaries.create(f"{stem}-{name}.npy") for name in shapes}
            arrays = {
                name: create_array(partial[name], dtype, shape)
                for name, (dtype, shape) in shapes.items()
            }
            build(arrays)
            record = {
                "key": key,
                "digests": {name: sampled_digest(array) for name, array in arrays.items()},
                "whole": {name: whole_digest(array) for name, array in arrays.items()},
            }
            manifest = temporaries.create(f"{stem}.json")
            manifest.write_text(json.dumps({**record, "check": _check_of(record)}, indent=1) + "\n")
            # Synced before the renames. A crash must not leave a final name without its content.
            for path in (*partial.values(), manifest):
                _sync(path)
            for name, path in partial.items():
                os.replace(path, self.folder / f"{stem}-{name}.npy")
            # Readers open the manifest first. The entry exists from this rename on.
            os.replace(manifest, self.folder / f"{stem}.json")
            sync_folder(self.folder)


class _Verification:
    """A background check that an array in use still holds what was built."""

    def __init__(self, mapped: MappedArray, manifest: Path, background: Background) -> None:
        """Remember the array and the file that describes it."""
        self._mapped = mapped
        self._manifest = manifest
        self._background = background

    def __call__(self) -> str | None:
        """Return what is wrong, or None."""
        found = self._mapped.whole_digest(self._background)
        if found == self._mapped.expected:
            return None
        return (
            f"the index cache {self._mapped.path} is damaged: its xxh3_128 is {found} instead of "
            f"{self._mapped.expected}. {discard_entry(self._manifest)}. The order of samples since "
            "this start may be wrong. Start again from the last checkpoint."
        )


def discard_entry(manifest: Path) -> str:
    """Remove an entry's manifest, so that the next start builds the entry again.

    Returns:
        What was done, or what the user must do, as a sentence.
    """
    try:
        # Processes that have mapped the arrays keep them. Only the manifest is removed.
        manifest.unlink(missing_ok=True)
    except OSError as error:
        return (
            f"Remove {manifest}, so that the index is built again (this process cannot remove it: "
            f"{error.strerror})"
        )
    return f"{manifest.name} was removed, so the next start builds the index again"


def _check_of(record: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's content. The manifest stores it as `check`."""
    return str(xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode()))


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: it is missing, or does not hold
            what was written.
    """
    described = load_json(path, SETTINGS_BYTES)
    if not isinstance(described, dict):
        raise TypeError(f"its manifest is a {type(described).__name__}, not an object")
    check = described.pop("check", None)
    # Manifests of older versions have no digest of themselves. `_read` rejects them afterwards.
    if "whole" in described and check != _check_of(described):
        raise ValueError("its manifest has changed since it was written")
    return described


def _sync(path: Path) -> None:
    """Sync the content of a file to disk."""
    # Arrays were written through a mapping. On Linux fsync covers those pages as well.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
