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

Something else may have an array's name, such as a pipe, an archive or a pickle. Opening it is then
an error. The process does not wait for the file, and executes nothing from it. Links are followed
when a file is read, since the files of a cache may be links. They are never followed when one is
written.
"""

import hashlib
import io
import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.base.durable import sync_folder
from megatron.base.errors import DataError
from megatron.base.outside_file import SETTINGS_BYTES, load_json, open_regular
from megatron.base.plain_text import print_to_stderr
from megatron.data.background import BLOCK, Background, digest_blocks
from megatron.data.building import Log, Temporaries, only_builder, remove_abandoned

Arrays = dict[str, NDArray]
Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
FORMAT = 1
"""Part of every key. Raise it when the meaning of an array changes."""
WAIT_SECONDS = 600.0
"""Longest time to wait for another process that builds an entry."""
_ATTEMPTS = 5
"""Number of builds before giving up. Other processes may replace or remove an entry meanwhile."""
WHOLE_BYTES = 16 << 20
"""A larger array is checked by samples when it is opened, which must not read gigabytes."""
SAMPLE_BYTES = 256 << 10
"""Bytes of each sample."""
_SAMPLES = 64
# NumPy writes headers of 128 bytes for plain arrays. A longer one is no header of ours.
_HEADER_BYTES = 4096


class MappedArray:
    """A read-only array of a .npy file, and the open file.

    The open file lets a background check read the same bytes after another process has replaced the
    file.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError, ValueError, EOFError: it cannot be read, or is not exactly one plain array of
                format 1.0.
        """
        self.path = path
        self.expected = ""
        """The digest of all bytes that were built, as the manifest has it."""
        self._file: BinaryIO = open_regular(path)
        try:
            dtype, shape, self._begin = _read_header(self._file)
            # Python integers cannot overflow, whatever shape a damaged header has.
            self._size = dtype.itemsize * int(np.prod(shape, dtype=object))
            found = os.fstat(self._file.fileno()).st_size
            # Reading past the end of a mapped file would end the process with SIGBUS.
            if found != self._begin + self._size:
                raise ValueError(
                    f"{path.name} has {found} bytes instead of {self._begin + self._size}"
                )
            # Read-only, so that no code of this process can change an index by mistake.
            mapped = mmap.mmap(self._file.fileno(), found, access=mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise
        self.array: NDArray = np.ndarray(shape, dtype, mapped, self._begin)

    @property
    def is_sampled(self) -> bool:
        """Whether `sampled_digest` leaves bytes out."""
        return self._size > WHOLE_BYTES

    def whole_digest(self, background: Background) -> str:
        """Return the digest of all bytes, and close the file.

        The file is read at the pace of a background check.
        """
        with self._file:
            return digest_blocks(background.read(self._file.fileno(), self._begin, self._size))

    def close_file(self) -> None:
        """Close the file. The array stays mapped."""
        self._file.close()


def create_array(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray:
    """Turn an empty file that exists into an array file.

    Returns:
        The array, memory-mapped and writable.

    Raises:
        OSError: the disk has not enough space.
    """
    header = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(header, described)
    begin = len(header.getvalue())
    size = begin + np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(descriptor, header.getvalue())
        # Allocate the space now. SIGBUS ends a process that writes a mapping to a full disk.
        os.posix_fallocate(descriptor, 0, size)
        mapped = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return np.ndarray(shape, dtype, mapped, begin)


def sampled_digest(array: NDArray) -> str:
    """Return blake2b of the bytes of an array, or of 64 blocks of a large one.

    The blocks are spread evenly from the first byte to the last.
    """
    raw = array.reshape(-1).view(np.uint8)
    digest = hashlib.blake2b(digest_size=16)
    if raw.size <= WHOLE_BYTES:
        digest.update(raw.data)
    else:
        for place in range(_SAMPLES):
            start = (raw.size - SAMPLE_BYTES) * place // (_SAMPLES - 1)
            digest.update(raw[start : start + SAMPLE_BYTES].data)
    return digest.hexdigest()


def whole_digest(array: NDArray) -> str:
    """Return xxh3_128 of all bytes, as `MappedArray.whole_digest` does."""
    raw = array.reshape(-1).view(np.uint8)
    return digest_blocks(raw[start : start + BLOCK].data for start in range(0, raw.size, BLOCK))


def _read_header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...], int]:
    """Return the dtype, the shape, and the byte at which the values begin."""
    head = io.BytesIO(file.read(_HEADER_BYTES) or b"")
    if not head.getvalue():
        raise EOFError("the file is empty")
    version = np.lib.format.read_magic(head)
    if version != (1, 0):
        raise ValueError(f"its format is {version}, not (1, 0)")
    # NumPy evaluates the header as a Python literal. Damaged text can exhaust the parser.
    try:
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(
            head, max_header_size=_HEADER_BYTES
        )
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    # Values of object arrays are pickles, which must not be loaded. We never write Fortran order.
    if dtype.hasobject or fortran or not all(length >= 0 for length in shape):
        raise ValueError(f"it holds {dtype}{list(shape)}, which is not a plain array")
    return dtype, shape, head.tell()


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
