"""The shards of a corpus as one indexed data set, without a copy.

The .bin files are mapped one after the other into one range of addresses. Each begins at a page, so
a few unused bytes lie between two of them, and the byte pointers skip these. Everything else, from
the order of samples to the C++ loop that gathers tokens, is that of a single data set.

Invariant: sizes, documents, fingerprint and samples are those of the data set into which
merge_datasets.py merges the shards.
"""

import ctypes
import hashlib
import mmap
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import DataError
from megatron.base.outside_file import open_regular
from megatron.data.content import FileSet
from megatron.data.indexed import DTYPES, MAGIC, VERSION, IndexedDataset
from megatron.data.registry import DatasetRegistry
from megatron.extras.preparation.corpus.manifest import (
    Corpus,
    check_digests,
    list_files,
    read_manifest,
)

_SMALL_BYTES = 1 << 26
"""The digests of .bin files are compared at each start if these have no more bytes together."""
_MAP_FIXED = 0x10
_CHUNK = 1 << 20


class JoinedDataset(IndexedDataset):
    """The concatenation of all shards of a manifest.

    Each process holds 20 bytes for each document in memory. The sizes of all files and the digests
    of the .idx are compared with the manifest. Those of the .bin are compared if they have at most
    64 MiB together.
    """

    def __init__(self, path: str) -> None:
        """Open all shards and check them.

        Raises:
            DataError: The manifest or a shard is missing or damaged, or does not match the others.
        """
        corpus = read_manifest(path)
        total = sum(shard.bytes[0] for shard in corpus.shards)
        check_digests(corpus, only_indices=total > _SMALL_BYTES)
        self.prefix = path
        self._corpus = corpus
        self.parts = tuple(list_files(prefix)[0] for prefix in corpus.prefixes)
        self._fingerprint = None
        self._part_bytes = [shard.bytes[0] for shard in corpus.shards]
        pages = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in self._part_bytes]
        self._begins = [0, *np.cumsum(pages, dtype=np.int64).tolist()]
        self._join_indices(corpus)
        self.tokens: NDArray = _map_files(self.parts, self._begins).view(self.dtype)

    def register(self, registry: DatasetRegistry) -> None:
        """Note the input files that are missing, and register all .bin files to be verified."""
        if self._corpus.gap:
            registry.notes.append(self._corpus.gap)
        # A digest of several files must not be compared with that of one merged file.
        key = f"joined-{self.compute_fingerprint()}"
        folder = registry.cache_folder(self.prefix)
        registry.file_sets.append(FileSet(key, self.prefix, self.parts, folder))

    def check_not_truncated(self) -> None:
        """Check that each .bin still has the bytes that were mapped.

        Raises:
            DataError: A file was truncated, replaced or removed.
        """
        for path, size in zip(self.parts, self._part_bytes, strict=True):
            try:
                found = f"{os.stat(path).st_size} bytes"
            except OSError as error:
                found = str(error.strerror)
            if found != f"{size} bytes":
                raise DataError(
                    f"{path} was changed while it is in use: it had {size} bytes. Now: {found}. "
                    "Copy the file again, and start again from the last checkpoint."
                )

    def compute_fingerprint(self) -> str:
        """Return the fingerprint of the merged data set. See `IndexedDataset`."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            code = next(code for code, known in DTYPES.items() if known == self.dtype)
            counts = len(self.sizes), len(self.document_offsets)
            digest.update(struct.pack("<9sQBQQ", MAGIC, VERSION, code, *counts))
            digest.update(self.sizes.astype("<i4").data)
            place = 0
            for start in range(0, len(self.sizes), _CHUNK):
                sizes = self.sizes[start : start + _CHUNK].astype(np.int64) * self.dtype.itemsize
                ends = place + np.cumsum(sizes)
                digest.update((ends - sizes).astype("<i8").data)
                place = int(ends[-1])
            digest.update(self.document_offsets.astype("<i8").data)
            digest.update(struct.pack("<Q", place))
            for number in range(64):
                begin = max(0, place - 4096) * number // 63
                digest.update(self._read_bytes(begin, min(begin + 4096, place)))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _join_indices(self, corpus: Corpus) -> None:
        """Fill in dtype, sizes, pointers and document offsets.

        Raises:
            DataError: A shard is damaged, or its tokens have another type than those of the first.
        """
        sizes, pointers, offsets = [], [], [np.zeros(1, np.int64)]
        sequences = 0
        for number, (shard, prefix) in enumerate(zip(corpus.shards, corpus.prefixes, strict=True)):
            # Its arrays are copied and it is closed, so thousands of shards need few open files.
            opened = IndexedDataset(prefix)
            if number == 0:
                self.dtype = opened.dtype
            found = (opened.num_documents, len(opened.tokens), opened.dtype)
            if found != (shard.documents, shard.tokens, self.dtype):
                raise DataError(
                    f"{prefix} has {found[0]} documents and {found[1]} tokens of {found[2].name}, "
                    f"and {corpus.path} records {shard.documents} and {shard.tokens}, of "
                    f"{self.dtype.name} in the first shard. Preprocess the input file again."
                )
            sizes.append(opened.sizes.copy())
            pointers.append(opened.pointers + self._begins[number])
            offsets.append(opened.document_offsets[1:] + sequences)
            sequences += len(opened)
        self.sizes = np.concatenate(sizes)
        self.pointers = np.concatenate(pointers)
        self.document_offsets = np.concatenate(offsets)

    def _read_bytes(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of the concatenated .bin files."""
        content = self.tokens.view(np.uint8)
        pieces = []
        first = 0
        for at, size in zip(self._begins, self._part_bytes, strict=False):
            low = max(begin, first)
            high = min(end, first + size)
            if low < high:
                pieces.append(content[at + low - first : at + high - first].tobytes())
            first += size
        return b"".join(pieces)


def _map_files(paths: tuple[Path, ...], begins: list[int]) -> NDArray[np.uint8]:
    """Map files read-only into one range of addresses. It stays until the process ends.

    Args:
        paths: The files.
        begins: Where each begins in the range, at a page. The last one is the end of the range.

    Raises:
        DataError: The system cannot map them.
    """
    # Python's `mmap` cannot choose the address.
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    failed = ctypes.c_void_p(-1).value

    def map_range(address: int | None, length: int, flags: int, descriptor: int) -> int:
        found = library.mmap(address, length, mmap.PROT_READ, flags, descriptor, 0)
        if found == failed:
            raise DataError(
                f"{len(paths)} shards with {begins[-1]} bytes cannot be mapped "
                f"({os.strerror(ctypes.get_errno())}). Merge them with merge_datasets.py, or raise "
                "the limits vm.max_map_count and ulimit -v."
            )
        return int(found)

    if begins[-1] == 0:
        return np.empty(0, np.uint8)
    # This reserves the range, so that nothing else is mapped into it.
    start = map_range(None, begins[-1], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    for path, begin, end in zip(paths, begins, begins[1:], strict=False):
        if begin < end:
            with open_regular(path) as file:
                flags = mmap.MAP_SHARED | _MAP_FIXED
                map_range(start + begin, end - begin, flags, file.fileno())
    return np.ctypeslib.as_array((ctypes.c_uint8 * begins[-1]).from_address(start))
