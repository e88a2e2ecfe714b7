"""The indexed data set, which stores token sequences in PREFIX.bin and their index in PREFIX.idx.

Invariant: a data set that opens is complete. Header, sizes, byte pointers and document offsets are
checked against each other before a token is read. The length of both files is checked, too. A
writer's files appear under their final names only when they are complete.

Layout of .idx, little endian (Megatron's mmap format):

    magic                 9 bytes
    version               uint64
    dtype code            uint8
    number of sequences   uint64, n
    number of offsets     uint64, d
    sizes                 int32[n], tokens of each sequence
    byte pointers         int64[n], where each sequence begins in .bin
    document offsets      int64[d], the sequence at which each document begins, then n
"""

import contextlib
import glob
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.base.durable import sync_folder
from megatron.base.errors import DataError
from megatron.base.outside_file import open_regular

if TYPE_CHECKING:
    from megatron.data.cache import IndexCache
    from megatron.data.documents import DocumentRules

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# The codes are Megatron's. 6 and 7 are left out because they mean different types in different
# programs. A wrong guess would read every token wrong.
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in (
        (1, "uint8"),
        (2, "int8"),
        (3, "int16"),
        (4, "int32"),
        (5, "int64"),
        (8, "uint16"),
    )
}
_HEADER = struct.Struct("<9sQBQQ")
_AGAIN = "Preprocess the data again."
# Items of the index that a pass holds in memory at once. Each takes up to 8 bytes.
_CHUNK = 1 << 20


def choose_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that stores every id below `vocab_size`.

    The type is uint16 below 65500 ids, else int32. The limit is Megatron's, not 65536.
    """
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def get_bin_path(prefix: str | os.PathLike) -> Path:
    """Return the path of the file that holds the tokens."""
    return Path(f"{os.fspath(prefix)}.bin")


def get_idx_path(prefix: str | os.PathLike) -> Path:
    """Return the path of the file that holds the index."""
    return Path(f"{os.fspath(prefix)}.idx")


def is_manifest(prefix: str | os.PathLike) -> bool:
    """Return whether a path of data is the manifest of several data sets, as corpus.json."""
    return os.fspath(prefix).endswith(".json")


class Samples(Protocol):
    """Samples of a data set, by their numbers. `GPTDataset` describes the methods."""

    indexed: "IndexedDataset"

    def __len__(self) -> int:
        """Return the number of samples."""

    def read(
        self, samples: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.int64]
    ) -> None:
        """Read samples into rows of `out`."""

    def locate(self, sample: int, column: int) -> tuple[int, int]:
        """Return the document that holds a token of a sample, and the token's offset in it."""


class Packing(Protocol):
    """How the sequences of a data set become samples, if they are not cut."""

    def check(
        self, indexed: "IndexedDataset", seq_length: int, rules: "DocumentRules | None"
    ) -> None:
        """Check a data set, before an index is built.

        Raises:
            DataError: A flag is missing, or a sequence does not fit into a sample.
        """

    def count_samples(
        self, indexed: "IndexedDataset", documents: tuple[int, int], seq_length: int
    ) -> int:
        """Return the samples of the sequences [first, last), at least 1."""

    def open(
        self,
        indexed: "IndexedDataset",
        documents: tuple[int, int],
        seq_length: int,
        seed: int,
        num_samples: int,
        cache: "IndexCache",
    ) -> Samples:
        """Return the samples. See `GPTDataset`."""


class IndexedDataset:
    """Read-only, memory-mapped view of PREFIX.bin and PREFIX.idx.

    Opening reads all of the .idx once, and nothing of the .bin.

    Attributes:
        sizes: int32[n], the number of tokens of each sequence.
        pointers: int64[n], the byte at which each sequence begins.
        document_offsets: int64[d], the sequence at which each document begins, followed by n.
        tokens: dtype[total], all tokens end to end.
    """

    packing: Packing | None = None
    """How the sequences become samples, if `is_packed`. Who opens the data set may set it."""

    def __init__(self, prefix: str | os.PathLike) -> None:
        """Open both files and check them.

        Raises:
            DataError: a file is missing, truncated, of another format, or does not match the other.
        """
        self.prefix = os.fspath(prefix)
        self._idx = get_idx_path(prefix)
        self._bin = get_bin_path(prefix)
        for path in (self._idx, self._bin):
            with _explain_os_errors(path):
                exists = path.is_file()
            if not exists:
                raise DataError(f"{path} does not exist; {_suggest_prefix(self.prefix)}.")
        self._maps: dict[Path, mmap.mmap] = {}
        """The mapped files. A map keeps its file open even if another file replaces the path."""
        raw, self.dtype, count, offsets = self._read_header()
        # The arrays follow a header of 34 bytes, so they are not aligned. NumPy can read them
        # anyway. C++ code must load each value with memcpy.
        at = _HEADER.size
        self.sizes: NDArray[np.int32] = np.frombuffer(raw, "<i4", count, at)
        self.pointers: NDArray[np.int64] = np.frombuffer(raw, "<i8", count, at + 4 * count)
        self.document_offsets: NDArray[np.int64] = np.frombuffer(
            raw, "<i8", offsets, at + 12 * count
        )
        total = self._check_index()
        self._check_bin(total)
        # An empty file cannot be mapped.
        self.tokens: NDArray = np.empty(0, self.dtype)
        if total:
            self.tokens = np.frombuffer(self._map(self._bin), self.dtype)
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sizes)

    def __getitem__(self, index: int) -> NDArray:
        """Return all tokens of a sequence."""
        return self.get(index)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.document_offsets) - 1

    @property
    def is_packed(self) -> bool:
        """Whether the sequences are packed, and say which tokens count. See `packing`."""
        return len(self.tokens) > 0 and int(self.tokens[0]) < 0

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Return tokens [offset, offset + length) of a sequence.

        Args:
            index: Number of the sequence.
            offset: First token.
            length: Number of tokens. None means all up to the end.

        Returns:
            dtype[length], a view of the file. Nothing is copied.
        """
        size = int(self.sizes[index])
        if length is None:
            length = size - offset
        assert 0 <= offset <= offset + length <= size, (
            f"tokens {offset} + {length} of sequence {index}, which has {size}"
        )
        start = int(self.pointers[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def register(self, registry: Any) -> None:
        """Add messages and sets of files to a `DatasetRegistry`. A single .bin needs neither."""

    def check_not_truncated(self) -> None:
        """Check that both files still have the bytes that were mapped.

        If a program reads a mapped byte that the file no longer has, SIGBUS ends the process.
        Python cannot turn this into an error. So call this method before a batch is read.

        Raises:
            DataError: A file was truncated.
        """
        for path, mapped in self._maps.items():
            # This is the size of the mapped file, and not of a file that replaced it.
            found = mapped.size()
            if found < len(mapped):
                raise DataError(
                    f"{path} was truncated while it is in use: it had {len(mapped)} bytes and has "
                    f"{found} now. Copy the file again, and start again from the last checkpoint."
                )

    def compute_fingerprint(self) -> str:
        """Return 32 hexadecimal digits that change when the data change.

        The digest covers all of the .idx, the size of the .bin and 4 KiB at 64 places of the .bin.
        The path and the time of change are left out, so that a data set may be copied or moved.
        """
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            with open_regular(self._idx) as file:
                while block := file.read(_CHUNK):
                    digest.update(block)
            size = self._bin.stat().st_size
            digest.update(struct.pack("<Q", size))
            # Reading the complete .bin can take hours. Samples find another corpus of equal shape.
            # content.py digests all bytes in the background.
            with open_regular(self._bin) as file:
                for place in range(64):
                    # The first sample begins at byte 0, the last one ends with the file.
                    file.seek(max(0, size - 4096) * place // 63)
                    digest.update(file.read(4096))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _map(self, path: Path) -> mmap.mmap:
        """Return a file that is not empty as mapped, read-only memory."""
        with _explain_os_errors(path), open_regular(path) as file:
            self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]

    def _read_header(self) -> tuple[NDArray[np.uint8], np.dtype, int, int]:
        """Return the mapped bytes, the dtype, the number of sequences and of document offsets."""
        found = self._idx.stat().st_size
        if found < _HEADER.size:
            raise DataError(
                f"{self._idx} has {found} bytes, less than the {_HEADER.size} of its header: it is "
                f"truncated. {_AGAIN}"
            )
        raw = np.frombuffer(self._map(self._idx), np.uint8)
        magic, version, code, count, offsets = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        if magic != MAGIC:
            raise DataError(
                f"{self._idx} begins with {magic!r}, not with {MAGIC!r}: it is not the index of an "
                "mmap data set."
            )
        if version != VERSION:
            raise DataError(
                f"{self._idx} has format version {version}; only version {VERSION} is supported."
            )
        if code not in DTYPES:
            reason = ""
            if code in (6, 7):
                reason = " (6 and 7 mean different types in different programs)"
            known = ", ".join(f"{c} {d.name}" for c, d in DTYPES.items())
            raise DataError(
                f"{self._idx} has dtype code {code}{reason}; supported are {known}. {_AGAIN}"
            )
        # An exact length finds a file that was truncated by a full disk or an interrupted copy.
        expected = _HEADER.size + 12 * count + 8 * offsets
        if found != expected:
            what = "truncated" if found < expected else "longer than its header states"
            raise DataError(
                f"{self._idx} has {found} bytes, but {count} sequences and {offsets} document "
                f"offsets need {expected}: it is {what}. {_AGAIN}"
            )
        return raw, DTYPES[code], count, offsets

    def _check_index(self) -> int:
        """Check that sizes, pointers and document offsets agree. Return the number of tokens."""
        width = self.dtype.itemsize
        expected = 0
        for start in range(0, len(self.sizes), _CHUNK):
            # int64, since the sum of a chunk's int32 sizes can overflow.
            sizes = self.sizes[start : start + _CHUNK].astype(np.int64)
            if sizes.min() < 0:
                raise DataError(
                    f"{self._idx}: sequence {start + int(sizes.argmin())} has size {sizes.min()}. "
                    f"{_AGAIN}"
                )
            ends = expected + np.cumsum(sizes) * width
            begins = ends - sizes * width
            wrong = np.flatnonzero(begins != self.pointers[start : start + _CHUNK])
            if len(wrong):
                # Only the first one is reported. The sequences after it are usually wrong, too.
                which = start + int(wrong[0])
                raise DataError(
                    f"{self._idx}: sequence {which} points to byte {self.pointers[which]}, but the "
                    f"sizes before it add up to {begins[wrong[0]]}. {_AGAIN}"
                )
            expected = int(ends[-1])
        # A document has at least 0 sequences, so equal offsets are allowed.
        ends = self.document_offsets
        ordered = (
            len(ends) > 0
            and ends[0] == 0
            and ends[-1] == len(self.sizes)
            and bool(np.all(ends[1:] >= ends[:-1]))
        )
        if not ordered:
            described = f"from {ends[0]} to {ends[-1]}" if len(ends) else "none"
            raise DataError(
                f"{self._idx}: document offsets ({described}) must rise from 0 to the number of "
                f"sequences, {len(self.sizes)}. {_AGAIN}"
            )
        return expected // width

    def _check_bin(self, total: int) -> None:
        # A longer file is an error as well, because it belongs to another data set's index.
        found = self._bin.stat().st_size
        expected = total * self.dtype.itemsize
        if found != expected:
            what = "truncated" if found < expected else "not the file that this index was made for"
            raise DataError(
                f"{self._bin} has {found} bytes, but the {total} {self.dtype.name} tokens of "
                f"{self._idx.name} need {expected}: it is {what}. Copy both files again, or "
                "preprocess the data again."
            )


class IndexedDatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx.

    Memory does not grow with the corpus. Use it as a context manager, or call `finalize`. Until
    `finalize` everything is in files PREFIX.*.partial. Leaving the context by an exception removes
    them.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type | str) -> None:
        """Create the partial files.

        Raises:
            DataError: the format has no code for `dtype`.
        """
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            raise DataError(
                f"tokens cannot be stored as {self.dtype.name}; use one of "
                f"{', '.join(d.name for d in DTYPES.values())}."
            )
        self._code = codes[0]
        self._limits = (int(np.iinfo(self.dtype).min), int(np.iinfo(self.dtype).max))
        # The counts come first in .idx, but are known last. Sizes and documents therefore go to
        # files of their own, and `finalize` assembles the .idx from them.
        self._partial = {
            part: Path(f"{self.prefix}.{part}.partial")
            for part in ("bin", "idx", "sizes", "documents")
        }
        self._files: dict[str, BinaryIO] = {
            part: _create(path) for part, path in self._partial.items()
        }
        self._files["documents"].write(struct.pack("<q", 0))
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> "IndexedDatasetWriter":
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finalize after success, discard after an exception."""
        if kind is None:
            self.finalize()
        else:
            self.discard()

    def add_document(self, ids: ArrayLike) -> None:
        """Append one document of one sequence.

        Raises:
            DataError: an id does not fit the dtype.
        """
        tokens = np.asarray(ids)
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: ArrayLike, sizes: Sequence[int] | NDArray) -> None:
        """Append documents of one sequence each.

        Args:
            tokens: All their tokens end to end.
            sizes: The number of tokens of each document.

        Raises:
            DataError: an id does not fit the dtype, or a document is too long for the format.
        """
        lengths = np.asarray(sizes, np.int64)
        first = self.num_sequences + 1
        ids = np.asarray(tokens)
        assert int(lengths.sum()) == ids.size, (
            f"sizes add up to {int(lengths.sum())}, there are {ids.size} tokens"
        )
        self._write_tokens(ids)
        self._write_sizes(lengths)
        self._add_offsets(np.arange(first, first + len(lengths), dtype=np.int64))

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all sequences and documents of another data set."""
        before = self.num_sequences
        # Copied in chunks, so that a data set larger than memory can be merged.
        for start in range(0, len(other), _CHUNK):
            sizes = other.sizes[start : start + _CHUNK].astype(np.int64)
            begin = int(other.pointers[start]) // other.dtype.itemsize
            end = begin + int(sizes.sum())
            for at in range(begin, end, 16 * _CHUNK):
                self._write_tokens(other.tokens[at : min(at + 16 * _CHUNK, end)])
            self._write_sizes(sizes)
        # The first offset of the other data set is 0 and equals this one's last offset.
        self._add_offsets(other.document_offsets[1:] + before)

    def finalize(self) -> None:
        """Write the index, sync everything to disk and give both files their final names."""
        # A second call has nothing to do.
        if not self._files:
            return
        self._write_index()
        for part in ("bin", "idx"):
            self._files[part].flush()
            os.fsync(self._files[part].fileno())
        self._close()
        # A crash between the renames must leave no .idx, since an old one does not describe the new
        # .bin. The .idx is renamed last, because readers need both files.
        get_idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._partial["bin"], get_bin_path(self.prefix))
        os.replace(self._partial["idx"], get_idx_path(self.prefix))
        self._partial["sizes"].unlink()
        self._partial["documents"].unlink()
        sync_folder(get_idx_path(self.prefix).parent)

    def discard(self) -> None:
        """Remove everything that was written so far."""
        self._close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def _write_tokens(self, tokens: NDArray) -> None:
        if tokens.size and tokens.dtype != self.dtype:
            # astype would wrap a large id around without an error, so the range is checked first.
            low = int(tokens.min())
            high = int(tokens.max())
            if low < self._limits[0] or high > self._limits[1]:
                raise DataError(
                    f"token ids {low} to {high} do not fit {self.dtype.name}, the type that "
                    f"{self.prefix}.bin is written in."
                )
        self._files["bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self.num_tokens += tokens.size

    def _write_sizes(self, sizes: NDArray[np.int64]) -> None:
        if len(sizes) and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"a sequence of {int(sizes.max())} tokens is longer than the format's limit of "
                f"{np.iinfo(np.int32).max}. Split the document."
            )
        self._files["sizes"].write(sizes.astype("<i4").tobytes())
        self.num_sequences += len(sizes)

    def _add_offsets(self, offsets: NDArray[np.int64]) -> None:
        self._files["documents"].write(offsets.astype("<i8").tobytes())
        self.num_documents += len(offsets)

    def _write_index(self) -> None:
        # The parts are read back below through other file objects, which need flushed data.
        for part in ("sizes", "documents"):
            self._files[part].flush()
        out = self._files["idx"]
        out.write(
            _HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1)
        )
        for block in _read_blocks(self._partial["sizes"]):
            out.write(block)
        # Pointers are the running sum of the sizes, so they are computed here in a second pass.
        place = 0
        for block in _read_blocks(self._partial["sizes"]):
            ends = (
                place + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self.dtype.itemsize
            )
            out.write(np.concatenate(([place], ends[:-1])).astype("<i8").tobytes())
            place = int(ends[-1])
        for block in _read_blocks(self._partial["documents"]):
            out.write(block)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}


def _create(path: Path) -> BinaryIO:
    """Open a new file for writing.

    An existing file is removed first. Writing through a link would overwrite the file it points to.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666),
        "wb",
    )


def _read_blocks(path: Path) -> Iterable[bytes]:
    with open_regular(path) as file:
        while block := file.read(4 * _CHUNK):
            yield block


@contextlib.contextmanager
def _explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); correct the path, the permissions or the "
            "file system."
        ) from error


def _suggest_prefix(prefix: str) -> str:
    """Return a hint what to give instead of a path that is not a data set."""
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and get_idx_path(path.with_suffix("")).is_file():
        return f"leave out the suffix {path.suffix}: {path.with_suffix('')}"
    if path.is_file():
        return (
            f"{path} is not an indexed data set; convert it with tools/preprocess_data.py, and "
            "give the path that this tool prints"
        )
    # The tool that writes data sets adds the key and `_document` to the path that it is given.
    similar = sorted(path.parent.glob(f"{glob.escape(path.name)}_*_document.idx"))
    if similar:
        return f"there is {similar[0].with_suffix('')}"
    if path.is_dir():
        return (
            f"{path} is a folder; convert its texts with tools/preprocess_data.py, or read its "
            "files as they are with --dataset-format parquet, arrow or jsonl"
        )
    return "a data set is given by its path without .bin and .idx, and needs both"
