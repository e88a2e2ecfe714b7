"""Index caches: arrays that are dear to build, kept as .npy files under a key of everything that
determines them.

Invariant: an entry that opens is the one that was asked for. Its manifest, written last, holds key,
dtypes, shapes and digests; whatever disagrees is built again, and that is said. Arrays up to 16 MiB
are digested as a whole when they are opened. Larger ones are checked by samples then, and as a
whole in the background; a difference ends the run before its next save.

Any process may ask. A lock file lets one of them build while the others wait, so that no process
group is needed and nothing waits in a collective; the lock dies with its holder. Where a file
system has no locks, or has them for each host, several may build at once: they write the same bytes
under names of their own, and the last rename wins harmlessly (see building.py).
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.data.array_file import (
    MappedArray,
    create_array,
    open_regular,
    sampled_digest,
    whole_digest,
)
from megatron.data.background import Background
from megatron.data.building import Say, Temporaries, only_builder, remove_abandoned
from megatron.durable import sync_folder
from megatron.errors import DataError

Arrays = dict[str, NDArray]
Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
FORMAT = 1
WAIT_SECONDS = 600.0
_ATTEMPTS = 5
"""At an entry that other processes replace or remove meanwhile."""
_MANIFEST_BYTES = 1 << 20


def say_to_stderr(line: str) -> None:
    """Print a message that must be known at once."""
    print(line, file=sys.stderr, flush=True)


class IndexCache:
    """Cache entries in one folder."""

    def __init__(
        self,
        folder: str | os.PathLike,
        notes: list[str] | None = None,
        *,
        background: Background | None = None,
        say: Say = say_to_stderr,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """
        Args:
            folder: Where the entries are; it is created when the first one is built.
            notes: Takes what happened and may be read later.
            background: Verifies large arrays as a whole; None verifies them by samples only.
            say: Takes what must be known while a build, or the wait for one, goes on.
            wait_seconds: The longest time to wait for a process that builds the same entry.
        """
        self.folder = Path(folder)
        self.notes: list[str] = [] if notes is None else notes
        self.manifests: list[Path] = []
        """Of the entries that were opened."""
        self._background = background
        self._verified: set[str] = set()
        self._say = say
        self._wait_seconds = wait_seconds

    def open(
        self, kind: str, key: Mapping[str, Any], shapes: Shapes, build: Callable[[Arrays], None]
    ) -> Arrays:
        """Return the arrays of an entry, memory-mapped and read-only; if they are not there,
        `build` fills them in place.

        Raises:
            DataError: they are absent and the folder cannot be written; or another process holds
                the lock for too long.
        """
        key = {"format": FORMAT, **key}
        stem = f"{kind}-{hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()}"
        found = self._read(stem, key, shapes)
        attempts = 0
        while not isinstance(found, dict):
            if attempts == _ATTEMPTS:
                raise DataError(
                    f"the index cache {self.folder / stem} was built {attempts} times and still does not open "
                    f"({found or 'its files are gone'}); check the file system, or name another folder by --data-cache-path."
                )
            attempts += 1
            try:
                found = self._build_or_wait(stem, key, shapes, build)
            except FileNotFoundError:
                found = "its files were removed while it was built"
            except OSError as error:
                raise DataError(
                    f"the index cache {self.folder} cannot be written ({error.strerror}); name a writable one by "
                    "--data-cache-path."
                ) from error
        self._opened(stem, found)
        return {name: mapped.array for name, mapped in found.items()}

    def _build_or_wait(
        self, stem: str, key: Mapping[str, Any], shapes: Shapes, build: Callable[[Arrays], None]
    ) -> "dict[str, MappedArray] | str":
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.folder)
        with only_builder(
            self.folder / f"{stem}.lock",
            f"the index cache {self.folder / stem}",
            limit_seconds=self._wait_seconds,
            say=self._say,
            note=self.notes.append,
        ):
            found = self._read(
                stem, key, shapes
            )  # another process may have built it while we waited
            if isinstance(found, dict):
                return found
            if found:
                self.notes.append(
                    f"index cache {self.folder / stem} is damaged ({found}); built again"
                )
            self._build(stem, key, shapes, build)
        return self._read(stem, key, shapes)

    def _opened(self, stem: str, arrays: "dict[str, MappedArray]") -> None:
        """Have large arrays verified as a whole in the background."""
        manifest = self.folder / f"{stem}.json"
        self.manifests.append(manifest)
        for mapped in arrays.values():
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
        """Return the arrays; or why the entry is not usable; or "" where there is none."""
        arrays: dict[str, MappedArray] = {}
        try:
            described = _read_manifest(self.folder / f"{stem}.json")
            if described["key"] != key:
                return "its manifest belongs to another key"
            if "whole" not in described:
                return "it was built by an older version, without digests of whole arrays"
            for name, (dtype, shape) in shapes.items():
                mapped = MappedArray(self.folder / f"{stem}-{name}.npy")
                arrays[name] = mapped
                array = mapped.array
                if array.dtype != dtype or array.shape != shape:
                    return f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)}{list(shape)}"
                if described["digests"][name] != sampled_digest(array):
                    return f"the content of {name} has changed"
                mapped.expected = str(described["whole"][name])
        except FileNotFoundError as error:
            return (
                ""
                if not arrays and str(error.filename).endswith(".json")
                else f"{type(error).__name__}: {error}"
            )
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
        """Build under temporary names, then rename: the arrays first, the manifest last.

        The bytes are a function of the key. So a manifest that is already there is the right one,
        or is damaged and replaced at the end, and a reader may find files of two builders side by
        side.
        """
        with Temporaries(
            self.folder, lambda: self._say(f"building the index cache {self.folder / stem}")
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
            for path in (*partial.values(), manifest):
                _sync(path)
            for name, path in partial.items():
                os.replace(path, self.folder / f"{stem}-{name}.npy")
            os.replace(manifest, self.folder / f"{stem}.json")
            sync_folder(self.folder)


class _Verification:
    """A background check: does an array that is in use still hold what was built?"""

    def __init__(self, mapped: MappedArray, manifest: Path, background: Background) -> None:
        self._mapped = mapped
        self._manifest = manifest
        self._background = background

    def __call__(self) -> str | None:
        found = self._mapped.whole_digest(self._background)
        if found == self._mapped.expected:
            return None
        return (
            f"the index cache {self._mapped.path} is damaged: its xxh3_128 is {found}, and {self._mapped.expected} was built. "
            f"{discard_entry(self._manifest)}. The order of samples since this start may be wrong; start again from the last "
            "checkpoint."
        )


def discard_entry(manifest: Path) -> str:
    """Remove an entry's manifest, so that the next start builds the entry again; say what was
    done."""
    try:
        manifest.unlink(missing_ok=True)
    except OSError as error:
        return (
            f"Remove {manifest}, so that it is built again (this process cannot: {error.strerror})"
        )
    return f"{manifest.name} was removed, so the next start builds the index again"


def _check_of(record: Mapping[str, Any]) -> str:
    """Return the digest that a manifest holds of itself."""
    return str(xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode()))


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: it is missing, or is not what was
        written.
    """
    with open_regular(path) as file:
        text = file.read(_MANIFEST_BYTES)
    described = json.loads(text)
    if not isinstance(described, dict):
        raise TypeError(f"its manifest is a {type(described).__name__}, not an object")
    check = described.pop("check", None)
    if "whole" in described and check != _check_of(described):
        raise ValueError("its manifest is not what was written")
    return described


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
